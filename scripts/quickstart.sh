#!/usr/bin/env bash
# From a fresh machine to a finished training run; see --help.
set -euo pipefail
call_folder=$PWD
cd "$(dirname "$0")/.."

usage() {
    cat <<'HELP'
Usage: scripts/quickstart.sh [--section.key value ...]

Makes .venv, installs this project, and trains the debug model on the bundled
corpus with striped context parallelism: on all GPUs of this machine, or on two
CPU processes where there is none. Further arguments go to train.py, for example

    scripts/quickstart.sh --training.steps 20

A second call uses the same environment. PYTHON names the interpreter (3.10 or
later) that makes it; the default is python3.
HELP
}

dump_folder=$PWD/outputs/quickstart/$(date +%Y%m%d-%H%M%S)
previous=
for argument in "$@"; do
    case $argument in
        --help | -h)
            usage
            exit 0
            ;;
        --job.dump_folder=*) dump_folder=${argument#*=} ;;
    esac
    [[ $previous != --job.dump_folder ]] || dump_folder=$argument
    previous=$argument
done

# Named by its whole path: the folder of the call is not the repository's.
[[ $dump_folder == /* ]] || dump_folder=$call_folder/$dump_folder

scripts/install.sh
source .venv/bin/activate

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if ((gpus > 0)); then
    ranks=$gpus
    # Token stripes take any multiple of the number of ranks.
    settings=(--job.config_file train_configs/debug_gpu.toml
        --parallelism.context_parallel_degree "$ranks"
        --training.seq_len $((8192 / ranks * ranks)))
else
    ranks=2
    settings=(--job.config_file train_configs/debug_cpu.toml)
fi

# One thread per rank, which torchrun would choose too, but not without a banner.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# They meet over a file: torchrun's own store would listen on every interface of this machine.
meeting=$(mktemp -u)
trap 'rm -f "$meeting"' EXIT
torchrun --rdzv-backend c10d --rdzv-endpoint "$meeting" --rdzv-conf store_type=file \
    --rdzv-id quickstart --nproc_per_node "$ranks" train.py "${settings[@]}" "$@" --job.dump_folder "$dump_folder"

printf '\nDone. The TensorBoard files are in %s; look at them with\n\n    %q --logdir %q --host localhost\n' \
    "$dump_folder/tb" "$PWD/.venv/bin/tensorboard" "$dump_folder/tb"
