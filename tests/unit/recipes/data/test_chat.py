"""Conversations: rendered as transformers does it, and learned where the assistant speaks."""

import json
import logging
import re
from collections import Counter
from copy import deepcopy
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from recipes.data.chat import ChatTemplate
from recipes.data.content import Conversation
from recipes.data.dataset import build_dataloader, build_validation_dataloader
from recipes.data.labels import IGNORE
from recipes.data.readers import read_records
from recipes.data.records import BadDocument
from recipes.data.targets import are_targets, token_ids
from recipes.data.tokens import Tokenizer, encode
from recipes.preflight import load_config
from tests import ROOT
from tests.helpers.chats import (
    CHATS,
    KINDS,
    TEMPLATES,
    WEATHER,
    call,
    chat_tokenizer,
    learned_by_reading,
    message,
)
from tests.helpers.documents import fingerprint, job, write_jsonl


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {kind: chat_tokenizer(tmp_path_factory.mktemp("chat"), kind) for kind in KINDS}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encoded(tokenizer, path, column="messages", loss_on="assistant"):
    return [encode(tokenizer, record, loss_on) for record in read_records(path, column)]


def texts(tokenizer, tokens):
    """The learned parts of a document, decoded."""
    learned = np.flatnonzero(are_targets(tokens))
    runs = np.split(learned, np.flatnonzero(np.diff(learned) > 1) + 1)
    return [tokenizer.decode(tokens[run].tolist(), skip_special_tokens=False) for run in runs]


class Summer(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [False, True])
def test_text_and_tokens_are_those_of_transformers(tokenizers, monkeypatch, kind, chat, prompt):
    monkeypatch.setattr(chat_template_utils, "datetime", Summer)
    tokenizer = tokenizers[kind]
    other = PreTrainedTokenizerFast.from_pretrained(tokenizer.tokenizer_path)
    messages, tools = CHATS[chat]
    if chat == "two calls":  # the first has its arguments as text, which templates would quote
        messages = [*messages[:1], call("weather", {"town": "Bath"}), *messages[2:]]
    expected = other.apply_chat_template(
        messages, tools, tokenize=False, add_generation_prompt=prompt
    )
    assert tokenizer.chat.render(Conversation(CHATS[chat][0], tools), prompt) == expected
    ids, _ = tokenizer.encode_with_offsets(expected)
    assert ids.tolist() == other(expected, add_special_tokens=False).input_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", CHATS)
def test_what_is_learned_is_what_the_assistant_generates(tokenizers, tmp_path, kind, chat):
    tokenizer = tokenizers[kind]
    messages, tools = CHATS[chat]
    path = write(tmp_path / "a.jsonl", [{"messages": messages, "tools": tools}])
    whole, turns, last = (
        encoded(tokenizer, path, loss_on=loss_on)[0] for loss_on in ("all", "assistant", "last")
    )
    assert are_targets(whole).all()
    assert np.array_equal(token_ids(turns), whole)
    assert np.array_equal(token_ids(last), whole)
    reference = learned_by_reading(kind, tokenizer, whole.tolist())
    assert are_targets(turns).tolist() == reference
    parts = texts(tokenizer, turns)
    assert texts(tokenizer, last) == parts[-1:]
    assert len(parts) == sum(m["role"] == "assistant" for m in messages)
    ends = {"Llama 3.1": "<|eot_id|>", "Qwen3": "<|im_end|>"}
    assert all(part.endswith(ends.get(kind, "|>")) for part in parts)


