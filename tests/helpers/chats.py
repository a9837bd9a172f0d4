"""Tokenizers with the chat templates of models, conversations, and what of them is learned.

The templates are those that the models ship; trl has copies of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import trl

from recipes.data.tokens import Tokenizer
from tests import ROOT

TEMPLATES = Path(trl.__file__).parent / "chat_templates"

# name: (trl's file, BOS, EOS, special tokens, tokens that are not special)
KINDS: dict[str, tuple[str, str | None, str, list[str], list[str]]] = {
    "Llama 3.1": (
        "llama3_1",
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        [],
    ),
    "Qwen3": (
        "qwen3",
        None,
        "<|im_end|>",
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"],
    ),
    "gpt-oss": (
        "gptoss",
        "<|startoftext|>",
        "<|return|>",
        [
            *("<|startoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
            *("<|return|>", "<|call|>", "<|constrain|>"),
        ],
        [],
    ),
}


def chat_tokenizer(folder: Path, kind: str) -> Tokenizer:
    """The bundled tokenizer with a model's special tokens and template, of 2,048 tokens too."""
    template, bos, eos, special, other = KINDS[kind]
    content = json.loads((ROOT / "assets/tokenizer/tokenizer.json").read_text())
    count = len([*special, *other])
    content["model"]["merges"] = content["model"]["merges"][:-count]
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {t: i for t, i in vocabulary.items() if i < 2048 - count}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(other)
    assert tokenizer.get_vocab_size() == 2048
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": bos, "eos_token": eos}
    config = {key: value for key, value in names.items() if value}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = (TEMPLATES / f"{template}.jinja").read_text()
    (folder / "chat_template.jinja").write_text(text)
    return Tokenizer(str(folder))


def message(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, **({} if content is None else {"content": content}), **more}


def call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return message("assistant", tool_calls=[{"type": "function", "function": function}])


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Its name."}},
            "required": ["town"],
        },
    },
}

# (messages, tools)
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([message("user", "Hello?"), message("assistant", "Good morning.")], None),
    "system": (
        [
            message("system", "You are the assistant of Mr. Bennet."),
            message("user", "Who\n\nis he?\n"),
            message("assistant", "  A truth caf\u00e9 \u4e2d\u6587 \U0001f600\U0001f600!  "),
            message("user", "assistant\n\nassistant"),
            message("assistant", "user"),
        ],
        None,
    ),
    "reasoning": (
        [
            message("user", "Two and two?"),
            message("assistant", "Four.", reasoning_content="Add them."),
            message("user", "And three?"),
            message("assistant", "Seven.", thinking="Add again."),
        ],
        None,
    ),
    "tools": (
        [
            message("system", "Be brief."),
            message("user", "The weather in Bath?"),
            call("weather", {"town": "Bath", "days": [1, None]}),
            message("tool", "sunny", name="weather"),
            message("assistant", "It is sunny."),
            message("user", "And in Meryton?"),
            call("weather", {"town": "Meryton"}),
        ],
        [WEATHER],
    ),
    "two calls": (
        [
            message("user", "Bath, then Meryton?"),
            call("weather", '{"town": "Bath"}'),
            message("tool", "sunny", name="weather"),
            call("weather", {"town": "Meryton"}),
            message("tool", "rain", name="weather"),
            message("assistant", "Sunny, and rain."),
        ],
        None,
    ),
}


def learned_by_reading(kind: str, tokenizer: Tokenizer, ids: list[int]) -> list[bool]:
    """Which tokens the assistant generates, found by reading the tokens one after the other."""
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    return list({"Llama 3.1": _llama, "Qwen3": _chatml, "gpt-oss": _harmony}[kind](pieces))


def _llama(pieces: list[str]) -> Iterator[bool]:
    state, header = "outside", ""
    for piece in pieces:
        if piece == "<|start_header_id|>":
            state, header = "header", ""
        elif piece == "<|end_header_id|>":
            state, header = "line feeds" if header == "assistant" else "outside", ""
        elif state == "turn":
            yield True
            if piece in ("<|eot_id|>", "<|eom_id|>"):
                state = "outside"
            continue
        else:
            header += piece
            if state == "line feeds" and header == "\n\n":
                state = "turn"
        yield False


def _chatml(pieces: list[str]) -> Iterator[bool]:
    state, header = "outside", ""
    for piece in pieces:
        if piece == "<|im_start|>":
            state, header = "header", ""
        elif state == "turn":
            yield True
            if piece == "<|im_end|>":
                state = "outside"
            continue
        elif state == "header":
            header += piece
            if "\n" in header:
                state = "turn" if header.startswith("assistant\n") else "outside"
                yield state == "turn" and header != "assistant\n"
                continue
        yield False


def _harmony(pieces: list[str]) -> Iterator[bool]:
    """After an analysis its own turn goes on with the next message of the assistant."""
    state, header, goes_on = "outside", "", False
    for piece in pieces:
        if piece == "<|start|>":
            state, header = "header", ""
            yield goes_on
            continue
        if state == "turn":
            yield True
            header += piece
            if piece in ("<|end|>", "<|return|>", "<|call|>"):
                state = "outside"
                goes_on = piece == "<|end|>" and header.startswith("<|channel|>analysis")
                header = ""
            continue
        if state == "header":
            header += piece
            if header == "assistant":
                state, header = "turn", ""
                yield goes_on
                continue
            if not "assistant".startswith(header):
                state = "outside"
        yield goes_on
