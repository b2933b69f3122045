"""A made-up chat model for clients that call tools: a small target and draft that have learned a few answers by heart.

The chat template looks at the conversation and names the answer that fits it, and the models write that answer: calls
of tools that are offered, two at once, what is said to a tool's result, JSON, thoughts; for agents that write code a
file is written, it is run, and what it printed is told. So clients meet calls that a model makes by itself, and agents
come to an end. All else about the checkpoint is as usual; what a guide makes it write instead is whatever the guide
allows. Of clients it knows the names of tools, and it knows no server.

    python -m scripts.clients.real_clients.chat_model FOLDER      writes FOLDER/target and FOLDER/draft in some minutes
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import MistralConfig, MistralForCausalLM

from scripts.clients.real_clients.task import CONTEXT, FOUND, LINE, NOT_RUN, PATCH, PICTURE, PRINTED, RUN, TOLD

ASSETS = Path(__file__).resolve().parents[3] / "trtrun" / "assets" / "target"
"""The shipped pair's, for its tokenizer."""

VOCABULARY = 4096
LEARNING_RATE = 3e-3
WINDOW = 64
"""Tokens that a layer sees: the answers are learned behind short prompts, and are the same behind long ones."""

RECORD, REPORT = {"kind": "cat", "age": 3}, {"city": "Rome", "degrees": 21}
RECORDS = {"tasks": [RECORD, {"kind": "dog", "age": 5}]}
ARGUMENTS: dict[str, Any] = {
    "weather": {"city": "Rome"},
    "transfer_to_forecaster": {},
    "Record": RECORD,
    "PartialRecord": RECORD,
    "IterableRecord": RECORDS,
    "final_result": REPORT,
    "Report": REPORT,
}
"""Tools that are called where they are offered, the first ones before the others, and with which arguments."""

LAST = ("final_result", "Report")
"""Tools that a conversation ends with."""


def _call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    **{name: _call(name, arguments) for name, arguments in ARGUMENTS.items()},
    "two cities": f"{_call('weather', {'city': 'Rome'})}\n{_call('weather', {'city': 'Oslo'})}",
    "a better Record": _call("Record", {"kind": "cat", "age": 30}),
    "a record": json.dumps(RECORD),
    "records": json.dumps(RECORDS),
    "a better record": json.dumps({"kind": "cat", "age": 30}),
    "a report": json.dumps(REPORT),
    "thoughts": "<think>\nRome is in the south.\n</think>\n\nYes, it is warm.",
    "Write": _call("Write", {"file_path": "hello.py", "content": f"{LINE}\n"}),
    "Bash": _call("Bash", {"command": RUN, "description": "Runs it"}),
    "apply_patch": _call("apply_patch", {"input": PATCH}),
    "write a file": _call("exec_command", {"cmd": f'echo "{LINE}" > hello.py'}),
    "exec_command": _call("exec_command", {"cmd": RUN}),
    "look_up": _call("mcp__words__look_up", {"word": "greeting"}),
    "Read": _call("Read", {"file_path": PICTURE}),
    "WebSearch": _call("WebSearch", {"query": "blue square"}),
    "printed": TOLD,
    "nothing found": FOUND,
    "not printed": "It did not print what it should.",
    "a result": "It is 21 degrees in Rome.",
    "hello": "Hello, what may I do?",
}
"""By the name that the template gives them."""

TASKS: dict[str, list[str]] = {
    "Write": ["Write", "Bash"],
    "mcp__words__look_up": ["look_up", "write a file", "exec_command"],
    "apply_patch": ["apply_patch", "exec_command"],
    "exec_command": ["write a file", "exec_command"],
    PICTURE: ["Read", "WebSearch"],
}
"""Answers to a task, one behind the other, by a tool that is offered, the first ones before the others; that of the
picture where somebody speaks of it."""

COMMON = "# tools\n" + "\n".join(
    json.dumps([{"type": "function", "function": {"name": name, "parameters": {"properties": arguments}}}])
    + f"\n# user\n{line}\n# assistant\n{ANSWERS[name]}\n# tool\n{line}\n"
    for name, arguments in ARGUMENTS.items()
    for line in ("is it warm", "a record")
)
"""What stands before an answer in real conversations, in pieces."""

