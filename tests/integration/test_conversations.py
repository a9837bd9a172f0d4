"""Conversations: prepared, learned by two ranks, exported, and answered by transformers."""

import json
import subprocess
import sys

import torch
from transformers import AutoTokenizer

from tests import ROOT
from tests.helpers.hf_models import load_model
from tests.helpers.runs import TINY, train

ANSWERS = {
    "Who is rich?": "Mr. Darcy.",
    "Who is silly?": "Mr. Collins.",
    "Who is witty?": "Elizabeth.",
}


def test_a_model_answers_as_its_conversations_do(tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": answer},
                    ]
                }
            )
            + "\n"
            for question, answer in ANSWERS.items()
        )
    )
    prepare = [sys.executable, "scripts/prepare_documents.py", str(chats), "--workers", "1"]
    options = ["--output", str(tmp_path / "chats"), "--text-column", "messages"]
    done = subprocess.run(
        [*prepare, *options, "--loss-on", "assistant"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    run = train(
        2,
        tmp_path / "run",
        *TINY,
        *("--training.dataset", "local", "--training.dataset_path", str(tmp_path / "chats")),
        *("--documents.loss_on", "assistant", "--training.steps", "60", "--optimizer.lr", "3e-3"),
        *("--checkpoint.enable", "--checkpoint.last_save_in_hf", "--checkpoint.interval", "100"),
        "--checkpoint.last_save_model_only",
        timeout=280,
    )
    assert run.scalars["loss_metrics/global_avg_loss"][60] < 0.05
    folder = tmp_path / "run/checkpoint/step-60"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load_model(folder)
    for question, answer in ANSWERS.items():
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        said = tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :])
        assert said == f"{answer}<|end_of_text|>"