LEARNED = {
    "Llama 3.1": [
        '{"name": "weather", "parameters": {"town": "Bath"}}<|eot_id|>',
        '{"name": "weather", "parameters": {"town": "Meryton"}}<|eot_id|>',
        "Sunny, and rain.<|eot_id|>",
    ],
    "Qwen3": [
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Bath"}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Meryton"}}\n</tool_call>'
        "<|im_end|>",
        "<think>\n\n</think>\n\nSunny, and rain.<|im_end|>",
    ],
    "gpt-oss": [
        ' to=functions.weather<|channel|>commentary json<|message|>{"town": "Bath"}<|call|>',
        ' to=functions.weather<|channel|>commentary json<|message|>{"town": "Meryton"}<|call|>',
        "<|channel|>final<|message|>Sunny, and rain.<|return|>",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_learned_parts_to_look_at(tokenizers, tmp_path, kind):
    path = write(tmp_path / "a.jsonl", [{"messages": CHATS["two calls"][0]}])
    (tokens,) = encoded(tokenizers[kind], path)
    assert texts(tokenizers[kind], tokens) == LEARNED[kind]


WORDS = st.text("ab <|>\n\u00e9\U0001f600{}", max_size=12).map(lambda text: f"w{text}w")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_conversation(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    messages = []
    if data.draw(st.booleans()):
        messages.append(message("system", data.draw(WORDS)))
    for _ in range(data.draw(st.integers(1, 4))):
        messages += [message("user", data.draw(WORDS)), message("assistant", data.draw(WORDS))]
        if data.draw(st.booleans()):
            messages[-1]["reasoning_content"] = data.draw(WORDS)
    text, spans = tokenizer.chat.turns(Conversation(messages), tuple(tokenizer.special_tokens))
    ids, offsets = tokenizer.encode_with_offsets(text)
    learned = [any(end > a and begin < b for a, b in spans) for begin, end in offsets]
    assert learned == learned_by_reading(kind, tokenizer, ids.tolist())
    assert "".join(text[b:e] for b, e in offsets if e > b).startswith(text[:3])


# Words that stand nowhere else: of the assistant, and of the others.
SAID = [message("user", "QUESTION"), message("assistant", "ANSWER"), message("user", "AGAIN")]
SAID.append(message("assistant", "SECOND"))


def test_of_every_template_the_assistant_is_learned_or_it_is_refused_by_name():
    accepted = []
    for path in sorted(TEMPLATES.glob("*.jinja")):
        template = ChatTemplate(
            path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}, path.stem
        )
        text, spans, refusal = "", [], f"{path.stem}: this chat template "
        try:
            text, spans = template.turns(Conversation(SAID), ["</s>"])
        except ValueError as error:
            refusal = str(error)
        if not spans:
            assert re.match(f"{path.stem}: this chat template .", refusal)
            continue
        learned = "".join(text[begin:end] for begin, end in spans)
        assert learned.count("ANSWER") == learned.count("SECOND") == 1, path
        assert "QUESTION" not in learned, path
        assert "AGAIN" not in learned, path
        accepted.append(path.stem)
    assert {"gemma3", "glm4moe", "gptoss", "llama3_2", "phi3_5", "qwen2_5", "qwen3"} <= {*accepted}
    assert {"deepseek_r1_distill_training", "qwen3_training"} <= {*accepted}
    assert len(accepted) > 40


def refused(name, messages, tools=None):
    text = (TEMPLATES / f"{name}.jinja").read_text()
    with pytest.raises(ValueError, match=f"^{name}: this chat template") as info:
        ChatTemplate(text, {"bos_token": "<s>"}, name).turns(Conversation(messages, tools), [])
    return str(info.value)


def test_templates_of_which_turns_cannot_be_learned():
    """Reasoning that the prompt begins and the template drops: nobody would generate that turn."""
    assert "is not prefix-stable: message 2 does not begin with the prompt for it, " in refused(
        "deepseek_r1_distill", SAID
    )
    assert "has no place for tools" in refused("llama3", SAID, [WEATHER])
    calls = [SAID[0], call("weather", {"town": "Bath"})]
    assert "does not write tool_calls of message 2" in refused("llama3", calls)
    # One of the two does not stand for the other; nor where all is learned.
    both = [SAID[0], {**call("weather", {"town": "Bath"}), "content": "I look it up."}]
    assert "does not write tool_calls of message 2" in refused("llama3", both)
    template = ChatTemplate(
        (TEMPLATES / "llama3.jinja").read_text(), {"bos_token": "<s>"}, "llama3"
    )
    with pytest.raises(ValueError, match="does not write tool_calls of message 2"):
        template.render(Conversation(both))
    # The answer of the tool stands in the assistant's turn.
    answered = [*calls, message("tool", "sunny", name="weather"), SAID[1]]
    assert "message 3, or writes it with another one" in refused("diffusion_gemma", answered)
    assert "refuses it (System role not supported)" in refused("gemma", [message("system", "x")])


def test_marks_in_the_text_are_text():
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        {},
        "mine",
    )
    said = [message("user", "\ue0000\ue000"), message("assistant", "\ue0010\ue001\ue000")]
    text, spans = template.turns(Conversation(said), ["</s>"])
    assert [text[begin:end] for begin, end in spans] == ["\ue0010\ue001\ue000</s>"]