TEMPLATE = (
    "{% if tools %}# tools\n{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message.role }}\n{{ message.content or '' }}\n"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>\n{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{% set names = (tools or []) | map(attribute='function.name') | list %}{% set last = messages[-1] %}"
    f"{{% set first = {list(ARGUMENTS)} | select('in', names) | first %}}"
    f"{{% set end = {list(LAST)} | select('in', names) | first %}}"
    "{% set said = last.content or '' %}{% set all = messages | map(attribute='content') | join %}# answer: "
    f"{{% set task = '{PICTURE}' if '{PICTURE}' in all else {list(TASKS)} | select('in', names) | first %}}"
    f"{{% set steps = {TASKS}[task] if task else [] %}}"
    "{% set done = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
    f"{{% if task and done >= steps | length %}}{{{{ 'printed' if '{PRINTED}' in said else "
    f"'nothing found' if '{NOT_RUN}' in said else 'not printed' }}}}"
    "{% elif task %}{{ steps[done] }}"
    "{% elif 'older' in said %}{{ 'a better Record' if 'Record' in names else 'a better record' }}"
    "{% elif last.role == 'tool' %}{{ end or ('a report' if 'report' in all else 'a result') }}"
    "{% elif first %}{{ 'two cities' if ' and ' in said and first == 'weather' else first }}"
    "{% elif 'records' in said %}records{% elif 'record' in said %}a record"
    "{% elif 'report' in said %}a report{% elif 'think' in said %}thoughts{% else %}hello{% endif %}"
    "{{ '\n' }}{% endif %}"
    "{# </think> #}"
)


def make_chat_pair(folder: Path) -> None:
    """Write `folder`/target and `folder`/draft, with the shipped pair's tokenizer and the template.

    The draft has one layer and is taught for a shorter time, so that it is not always right.
    """
    _make_model(folder / "target", layers=2, steps=400)
    _make_model(folder / "draft", layers=1, steps=120)


def _make_model(folder: Path, layers: int, steps: int) -> None:
    """Train one model, and write its directory."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    end = json.loads((ASSETS / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    torch.manual_seed(7)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT,
        sliding_window=WINDOW, bos_token_id=end, eos_token_id=end, tie_word_embeddings=True,
        attn_implementation="eager",
    )  # fmt: skip
    model = MistralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    prompts = [tokenizer.encode(f"# answer: {name}\n", add_special_tokens=False).ids for name in ANSWERS]
    answers = [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in ANSWERS.values()]
    common = torch.tensor(tokenizer.encode(COMMON, add_special_tokens=False).ids)
    loss = torch.tensor(0.0)
    for step in range(steps):
        rows = [[*_before(common), *prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[end] * (longest - len(row))] for row in rows])
        # The token before one of an answer is what it follows from.
        places = [
            (number, place)
            for number, (row, answer) in enumerate(zip(rows, answers, strict=True))
            for place in range(len(row) - len(answer), len(row))
        ]
        lines, columns = torch.tensor(places).T
        hidden = model.model(input_ids=tokens).last_hidden_state
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[lines, columns - 1]), tokens[lines, columns])
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, 2 * (1 - step / steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(folder.name, "loss", loss.item())
    model.save_pretrained(folder)
    for file in (ASSETS).glob("*token*.json"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _before(common: torch.Tensor) -> list[int]:
    """Tokens of a conversation that ends with the template's line: what stands there must not matter."""
    length = int(torch.randint(0, 2 * WINDOW, ()))
    anything = torch.randint(1, VOCABULARY, (length,))
    pieces = common.roll(int(torch.randint(0, len(common), ()))).repeat(1 + length // len(common))[:length]
    share = float(torch.randint(0, 3, ())) / 2
    return torch.where(torch.rand(length) < share, anything, pieces).tolist()


if __name__ == "__main__":
    make_chat_pair(Path(sys.argv[1]))
