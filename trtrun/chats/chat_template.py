"""A checkpoint's chat template: where it is kept, and how messages become the text of a prompt, as in transformers.

It is a file of its own, or a key of the tokenizer's configuration. Templates are programs that come with a checkpoint.
They run in Jinja's immutable sandbox: they see the messages and a few values, change nothing, and reach nothing else.
How long one may work is bounded by whoever renders it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtrun.chats.messages import (
    as_template_knows,
    num_python_objects,
    ways_of_calls,
    with_turns_joined,
)
from trtrun.errors import CheckpointError, InvalidRequestError, one_line, shorten, wrap_errors
from trtrun.tokens.byte_pair_files import TEKKEN
from trtrun.weights.checkpoint import read_json

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Where a message ends that is gone on with. Its space tells whether the template trims messages."""

MOST_LETTERS = 1 << 24
"""The most characters that a template may write: as many as the largest body has bytes, unless that is set
otherwise."""


_USER = {"role": "user", "content": "hi"}
_PROBES: Sequence[Sequence[Mapping[str, Any]]] = ([_USER], [{"role": "system", "content": "hi"}, _USER])
"""Conversations that templates may show tools in: some do so beside a system message alone."""

_PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """The template of a checkpoint, compiled, with the special tokens that it may write.

    Attributes:
        source: of the template.
        tool_source: of the one for chats with tools, where there is another.
        tokens: texts of special tokens, by the names that templates know them by.
        names: of the values that it looks at.
        functions: names that every template has, such as `range` and `raise_exception`: no value may take their place.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """Compile a template, and the one for chats with tools.

        Raises:
            TemplateError: it is none.
        """
        environment = _environment()
        self.source = source
        self.tool_source = tool_source
        self.tokens = dict(tokens)
        self.functions = frozenset(environment.globals)
        self.names = frozenset(find_undeclared_variables(environment.parse(source)))
        self._template = environment.from_string(source)
        self._tool_template = None if tool_source is None else environment.from_string(tool_source)

    @property
    def looks_at_tools(self) -> bool:
        """Whether it looks at the tools of chats, as far as its source says; it may not show them."""
        return "tools" in self.names or self.tool_source is not None

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a model sees the tools of chats: prompts with and without one differ. Where no prompt can be made to
        find out, what its source says counts."""
        if not self.looks_at_tools:
            return False
        num_tried = 0
        for messages in _PROBES:
            try:
                shown, without = (self.render(messages, tools=tools) for tools in ([_PROBE], None))
            except InvalidRequestError:
                continue
            num_tried += 1
            if shown != without:
                return True
        return num_tried == 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        values: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text.

        Args:
            messages: each with `role`, and `content` as text.
            add_generation_prompt: it ends where the model begins to answer, if the template has that.
            continue_final_message: it ends in the last message.
            documents: that the model may answer from.
            values: further ones that the template may look at; they go before special tokens of the same names.
            tools: that the model may call, as OpenAI's API has them; None where there are none.

        Raises:
            InvalidRequestError: the template refuses these messages, or cannot make anything of them.
        """
        template, source = self._template, self.source
        if tools and self._tool_template is not None:
            template, source = self._tool_template, self.tool_source or ""
        told = as_template_knows(messages, source)
        if continue_final_message:
            told[-1]["content"] += _MARK
        given = {**self.tokens, **(values or {}), "tools": tools, "documents": documents}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            text = self._render_turns(template, given, told, source)
        except RecursionError:
            raise InvalidRequestError("messages: arguments of a call are nested too deeply") from None
        return _cut_at_mark(text, messages[-1]["content"]) if continue_final_message else text

    def _render_turns(
        self, template: Template, given: Mapping[str, Any], told: Sequence[Mapping[str, Any]], source: str
    ) -> str:
        """The text, of turns that are joined where a template takes them only so. Where it takes neither, it is said
        what was wrong with those that the client wrote."""
        try:
            return self._render_calls(template, given, told, source)
        except InvalidRequestError:
            joined = with_turns_joined(told)
            if joined is None:
                raise
            try:
                return self._render_calls(template, given, joined, source)
            except InvalidRequestError:
                pass
            raise

    def _render_calls(
        self, template: Template, given: Mapping[str, Any], told: Sequence[Mapping[str, Any]], source: str
    ) -> str:
        """The text, whatever a template wants calls to be: arguments as objects or as texts, beside null or beside an
        empty content. Where none will do, it is said what was wrong with objects beside an empty content."""
        ways = ways_of_calls(told, source)
        errors = []
        for place, way in enumerate(ways):
            try:
                text = self._render(template, {**given, "messages": way})
            except InvalidRequestError as error:
                errors.append(error)
                continue
            if num_python_objects(text, way):
                try:
                    other = self._render(template, {**given, "messages": ways[place + 1]})
                except InvalidRequestError:
                    return text
                if num_python_objects(other, way) < num_python_objects(text, way):
                    return other
            return text
        raise errors[ways.index(told)]  # what is wrong with null would say nothing of what a client wrote

    def _render(self, template: Template, values: Mapping[str, Any]) -> str:
        try:
            return "".join(_bounded(template.generate(values)))
        except (InvalidRequestError, MemoryError):
            raise  # the second is the process's own, which says so
        except Exception as error:  # whatever a template does with messages that it was not made for
            raise InvalidRequestError(
                f"messages: the model's chat template cannot use them: {type(error).__name__}: {one_line(error)}"
            ) from None


def _bounded(parts: Iterable[str]) -> Iterator[str]:
    """Parts of a text, as long as they are not too many."""
    num_letters = 0
    for part in parts:
        num_letters += len(part)
        if num_letters > MOST_LETTERS:
            raise InvalidRequestError(
                f"messages: the model's chat template writes more than {MOST_LETTERS} characters of them"
            )
        yield part


def _cut_at_mark(text: str, final: str) -> str:
    """A prompt's text up to the end of its last message, as transformers cuts it."""
    mark = _MARK.strip()
    if final.strip() not in text or mark not in text:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not write the last message as it is"
        )
    place = text.rindex(mark)
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment as transformers does, whose templates these are; but what a template computes of constants
    it computes when it is rendered, where that is bounded, and not when it is compiled."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@pass_context