def test_turns_that_a_filter_changes_are_refused():
    template = ChatTemplate(
        "{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}"
        "{{ text | length }}",
        {},
        "mine",
    )
    with pytest.raises(ValueError, match="the turns of this chat template cannot be told apart"):
        template.turns(Conversation(SAID), [])


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"messages": []}, "column 'messages' is empty"),
        ({"messages": "QUESTION"}, "column 'messages' is text, messages are expected"),
        ({"messages": [{"from": "human", "value": "x"}]}, "has no role (found: from, value)"),
        ({"messages": [{"role": 3}]}, "message 1 of column 'messages' has no role (found: role)"),
        ({"messages": [message("user", "x"), "y"]}, "message 2 of column 'messages' has no role"),
        ({"messages": [message("user", "x")]}, "no message of the assistant"),
        ({"messages": SAID, "tools": [3]}, "column 'tools' is no list of objects"),
        ({"messages": [message("user", "\ud83d"), SAID[1]]}, "surrogates not allowed"),
        ({"messages": [message("user"), SAID[1]]}, "message 1 of column 'messages' has neither"),
        ({"messages": SAID[:1], "tools": "{"}, "column 'tools' is no JSON"),
        ({"messages": [SAID[0], {**SAID[1], "tool_calls": [{}, {}]}]}, "refuses it (This model"),
    ],
)
def test_a_bad_conversation_is_named(tokenizers, tmp_path, row, cause):
    path = write(tmp_path / "a.jsonl", [{"messages": SAID}, row])
    good, bad = read_records(path, "messages")
    encode(tokenizers["Llama 3.1"], good, "assistant")
    with pytest.raises(BadDocument) as info:
        encode(tokenizers["Llama 3.1"], bad, "assistant")
    assert str(info.value).startswith(f"{path}, line 2: ")
    assert cause in str(info.value)


def test_a_table_of_texts_has_no_messages(tmp_path):
    path = parquet(tmp_path / "a.parquet", [{"messages": json.dumps(SAID)}])
    (bad,) = read_records(path, "messages")
    with pytest.raises(BadDocument, match=r"a\.parquet, row 1: column 'messages' is text"):
        bad.content()


def test_conversations_of_which_nothing_is_learned_are_told(tmp_path):
    """A template that marks what is generated, of answers without words."""
    chat_tokenizer(tmp_path, "Qwen3")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endfor %}"
    )
    tokenizer = Tokenizer(str(tmp_path))
    path = write(tmp_path / "a.jsonl", [{"messages": [SAID[0], message("assistant", "")]}] * 2)
    config = settings_for(tokenizer, path, documents__loss_on="assistant")
    told = r'line 2: no token is learned, documents\.loss_on = "assistant" leaves none'
    with pytest.raises(ValueError, match=told):
        build_dataloader(1, 0, tokenizer, config)


