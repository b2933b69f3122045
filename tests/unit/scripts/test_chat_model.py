"""What clients that call tools are run with: the chat model's template names the right answer; how cases are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.clients.real_clients.chat_model import ANSWERS, TEMPLATE
from scripts.clients.real_clients.task import NOT_RUN, PRINTED, SEARCHED
from trtrun.chats.chat_template import ChatTemplate

FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "clients" / "real_clients"
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "report whether it is warm"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]},
    {"role": "tool", "content": "21"},
]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("messages", "tools", "answer"),
    [
        (user("hi"), (), "hello"),
        (user("think"), (), "thoughts"),
        (user("a record"), (), "a record"),
        (user("records"), (), "records"),
        (user("it has to be older"), (), "a better record"),
        (user("it has to be older"), ("Record",), "a better Record"),
        (user("is it warm?"), ("weather",), "weather"),
        (user("Rome and Oslo?"), ("Report", "weather"), "two cities"),
        (user("Rome and Oslo?"), ("Record",), "Record"),
        (user("is it warm?"), ("unknown",), "hello"),
        (CALLED, ("weather",), "a report"),
        (CALLED[1:], ("weather",), "a result"),
        (CALLED, ("weather", "final_result"), "final_result"),
        (user("a task"), ("Bash", "Write"), "Write"),
        ([*CALLED, *user("go on")], ("Bash", "Write"), "Bash"),
        ([*CALLED, *CALLED], ("Bash", "Write"), "not printed"),
        ([*CALLED, {"role": "tool", "content": PRINTED}], ("exec_command", "apply_patch"), "printed"),
        (user("a task"), ("exec_command", "apply_patch"), "apply_patch"),
        (user("a task"), ("exec_command", "mcp__words__look_up"), "look_up"),
        (user(SEARCHED), ("Bash", "Write", "Read"), "Read"),
        ([*user(SEARCHED), *CALLED, {"role": "tool", "content": NOT_RUN}], ("Bash", "Write"), "nothing found"),
    ],
)
def test_the_template_names_the_answer_that_fits(messages: list[Any], tools: tuple[str, ...], answer: str) -> None:
    offered = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
    prompt = ChatTemplate(TEMPLATE, {}).render(messages, tools=offered or None)
    assert prompt.endswith(f"\n# answer: {answer}\n") and answer in ANSWERS


def test_a_case_that_fails_is_told_of_and_the_others_are_run(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import cases\n"
        "@cases.case('one')\ndef one(url): cases.same(url, 'other')\n"
        "@cases.case('two')\nasync def two(url): cases.same(url, 'here')\n"
        "cases.run_cases()\n"
    )
    words = [sys.executable, program, "here"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(FOLDER)})
    said = done.stdout.splitlines()
    assert done.returncode == 1 and said[0] == "✗ one" and said[-2:] == ["✓ two", "1 of 2 cases"], done
    assert "AssertionError: 'here', and not 'other'" in said
