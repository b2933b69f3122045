"""What the server tests share: the shipped pair with a chat template, and what `trtrun run` would write with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import ONE_PROCESS, Server, serving, write_config

from trtrun import LLM
from trtrun.configuration.config import load_config
from trtrun.configuration.model_paths import ASSETS

TEMPLATE = (
    "{% if tools %}# tools\n{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "# {{ message.role }}\n{{ message.content }}\n{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>\n{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}# answer\n{% endif %}"
)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped pair; its target has a chat template."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("target", "draft"):
        (folder / name).mkdir()
        for file in (ASSETS / name).iterdir():
            (folder / name / file.name).symlink_to(file)
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def llm(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same pair by the Python API, in this process."""
    config = write_config(tmp_path_factory.mktemp("llm") / "llm.yaml", pair, ONE_PROCESS)
    with LLM(config=load_config(config, ["kv_cache.max_tokens=8192"])) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What all tests share that need no other server."""
    config = write_config(
        tmp_path_factory.mktemp("serve") / "serve.yaml",
        pair,
        ONE_PROCESS,
        scheduler={"max_batch_size": 8},
        kv_cache={"max_tokens": 16384},
        speculation={"draft_len": 4, "pacing": "fixed"},  # every round drafts, however slow the machine is
        server={"max_queue": 24, "max_body_bytes": 20000, "max_total_logits_bytes": 1 << 25},
    )
    with serving(config) as server:
        yield server
