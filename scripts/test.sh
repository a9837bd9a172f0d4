#!/usr/bin/env bash
# From a fresh machine to a finished test run; see --help.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat <<'HELP'
Usage: scripts/test.sh [--all] [pytest arguments]

Makes .venv, installs this project with its test dependencies, and runs the tests.
They see no GPU but for those that need one, which come last, on a machine that
has some. --all runs the slow ones too.
Further arguments go to pytest, for example

    scripts/test.sh tests/unit -k tiles
HELP
}

selection=(-m "not slow")
case ${1:-} in
    --help | -h)
        usage
        exit 0
        ;;
    --all)
        selection=()
        shift
        ;;
esac

scripts/install.sh dev
# One thread per process: tests run in parallel, and many of them start ranks of their own.
export OMP_NUM_THREADS=1
.venv/bin/python -m pytest --numprocesses 2 --dist worksteal ${selection[@]+"${selection[@]}"} "$@"
if (($# == 0)) && .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    .venv/bin/python -m pytest -m gpu
fi