def _as_it_is(_context: Context, value: Any) -> Any:
    """What is written. A function that wants the context keeps Jinja from writing constants when it compiles."""
    return value


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it passes its text through."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> Node:
        """The block's own content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    @staticmethod
    def _pass(caller: Any) -> Any:
        return caller()


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any) -> str:
    # Jinja's own would escape for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **others)


def _refuse(message: object) -> NoReturn:
    raise InvalidRequestError(f"messages: the model's chat template refuses them: {shorten(str(message), 300)}")


_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OF_TEKKEN = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_MOST_BYTES = 1 << 20


def read_chat_template(path: Path) -> ChatTemplate | None:
    """The template of a tokenizer's directory; None where it has none.

    `chat_template.jinja` goes before `chat_template` in tokenizer_config.json; of several named ones there, `default`
    is taken, and `tool_use`, which may be a file of its own, too, for chats with tools.

    Raises:
        CheckpointError: it is no template.
    """
    config = read_json(path, "tokenizer_config.json", required=False)
    source = config.get("chat_template")
    for_tools = None
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source, for_tools = named.get("default"), named.get("tool_use")
    own = _read_source(path / "chat_template.jinja")
    if own is not None:
        source, for_tools = own, None
    for_tools = _read_source(path / "additional_chat_templates" / "tool_use.jinja") or for_tools
    if source is None:
        return None
    if not isinstance(source, str) or not isinstance(for_tools, str | None):
        wrong = for_tools if isinstance(source, str) else source
        raise CheckpointError(f"{path}: chat_template must be a text, not {shorten(wrong)}")
    try:
        return ChatTemplate(source, _special_tokens(config or _default_config(path)), for_tools)
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:  # Python's: of what Jinja makes of it
        raise CheckpointError(f"{path}: its chat template is no Jinja template: {one_line(error)}") from None


def _read_source(file: Path) -> str | None:
    """A template that is a file; None where there is none."""
    if not file.is_file():
        return None
    with wrap_errors(file, CheckpointError):
        if file.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{file} is larger than {_MOST_BYTES} bytes: it is no chat template")
        return file.read_text(encoding="utf-8")


def _default_config(path: Path) -> Mapping[str, Any]:
    """What stands for tokenizer_config.json where there is none: all of Mistral's vocabularies have these."""
    return _OF_TEKKEN if (path / TEKKEN).is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that tokenizer_config.json names; each is a text or an object with `content`."""
    found = {}
    for name in _TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