def test_a_tokenizer_without_a_template_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": SAID}])
    (tmp_path / "tokenizer.json").write_bytes(
        (ROOT / "assets/tokenizer/tokenizer.json").read_bytes()
    )
    with pytest.raises(ValueError, match=f"^{tmp_path}: the tokenizer has no chat template"):
        encoded(Tokenizer(str(tmp_path)), path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    with pytest.raises(ValueError, match=f"^{tmp_path}: no chat template"):
        encoded(Tokenizer(str(tmp_path)), path)


def test_where_a_template_is_found(tokenizers, tmp_path):
    folder = tokenizers["Qwen3"].tokenizer_path
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "tokenizer.json").write_bytes((ROOT / folder / "tokenizer.json").read_bytes())
    identities = set()
    for form in (
        template,
        [{"name": "x", "template": ""}, {"name": "default", "template": template}],
    ):
        config = {"chat_template": form, "eos_token": {"content": "<|im_end|>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer(str(tmp_path))
        identities.add(tokenizer.chat_identity)
        text = tokenizer.chat.render(Conversation(SAID))
        assert text == "".join(m["content"] + "<|im_end|>" for m in SAID)
    (tmp_path / "chat_template.jinja").write_text(template)
    identities.add(Tokenizer(str(tmp_path)).chat_identity)
    assert len(identities) == 1
    (tmp_path / "chat_template.jinja").write_text(template + "x")
    assert Tokenizer(str(tmp_path)).chat_identity not in identities


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_parquet_has_what_json_lines_have(tokenizers, tmp_path, kind):
    """Its rows all have the keys of any: those that a message lacks are null."""
    # As in real files: objects of any keys are text there.
    chats = {name: chat for name, chat in CHATS.items() if name != "tools"}
    rows = [{"messages": messages} for messages, _ in chats.values()]
    for row in rows:
        row["messages"] = json.loads(json.dumps(row["messages"]))
        for said in row["messages"]:
            for one in said.get("tool_calls", []):
                one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    rows[0]["tools"] = json.dumps([WEATHER])
    lines = encoded(tokenizers[kind], write(tmp_path / "a.jsonl", rows))
    table = encoded(tokenizers[kind], parquet(tmp_path / "a.parquet", rows))
    assert [t.tolist() for t in table] == [t.tolist() for t in lines]


@pytest.mark.parametrize("write_file", [write, parquet])
def test_prompt_and_completion(tokenizers, tmp_path, write_file):
    tokenizer = tokenizers["Qwen3"]
    suffix = "jsonl" if write_file is write else "parquet"
    texts_ = write_file(
        tmp_path / f"texts.{suffix}", [{"prompt": "QUESTION", "completion": "ANSWER"}]
    )
    lists = write_file(tmp_path / f"lists.{suffix}", [{"prompt": SAID[:3], "completion": SAID[3:]}])
    whole = write(tmp_path / "whole.jsonl", [{"messages": SAID[:2]}, {"messages": SAID}])
    found = encoded(tokenizer, texts_, "prompt") + encoded(tokenizer, lists, "prompt")
    assert [t.tolist() for t in found] == [t.tolist() for t in encoded(tokenizer, whole)]


def settings_for(tokenizer, path, **more):
    return job(
        model__hf_assets_path=tokenizer.tokenizer_path,
        training__dataset="local",
        training__dataset_path=str(path),
        training__text_column="messages",
        training__seq_len=64,
        training__local_batch_size=1,
        **more,
    )


@pytest.mark.parametrize("packing", ["pack", "concat"])
def test_labels_of_batches_are_the_learned_tokens(tokenizers, tmp_path, packing):
    """Packed, cut at the length of a sequence, and continued from a checkpoint."""
    tokenizer = tokenizers["Qwen3"]
    chats = [messages for messages, tools in CHATS.values() if tools is None] * 3
    path = write(tmp_path / "a.jsonl", [{"messages": messages} for messages in chats])
    config = settings_for(
        tokenizer, path, documents__loss_on="assistant", documents__packing=packing
    )
    documents = encoded(tokenizer, path)
    expected = Counter(t for d in documents for t in d[1:][are_targets(d[1:])].tolist())
    labels = []
    part = build_dataloader(1, 0, tokenizer, config, infinite=False)
    batches = iter(part)
    for _ in range(3):
        labels += next(batches)[1].flatten().tolist()
    again = build_dataloader(1, 0, tokenizer, config, infinite=False)
    again.load_state_dict(part.state_dict())
    for _, of_batch in again:
        labels += of_batch.flatten().tolist()
    found = Counter(label for label in labels if label != IGNORE)
    if packing == "pack":
        assert found == expected
    else:  # a cut takes the context of one target
        assert found <= expected
        assert expected.total() - found.total() <= len(labels) // 64


def test_a_hub_dataset_and_validation_learn_the_same(tokenizers, tmp_path):
    """Rows of `datasets` have the keys of all messages, with None; validation has the loss too."""
    tokenizer = tokenizers["Qwen3"]
    chats = deepcopy([messages for messages, tools in CHATS.values() if tools is None])
    for chat in chats:
        for said in chat:
            for one in said.get("tool_calls", []):
                if not isinstance(one["function"]["arguments"], str):
                    arguments = json.dumps(one["function"]["arguments"])
                    one["function"] = {**one["function"], "arguments": arguments}
    folder = tmp_path / "hub"
    folder.mkdir()
    path = write(folder / "train.jsonl", [{"messages": messages} for messages in chats])
    learned = {"documents__loss_on": "assistant"}
    local = settings_for(tokenizer, path, **learned)
    hub = settings_for(tokenizer, path, **learned)
    hub.training.dataset, hub.training.dataset_path = str(folder), None
    config = job(
        validation__dataset="local",
        validation__dataset_path=str(path),
        validation__text_column="messages",
        validation__seq_len=64,
        validation__local_batch_size=1,
        **learned,
    )
    found = [
        [fingerprint(batch) for batch in batches]
        for batches in (
            build_dataloader(1, 0, tokenizer, local, infinite=False),
            build_dataloader(1, 0, tokenizer, hub, infinite=False),
            build_validation_dataloader(1, 0, tokenizer, config),
        )
    ]
    assert found[0] == found[1] == found[2]


def test_documents_too_long_are_cut_or_left_out_and_counted(tokenizers, tmp_path, caplog):
    tokenizer = tokenizers["Qwen3"]
    long = [message("user", "QUESTION " * 40), message("assistant", "ANSWER")]
    rows = [{"messages": SAID[:2]}, {"messages": long}, {"messages": long}]
    path = write(tmp_path / "a.jsonl", rows)
    documents = encoded(tokenizer, path, loss_on="all")
    for too_long, kept in (("cut", documents), ("leave_out", documents[:1])):
        caplog.clear()
        config = settings_for(tokenizer, path, documents__too_long=too_long)
        with caplog.at_level(logging.INFO):
            batches = list(build_dataloader(1, 0, tokenizer, config, infinite=False))
        said = "cut" if too_long == "cut" else "left out"
        expected = f"dataset: documents longer than a sequence of 64 tokens: 2 {said} so far"
        assert caplog.records[-1].message == expected
        inputs = sum(int((inputs["input"] != 0).sum()) for inputs, _ in batches)
        assert inputs == sum(map(len, kept))
    config = settings_for(tokenizer, write(path, rows[1:]), documents__too_long="leave_out")
    with pytest.raises(ValueError, match=r"documents\.too_long leave all of them out"):
        next(iter(build_dataloader(1, 0, tokenizer, config)))


def test_a_loss_on_turns_needs_turns(tokenizers, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["It is a truth."])
    args = ["--training.dataset", "local", "--training.dataset_path", str(path)]
    args += ["--documents.loss_on", "last"]
    with pytest.raises(ValueError, match=r'documents.loss_on = "last": .* no conversations'):
        load_config(args, world_size=1)
    write(path, [{"messages": SAID}])
    args += ["--training.text_column", "messages"]
    folder = ["--model.hf_assets_path", tokenizers["Qwen3"].tokenizer_path]
    assert load_config([*args, *folder], world_size=1).documents.loss_on == "last"


def test_turns_without_an_end_are_said(tokenizers, tmp_path, caplog):
    folder = tmp_path / "glm"
    chat_tokenizer(folder, "Qwen3")
    (folder / "chat_template.jinja").write_bytes((TEMPLATES / "glm4moe.jinja").read_bytes())
    path = write(tmp_path / "a.jsonl", [{"messages": SAID}])
    for tokenizer, said in ((tokenizers["Qwen3"], False), (Tokenizer(str(folder)), True)):
        caplog.clear()
        build_dataloader(1, 0, tokenizer, settings_for(tokenizer, path, documents__loss_on="last"))
        assert ("the model does not learn where to stop" in caplog.text) == said
