#!/usr/bin/env bash
# Makes .venv with this project and its dependencies; does nothing where that is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat <<'HELP'
Usage: scripts/install.sh [EXTRA]

Makes .venv and installs this project into it, with the optional dependencies of
EXTRA: "train" (default), or "dev" for tests and checks as well. PYTHON names the
interpreter (3.10 or later).
HELP
}

case ${1:-} in
    --help | -h)
        usage
        exit 0
        ;;
esac
extra=${1:-train}
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "Python 3.10 or later is needed, $python is $("$python" --version 2>&1 || true)." >&2
    echo "Set PYTHON to another interpreter." >&2
    exit 2
fi

# One stamp per set of dependencies, with the hash of what they were installed from.
stamp=.venv/.installed-$extra
wanted=$("$python" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')
if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi
if [[ ! -x .venv/bin/python ]]; then
    echo "Making .venv" >&2
    "$python" -m venv .venv
fi
echo "Installing into .venv (a few minutes the first time)" >&2
.venv/bin/python -m pip install -qq --disable-pip-version-check --editable ".[$extra]"
echo "$wanted" >"$stamp"
