"""The Trainer, or TRL's SFTTrainer, over packed documents on the ring of all ranks."""

from __future__ import annotations

import itertools
import os
import tempfile
from typing import Any

import datasets
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments

from striped_cp.hf import RingCollator, RingTrainerMixin, enable
from tests.helpers.hf_ring import VOCABULARY, make_model

STEPS = 10


def documents() -> datasets.Dataset:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(5, 40, (120,), generator=generator).tolist()
    rows = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return datasets.Dataset.from_dict({"input_ids": rows})


def packed_by_trl_format(data: datasets.Dataset) -> datasets.Dataset:
    """Four documents a row, with their lengths, as TRL packs them."""
    groups = [data["input_ids"][i : i + 4] for i in range(0, len(data), 4)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [list(itertools.chain(*group)) for group in groups],
            "seq_lengths": [[len(document) for document in group] for group in groups],
        }
    )


def train(kind: str, cp: int) -> dict[str, Any]:
    """Losses of every step and the norm of the weights, of a run with rings of `cp` ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the group exists already
    mesh = init_device_mesh("cpu", (world // cp, cp), mesh_dim_names=("dp", "cp"))["cp"]
    model = enable(make_model("llama"), mesh)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": STEPS,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2 * cp // world,
            "per_device_eval_batch_size": 1,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "remove_unused_columns": kind == "sft",
        }
        data = documents()
        collator = RingCollator(mesh)
        trainer: Any
        if kind == "sft":
            from trl import SFTConfig, SFTTrainer

            class Sft(RingTrainerMixin, SFTTrainer):
                pass

            args = SFTConfig(**settings, packing=True, max_length=96, eval_packing=True)
            trainer = Sft(
                model=model,
                args=args,
                train_dataset=data,
                eval_dataset=data.select(range(40)),
                data_collator=collator,
                processing_class=_tokenizer(),
            )
        else:

            class Plain(RingTrainerMixin, Trainer):
                pass

            trainer = Plain(
                model=model,
                args=TrainingArguments(**settings),
                train_dataset=packed_by_trl_format(data),
                eval_dataset=packed_by_trl_format(data.select(range(40))),
                data_collator=collator,
            )
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "gradients": [
            entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry
        ],
        "evaluated": evaluated,
        "weights": [p.double().norm().item() for p in model.parameters()],
    }


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    from tests import ROOT

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
