"""`trtrun run --part` and `trtrun merge`: the parts together are one run; what is missing is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import (
    FIXED,
    MPIRUN,
    ONE_PROCESS,
    THREE_RANKS,
    Configs,
    Run,
    error_line,
    forked_command_words,
    write_rows,
)
from output_rows import read_rows, without_times

pytestmark = pytest.mark.timeout(600)  # several runs in each test, and machines may be busy
ROWS = [
    {"prompt": "def main(", "max_tokens": 12},
    {"prompt": "import os\n"},
    {"prompt": "x", "temperature": 0.8, "seed": 4},
    {"promt": "bad"},
    {"prompt": "class A:", "max_tokens": 30, "n": 2},
    {"prompt": "return ", "max_tokens": 5},
    {"prompt": "\u00e4\u4f60\u597d"},
]
OPTIONS = ("--prompt", "first", "--max-tokens", 9, "--ignore-eos")


def parts_of(folder: Path, count: int) -> list[Path]:
    return [folder / f"out.part-{number}-of-{count}.jsonl" for number in range(1, count + 1)]


def test_parts_merged_are_one_run(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", list(ROWS))
    source = ("--prompts", prompts, *OPTIONS)
    run = ("run", "--config", config(ONE_PROCESS), *FIXED, *source)
    assert trtrun(*run, "--output", tmp_path / "whole.jsonl").returncode == 4
    parts, output = parts_of(tmp_path, 3), tmp_path / "out.jsonl"
    done = [trtrun(*run, "--part", f"{number}/3", "--output", part) for number, part in enumerate(parts, start=1)]
    assert [ended.returncode for ended in done] == [0, 4, 0], [ended.stderr for ended in done]
    assert [[row["index"] for row in read_rows(part)] for part in parts] == [[0, 1], [2, 3, 4], [5, 6, 7]]

    merged = trtrun("merge", "--output", output, *reversed(parts), *source)
    assert (merged.returncode, merged.stdout) == (4, ""), merged.stderr
    assert merged.stderr == "trtrun: merged 3 parts: 8 rows, 1 of them refused\n"
    assert without_times(read_rows(output)) == without_times(read_rows(tmp_path / "whole.jsonl"))
    rows = [row for part in parts for row in read_rows(part)]
    assert {row.pop("num_input_rows") for row in rows} == {8}
    assert read_rows(output) == rows
    strange = [shutil.copy(part, tmp_path / f"{number}.jsonl") for number, part in enumerate(parts)]
    listed = trtrun("merge", "--output", "-", *parts)
    assert [json.loads(line) for line in listed.stdout.splitlines()] == read_rows(output)

    # Other sampling options, another input, a part too few: nothing is written.
    before = output.read_bytes()
    for arguments, said in (
        ((*parts, "--prompts", prompts, "--prompt", "first", "--ignore-eos"), "is of another input row"),
        ((*parts, "--prompts", prompts, *OPTIONS[2:]), "is of another input row"),
        ((*parts[:2], *source), f"{parts[2]} is not among the parts"),
        (strange[:2], "rows 5 to 7 are missing in all parts; give the output of every part"),
        ((*parts[:2], tmp_path / "whole.jsonl.copy"), "whole.jsonl.copy does not exist; run that part first"),
        ((parts[0], parts[2]), f"{parts[1]} is not among the parts"),
        ((*parts, "--max-tokens", 9), "give that too"),
        ((), "Missing argument 'PART.jsonl"),
    ):
        refused = trtrun("merge", "--output", output, *arguments)
        assert said in error_line(refused)
        assert refused.returncode == 2
    assert output.read_bytes() == before


def test_a_part_is_resumed_as_any_run_is(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a", "max_tokens": 2 + index} for index in range(5)])
    output = tmp_path / "out.jsonl"
    run = ("run", "--config", config(ONE_PROCESS), "--prompts", prompts, "--output", output)
    assert trtrun(*run, "--part", "2/2").returncode == 0
    first = read_rows(output)
    assert [row["index"] for row in first] == [2, 3, 4]
    (tmp_path / "out.jsonl.partial").write_text(json.dumps(first[1]) + "\n" + json.dumps(first[0])[:40])
    output.unlink()
    said = error_line(trtrun("merge", "--output", tmp_path / "all.jsonl", output))
    assert f"{output} is not finished: out.jsonl.partial is there; run that part again with --resume" in said
    assert "its row 3 is not in the input" in error_line(trtrun(*run, "--part", "1/2", "--resume"))
    done = trtrun(*run, "--part", "2/2", "--resume")
    assert done.returncode == 0, done.stderr
    assert "2 prompts, " in done.stderr and "; 1 rows were done before" in done.stderr
    assert without_times(read_rows(output)) == without_times(first)


@pytest.mark.parametrize("starter", ["one process", "trtrun", "mpirun"])
def test_a_part_without_rows_is_done_without_a_model(
    pair: Path, config: Configs, trtrun: Run, tmp_path: Path, starter: str
) -> None:
    prompts, output = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    words = None
    if starter == "mpirun":
        words = [*MPIRUN, "-n", "3", *forked_command_words()]
        model = pair / "target"
    else:
        model = Path(shutil.copytree(pair / "target", tmp_path / "target"))
        (model / "model.safetensors").unlink()
    file = config(ONE_PROCESS if starter == "one process" else THREE_RANKS, target={"model": str(model)})
    run = ("run", "--config", file, "--prompts", prompts, "--output", output)
    done = trtrun(*run, "--part", "1/2", words=words)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("trtrun: ")]
    assert said == ["trtrun: nothing to run: there are more parts than rows, and this part has none"]
    assert output.read_bytes() == b""
    assert "has no tokenizer" not in done.stderr


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "1/", "/2", "a/b", "-1/2", "1/2/3"])
def test_a_part_that_is_none_is_refused(config: Configs, trtrun: Run, part: str) -> None:
    done = trtrun("run", "--config", config(ONE_PROCESS), "--prompt", "x", "--part", part)
    assert f"{part!r} is no part: write I/N with I from 1 to N" in error_line(done)
    assert done.returncode == 2


def test_prompts_that_can_be_read_only_once_are_refused(config: Configs, trtrun: Run) -> None:
    done = trtrun("run", "--config", config(THREE_RANKS), "--prompts", "/dev/stdin", "--output", "/dev/null")
    assert "/dev/stdin is not a file: it is read more than once" in error_line(done)
    assert done.returncode == 2
