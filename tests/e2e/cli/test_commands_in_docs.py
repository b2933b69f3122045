"""What docs tell readers to type: the command line takes each command, the loader each YAML file, and Python each
program. Commands are run as they stand, on the shipped pair, unless a comment above their block says what they need.

Such a comment is `<!-- needs: Slurm -->`; NEEDS has what there is to need, and where tests run commands like it. Of a
command that is run the page may show lines of what it prints: these are looked for. test_readme.py runs the README's.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, command_environment
from forked_commands import ForkedCommands

from launch.cli import cli
from launch.commands.common import load
from launch.commands.submit_arguments import parse_inner

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
NEEDS = {
    "Slurm": "tests/e2e/slurm",
    "a server": "tests/e2e/serve",
    "GPUs": "scripts/bench/bench_gpu.py",
    "your models": "tests/e2e/cli/test_readme.py",
    "minutes": "tests/e2e/cli/test_cli_training.py",
    "several hosts": "tests/e2e/hosts",
    "MPI ranks": "tests/e2e/serve/test_own_launcher.py",
}
"""What commands need that are not run as they stand: tests, or a script, that run the like of them."""

BLOCK = re.compile(r"(?:^<!-- needs: (?P<needs>[^\n]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
TYPED = re.compile(r"^(?:\$ )?(?:mpirun [^\n]* launch\.cli|trtrun)(?= [a-z])(?P<words>.*)$")
IN_TEXT = re.compile(r"(?<!`)`(?:\$ )?trtrun ([a-z-]+)( [^`]*)?`(?!`)")
PAIR = {
    "target": {"model": "asset:target", "devices": ["cpu:0"]},
    "draft": {"model": "asset:draft", "devices": ["cpu:0"]},
}
"""What stands in files of the reader's own that a page does not show."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page: what it needs to be run, and what is shown of outputs."""

    page: str
    needs: str | None
    kind: str
    text: str

    @property
    def file_name(self) -> str | None:
        """Of the file that it is, where its first line says so."""
        found = re.match(r"# ([\w-]+\.yaml)\b", self.text)
        return found and found[1]

    @property
    def commands(self) -> Iterator[list[str]]:
        """The words behind `trtrun` of each command in it."""
        for line in self.text.replace("\\\n", " ").splitlines():
            found = TYPED.match(line.strip() if self.kind == "sh" else line)
            if found is not None:
                words = shlex.split(re.sub(r"\$\w+", "1", found["words"]).rstrip("& "), comments=True)
                yield [word for word in takewhile(lambda word: word != ">", words) if word != "…"]


BLOCKS = [
    Block(str(page.relative_to(ROOT)), found["needs"], found["kind"], found["text"])
    for page in PAGES
    for found in BLOCK.finditer(page.read_text(encoding="utf-8"))
]
COMMANDS = [(block, words) for block in BLOCKS for words in block.commands]
RUN = [(block, words) for block, words in COMMANDS if block.needs is None and block.page != "README.md"]
FILES = [(block, yaml.safe_load(block.text)) for block in BLOCKS if block.kind == "yaml"]
PROGRAMS = [block for block in BLOCKS if block.kind == "python"]


def name_of(value: object) -> str:
    return value.page if isinstance(value, Block) else value[0] if isinstance(value, list) else ""


def with_models(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same with models that are there, in place of the reader's."""
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for name in ("target", "draft"):
        if "model" in found.get(name, {}):
            model = found[name]["model"]
            asset = PAIR[name]["model"]
            found[name]["model"] = {host: asset for host in model} if isinstance(model, dict) else asset
    for adapter in found.get("adapters", {}):
        found["adapters"][adapter] = str(folder)
    return found


def test_marks_say_what_is_known_to_be_needed_and_tests_run_the_like() -> None:
    assert len(COMMANDS) > 25 and len(RUN) >= 3
    assert {block.needs for block in BLOCKS} - {None} == set(NEEDS)
    assert not [place for place in NEEDS.values() if not (ROOT / place).exists()]
    assert not [block for block in BLOCKS if block.needs is not None and not list(block.commands)]


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=name_of)
def test_the_command_line_takes_each_command(block: Block, words: list[str]) -> None:
    name, command, rest = cli.resolve_command(cli.make_context("trtrun", list(words)), words)
    assert command is not None
    with command.make_context(name, list(rest)) as context:
        if name == "submit":
            parse_inner(context.params["words"], context.params["config_path"], context.params["overrides"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_within_sentences_have_their_options(page: Path) -> None:
    for name, rest in IN_TEXT.findall(page.read_text(encoding="utf-8")):
        command = cli.commands.get(name)
        assert command is not None, name
        outer, _, inner = rest.partition(" -- ")
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"(?<=\s)--[\w-]+", outer)) <= known | {"--help"}, (name, rest)
        assert not inner or inner.split()[0] in cli.commands


@pytest.mark.parametrize(("block", "values"), FILES, ids=name_of)
def test_the_loader_takes_each_file(
    block: Block, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "{nodes:" in block.text:  # counts are of a job
        monkeypatch.setenv("SLURM_JOB_NODELIST", f"{socket.gethostname()},other")
    file = tmp_path / "file.yaml"
    whole = with_models(values, tmp_path) if "target" in values else {**PAIR, **values}
    file.write_text(json.dumps(whole), encoding="utf-8")
    load(file, [])


@pytest.mark.parametrize("block", PROGRAMS, ids=name_of)
def test_programs_are_python_and_import_what_is_there(block: Block) -> None:
    compile(block.text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trtrun":
            module = importlib.import_module(node.module or "")
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


@pytest.mark.parametrize(("block", "words"), RUN, ids=name_of)
def test_commands_run(block: Block, words: list[str], tmp_path: Path, forked_commands: ForkedCommands) -> None:
    shown = {shown.file_name: shown.text for shown in BLOCKS if shown.page == block.page}
    for name in (word for word in words if word.endswith(".yaml")):
        (tmp_path / name).write_text(shown.get(name, json.dumps(PAIR)), encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import os", "max_tokens": 4}\n', encoding="utf-8")
    done = forked_commands.run(words, command_environment(), tmp_path, 120)
    assert done.returncode == 0, done.stderr
    said = (done.stdout + done.stderr).splitlines()
    lines = block.text.splitlines()
    if lines[0].startswith("$ "):  # what follows is said, in this order; … is what is left out
        expected = iter(said)
        assert not [line for line in lines[1:] if line != "…" and line not in expected]
