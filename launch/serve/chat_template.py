"""A checkpoint's chat template: messages become the text of a prompt, as transformers makes it.

Templates are programs that come with a checkpoint. They run in Jinja's immutable sandbox: they see the messages and a
few values, change nothing, and reach nothing else. It knows template files and messages, and no protocol.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtrun.errors import CheckpointError, InvalidRequestError, one_line, reading, shorten
from trtrun.models.checkpoint import read_json

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_BYTES = 1 << 20


class ChatTemplate:
    """One checkpoint's template, compiled, with the special tokens that it may write."""

    def __init__(self, template: Template, tokens: Mapping[str, str]) -> None:
        self._template = template
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, up to where the model begins to answer.

        Args:
            messages: each with `role`, and `content` as text.

        Raises:
            InvalidRequestError: the template refuses these messages, or cannot make anything of them.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except InvalidRequestError:
            raise
        except Exception as error:  # whatever a template does with messages that it was not made for
            raise InvalidRequestError(
                f"messages: the model's chat template cannot use them: {type(error).__name__}: {one_line(error)}"
            ) from None


def read_chat_template(path: Path) -> ChatTemplate | None:
    """The template of a tokenizer's directory; None where it has none.

    `chat_template.jinja` goes before `chat_template` in tokenizer_config.json; of several named ones there, `default`
    is taken.

    Raises:
        CheckpointError: it is no template.
    """
    config = read_json(path, "tokenizer_config.json", required=False)
    source = config.get("chat_template")
    file = path / "chat_template.jinja"
    if file.is_file():
        with reading(file, CheckpointError):
            if file.stat().st_size > _MOST_BYTES:
                raise CheckpointError(f"{file} is larger than {_MOST_BYTES} bytes: it is no chat template")
            source = file.read_text(encoding="utf-8")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"{path}: chat_template must be a text, not {shorten(source)}")
    try:
        template = _environment().from_string(source)
    except TemplateError as error:
        raise CheckpointError(f"{path}: its chat template is no Jinja template: {one_line(error)}") from None
    return ChatTemplate(template, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that tokenizer_config.json names; each is a text or an object with `content`."""
    found = {}
    for name in _TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    """As in transformers, whose templates these are."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


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
