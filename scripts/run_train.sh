#!/usr/bin/env bash
# One node's part of a training run, from start to exit status; see --help.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat <<'HELP'
Usage: scripts/run_train.sh CONFIG.toml [--section.key value ...]

Runs train.py on this node under torchrun, one rank per GPU. The same command, started again, goes
on from the last checkpoint (checkpoint.enable = true). From the environment:

    NPROC          ranks on this node; default: its GPUs, or 2 where there are none
    NNODES         nodes of the run; default 1
    RDZV_ENDPOINT  host:port of one of the nodes, the same on all; needed for NNODES above 1
    RDZV_ID        name of the run, the same on all nodes; default "striped-cp"
    MAX_RESTARTS   how often torchrun starts the ranks again after a failure; default 0
    GRACE_SECONDS  how long a signalled run may take to save; default 600

SIGTERM, SIGUSR1 or Ctrl-C: all ranks finish their step, save a checkpoint, and the status is 75.
Ctrl-C twice: at once. Status 0: trained to the end; 2: a setting or a file is wrong; anything else:
torchrun says why, last on the screen.
HELP
}

if (($# == 0)) || [[ $1 == --help || $1 == -h ]]; then
    usage
    exit 0
fi
if [[ -z ${VIRTUAL_ENV:-} && -f .venv/bin/activate ]]; then
    source .venv/bin/activate
fi
config=$1
shift

if [[ -z ${NPROC:-} ]]; then
    NPROC=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
rendezvous=(--standalone)
if ((${NNODES:-1} > 1)); then
    if [[ -z ${RDZV_ENDPOINT:-} ]]; then
        echo "NNODES=$NNODES: set RDZV_ENDPOINT to host:port of one of the nodes" >&2
        exit 2
    fi
    rendezvous=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT"
        --rdzv-id "${RDZV_ID:-striped-cp}")
fi

# Activations of long sequences come in few, large and changing sizes: let segments grow.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A store of its own for every restart: in the shared one stand the addresses of dead ranks.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Here torchrun leaves the error that came first, with its exit status, and a rank a status after
# which torchrun is not to start the ranks again.
TORCHELASTIC_ERROR_FILE=$(mktemp)
STRIPED_CP_STATUS_FILE=$(mktemp)
export TORCHELASTIC_ERROR_FILE STRIPED_CP_STATUS_FILE
trap 'rm -f "$TORCHELASTIC_ERROR_FILE" "$STRIPED_CP_STATUS_FILE"' EXIT

launcher=
asked=
ask() {
    if [[ -z $launcher ]]; then
        exit 75
    elif [[ $1 == INT && -n $asked ]]; then
        kill -KILL -- "-$launcher" || true
    else
        asked=1
        kill -TERM "$launcher" || true
    fi
}
for name in TERM USR1 INT; do
    trap "ask $name" "$name"
done

# A session of its own: Ctrl-C reaches this script only, which decides what it means.
setsid torchrun "${rendezvous[@]}" --nproc-per-node "$NPROC" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --shutdown-timeout "${GRACE_SECONDS:-600}" \
    train.py --job.config_file "$config" "$@" &
launcher=$!

# A signal ends `wait` before the launcher has ended.
status=0
wait "$launcher" || status=$?
while kill -0 "$launcher" 2>/dev/null; do
    status=0
    wait "$launcher" || status=$?
done
# torchrun's own status is 1 whatever the reason.
reason=$(sed -n 's/.*"errorCode": \([0-9]*\).*/\1/p' "$TORCHELASTIC_ERROR_FILE")
if ((status != 0)) && [[ -n $asked ]]; then
    status=75
elif ((status != 0)) && [[ -s $STRIPED_CP_STATUS_FILE ]]; then
    status=$(<"$STRIPED_CP_STATUS_FILE")
elif ((status != 0)) && [[ -n $reason ]]; then
    status=$reason
fi
exit "$status"
