"""What this project adds to the start of a run: torchtitan's own train.py, once more.

The same debug model and corpus with stock torchtitan on a CPU host (only the shim that lets it run
there is ours). To compare whole processes, one step each, in turn:

    LAUNCH="torchrun --nproc_per_node 2"
    CONFIG="--job.config_file train_configs/debug_cpu.toml --training.steps 1"
    $LAUNCH train.py $CONFIG
    $LAUNCH docs/experiments/first_step.py
"""

import sys

import recipes  # noqa: F401  prepares the host

ARGS = """
--job.dump_folder outputs/stock --model.name llama3 --model.flavor debugmodel
--model.hf_assets_path assets/tokenizer --training.dataset c4_test
--training.dataset_path assets/corpus --training.seq_len 1024 --training.local_batch_size 4
--training.steps 1 --training.mixed_precision_param float32 --metrics.enable_tensorboard
--activation_checkpoint.mode none
"""

if __name__ == "__main__":
    sys.argv[1:1] = ARGS.split()
    from torchtitan.train import Trainer, main

    main(Trainer)
