"""Conversations to text by a tokenizer's own chat template, and which parts of it are learned.

Templates are rendered as transformers 5 does it (`utils/chat_template_utils.py`), except that a
template that asks for the date always gets the same one: all ranks of a ring have to read the same
tokens, today and after a restart.

Where the turns stand is found in the rendering of the whole conversation, not by rendering parts of
it: templates drop earlier reasoning (Qwen3, gpt-oss) or write the end of the last turn otherwise
(gpt-oss), so that a part need not be a prefix of the whole. The template is compiled a second time
with a mark where a loop of it comes to a message. Without the marks both texts must be equal. What
a turn adds to the prompt for its generation is learned. A template that has `{% generation %}`
marks of its own says itself what is learned.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from recipes.data.content import Conversation

# That of Llama-3.1's template, which asks for none.
_DATE = datetime(2024, 7, 26)
# Names of a message's reasoning; templates read one of the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PRIVATE_USE = range(0xE000, 0xF900)

Span = tuple[int, int]


class ChatTemplate:
    """A chat template of a tokenizer.

    Args:
        template: its text.
        special_tokens: values of the names that it uses, as "bos_token".
        name: for messages, where it was found.

    Raises:
        ValueError: it is no template.
    """

    def __init__(self, template: str, special_tokens: dict[str, str], name: str) -> None:
        self.name = name
        self.text = template
        self._special_tokens = special_tokens
        try:
            tree = _ENVIRONMENT.parse(template)
            self._plain = _compile(tree)
            self._marked = _compile(_with_marks(tree))
        except jinja2.TemplateError as error:
            raise ValueError(f"{name}: no chat template ({error})") from None
        self._marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Raises:
            ValueError: the template refuses it.
        """
        messages = _messages(conversation)
        text = self._render(self._plain, messages, conversation, add_generation_prompt)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                self._check_written(message, number, text)
        return text

    def turns(
        self, conversation: Conversation, special: Sequence[str], last: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and what the model generates of it.

        Args:
            special: texts of the tokens that may end a turn.
            last: of the last message of the assistant only.

        Returns:
            (text, (from, below) of every part that the assistant generates).

        Raises:
            ValueError: the template refuses it, or is none whose turns can be told.
        """
        messages = _messages(conversation)
        text = self._render(self._plain, messages, conversation)
        mark = next(chr(c) for c in _PRIVATE_USE if chr(c) not in text)
        numbers = {id(message): i for i, message in enumerate(messages)}

        def mark_message(message: Any) -> str:
            number = numbers.get(id(message))
            return "" if number is None else f"{mark}{number}{mark}"

        marked = self._render(
            self._marked,
            messages,
            conversation,
            mark_message=mark_message,
            mark_generation=lambda what: f"{mark}{what}{mark}",
        )
        parts = re.split(f"{mark}([^{mark}]*){mark}", marked)
        if "".join(parts[::2]) != text:
            raise ValueError(f"{self.name}: the turns of this chat template cannot be told apart")
        segments, generated = _places(parts)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("no message of the assistant, hence nothing to learn")
        if not self._marks_generation:
            # Where a message is written with an earlier one, that would be learned with it.
            for number in range(turns[0], len(messages)):
                begin, end = segments.get(number, (0, 0))
                if begin == end:
                    raise ValueError(
                        f"{self.name}: this chat template writes nothing of message {number + 1}, "
                        "or writes it with another one"
                    )
        spans: list[Span] = []
        for number in turns[-1:] if last else turns:
            begin, end = segments.get(number, (0, 0))
            if self._marks_generation:
                turn = [span for span in generated if begin <= span[0] and span[1] <= end]
            else:
                turn = [self._generated(text, begin, end, number, special)]
            written = "".join(text[begin:end] for begin, end in turn)
            self._check_written(messages[number], number, written)
            spans += turn
        return text, spans

    def _check_written(self, message: dict[str, Any], number: int, text: str) -> None:
        for key, words in _said(message).items():
            if words and not any(word in text for word in words):
                raise ValueError(
                    f"{self.name}: this chat template does not write {key} of message {number + 1}"
                )

    def _generated(
        self, text: str, begin: int, end: int, number: int, special: Sequence[str]
    ) -> Span:
        """What of a turn text[begin:end] is generated."""
        prompt = self._generation_prompt
        if not prompt or not text.startswith(prompt, begin, end):
            raise ValueError(
                f"{self.name}: this chat template is not prefix-stable: message {number + 1} does "
                f"not begin with the prompt for it, {prompt!r}, but with "
                f"{text[begin : min(end, begin + len(prompt) + 20)]!r}"
            )
        # What a template writes after the end of a turn, a line feed, nobody generates.
        stripped = text[begin:end].rstrip()
        if stripped.endswith(tuple(special)):
            end = begin + len(stripped)
        return begin + len(prompt), end

    @cached_property
    def _generation_prompt(self) -> str:
        probe = Conversation([{"role": "user", "content": "x"}])
        without, prompted = self.render(probe), self.render(probe, add_generation_prompt=True)
        for text in (without, without.removesuffix(self._special_tokens.get("eos_token", ""))):
            if prompted.startswith(text):
                return prompted[len(text) :]
        return ""

    def _render(
        self,
        template: jinja2.Template,
        messages: list[dict[str, Any]],
        conversation: Conversation,
        add_generation_prompt: bool = False,
        **marks: Any,
    ) -> str:
        if conversation.tools and "tools" not in self.text:
            raise ValueError(f"{self.name}: this chat template has no place for tools")
        try:
            return template.render(
                messages=messages,
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **marks,
            )
        except Exception as error:  # a template is a program, and raises what programs do
            raise ValueError(f"{self.name}: this chat template refuses it ({error})") from None


def find_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The text of the template that a tokenizer's folder has.

    Args:
        config: content of its tokenizer_config.json.
    """
    path = folder / "chat_template.jinja"
    try:
        there = path.exists()
        template = path.read_text(encoding="utf-8") if there else config.get("chat_template")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no chat template ({error})") from None
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def read_chat_template(folder: Path, config: dict[str, Any]) -> ChatTemplate:
    """That template, with the texts of the special tokens that it may name.

    Raises:
        ValueError: there is none.
    """
    template = find_chat_template(folder, config)
    if template is None:
        raise ValueError(
            f"{folder}: the tokenizer has no chat template (chat_template.jinja, or chat_template "
            "in tokenizer_config.json), which conversations need; take that of an Instruct model"
        )
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    return ChatTemplate(template, special, str(folder))


def _said(message: dict[str, Any]) -> dict[str, list[str]]:
    """Words of a message by their key, some of which a template writes that writes it at all."""
    content, calls = message.get("content"), message.get("tool_calls")
    names = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        names += [str(function["name"])] if "name" in function else []
    return {"content": content.split() if isinstance(content, str) else [], "tool_calls": names}


def _places(parts: list[str]) -> tuple[dict[int, Span], list[Span]]:
    """Where messages and generated parts stand in a text that is cut at its marks.

    Args:
        parts: text, mark, text, mark, ..., text.

    Returns:
        ((from, below) by number of message, (from, below) of what the template marks as generated).
    """
    segments: dict[int, Span] = {}
    generated: list[Span] = []
    message, place = None, len(parts[0])
    for mark, text in zip(parts[1::2], parts[2::2], strict=True):
        if mark == "(":
            generated.append((place, place))
        elif mark == ")":
            generated[-1] = generated[-1][0], place
        else:
            # An earlier loop may have looked at the message; the last one writes it.
            message = int(mark)
            segments[message] = place, place
        place += len(text)
        if message is not None:
            segments[message] = segments[message][0], place
    return segments, generated


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Messages as transformers 5 gives them to a template, and arguments of calls as objects.

    Files often have the arguments as text of JSON, as OpenAI's interface does; templates write
    them as JSON and would quote them twice.
    """
    messages = []
    for message in conversation.messages:
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [_with_arguments(call) for call in calls]
        messages.append(message)
    return messages


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    if isinstance(call.get("arguments"), str):
        try:
            arguments = json.loads(call["arguments"])
        except ValueError:
            return call
        if isinstance(arguments, dict):
            return {**call, "arguments": arguments}
    return call


class _Generation(Extension):
    """`{% generation %}`: what is in it is generated."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _DATE.strftime
    return environment


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML needs escaped.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_ENVIRONMENT = _environment()


def _compile(tree: nodes.Template) -> jinja2.Template:
    code = _ENVIRONMENT.compile(tree)
    return jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))


def _with_marks(tree: nodes.Template) -> nodes.Template:
    """The template with calls of `mark_message` and `mark_generation`, whose texts it writes."""
    loops = list(tree.find_all(nodes.For))
    # A loop in another one looks at messages only: gpt-oss's for a later answer.
    inner = {id(loop) for outer in loops for loop in outer.find_all(nodes.For)}
    for loop in loops:
        if id(loop) not in inner and isinstance(loop.target, nodes.Name):
            loop.body.insert(0, _mark("mark_message", nodes.Name(loop.target.name, "load"), loop))
    for scope in tree.find_all(nodes.Scope):
        scope.body.insert(0, _mark("mark_generation", nodes.Const("("), scope))
        scope.body.append(_mark("mark_generation", nodes.Const(")"), scope))
    return tree


def _mark(function: str, argument: nodes.Expr, at: nodes.Node) -> nodes.Output:
    call = nodes.Call(nodes.Name(function, "load"), [argument], [], None, None)
    output = nodes.Output([call], lineno=at.lineno)
    output.set_environment(_ENVIRONMENT)
    return output
