"""Where a checkpoint has its chat template: a file of its own, or a key of its tokenizer's configuration.

It knows a checkpoint's files. It does not know what templates do (`chat_template`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trtrun.chats.chat_template import ChatTemplate
from trtrun.errors import CheckpointError, one_line, reading, shorten
from trtrun.weights.checkpoint import read_json

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
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
        return ChatTemplate(source, _special_tokens(config), for_tools)
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:  # Python's: of what Jinja makes of it
        raise CheckpointError(f"{path}: its chat template is no Jinja template: {one_line(error)}") from None


def _read_source(file: Path) -> str | None:
    """A template that is a file; None where there is none."""
    if not file.is_file():
        return None
    with reading(file, CheckpointError):
        if file.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{file} is larger than {_MOST_BYTES} bytes: it is no chat template")
        return file.read_text(encoding="utf-8")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that tokenizer_config.json names; each is a text or an object with `content`."""
    found = {}
    for name in _TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
