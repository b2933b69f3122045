"""What becomes of a job whose rank is killed in the middle of a run, and the command line of another runtime.

A draft rank's loss costs drafts only, where MPI outlives it; a target rank's ends the job, which names it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from scripts.bench.gpu_bench.head_parts import write_eagle3
from scripts.bench.gpu_bench.placements import find_apart
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import Child, ChildError, Ended, last_words, run
from scripts.harness.processes import ROOT, ranks_below


def play_killed_draft(bench: Workbench, *, has_head: bool = False) -> None:
    """The job goes on, and its texts are those of a run that nothing disturbs; with a draft model, or a head that the
    target sends hidden states to."""
    placement = find_apart(bench.options.num_devices)
    killed_file, whole_file = bench.folder / "killed.jsonl", bench.folder / "undisturbed.jsonl"
    head = {"heads": write_eagle3(bench), "method": "eagle3"} if has_head else {}
    config = bench.config("8b", placement, ahead="on", **head)
    ended, seconds = _kill_in_run(bench, config, killed_file, rank=1)
    columns = ("killed", "exit status", "seconds from the kill to the end", "rows done", "what it said", "equal texts")
    table = bench.table(f"A draft rank is killed: {placement.about}", *columns)
    said = _what_was_said(ended)
    if ended.status != 0:
        table.add("rank 1", ended.status, seconds, len(_texts(killed_file)), said, None)
        raise ChildError(f"the job did not go on: {said}")
    with _running(bench, config, whole_file) as child:
        child.wait(bench.deadline).succeed()
    killed, whole = _texts(killed_file), _texts(whole_file)
    equal = sum(killed.get(index) == text for index, text in whole.items())
    table.add("rank 1", ended.status, seconds, len(killed), said, f"{equal} of {len(whole)}")
    bench.keep({"killed_draft": {"status": ended.status, "seconds": seconds, "equal": equal, "rows": len(whole)}})


def play_killed_target(bench: Workbench) -> None:
    """The job ends and names the rank; rows that were finished are kept."""
    placement = find_apart(bench.options.num_devices)
    rank = 1 + len(placement.draft)
    output = bench.folder / "ended.jsonl"
    ended, seconds = _kill_in_run(bench, bench.config("8b", placement, ahead="on"), output, rank)
    rows, said = len(_texts(output.with_name("ended.jsonl.partial"))), _what_was_said(ended)
    columns = ("killed", "exit status", "seconds from the kill to the end", "rows kept", "what it said")
    table = bench.table(f"A target rank is killed: {placement.about}", *columns)
    table.add(f"rank {rank}", ended.status, seconds, rows, said)
    bench.keep({"killed_target": {"status": ended.status, "seconds": seconds, "rows": rows, "said": said}})
    if ended.status != 128 + signal.SIGKILL or f"target rank {rank}" not in said:
        raise ChildError(f"the job did not name target rank {rank}: status {ended.status}, {said}")


def play_seed_command(bench: Workbench) -> None:
    """`scripts/run.py` with both models on all devices, as another runtime's example is started."""
    count = bench.options.num_devices
    shapes = bench.pair("8b")
    bench.write_weights(shapes.target, shapes.draft)
    devices = list(range(count))
    words = [
        sys.executable, ROOT / "scripts" / "run.py", f"--engine_dir={bench.model(shapes.target)}",
        f"--draft_engine_dir={bench.model(shapes.draft)}", f"--tokenizer_dir={bench.model(shapes.target)}",
        f"--draft_target_model_config=[10,{devices},{devices},False]", "--max_output_len=64",
        "--kv_cache_enable_block_reuse", "--kv_cache_free_gpu_memory_fraction=0.5", "--input_text", "t11 t12 t13",
    ]  # fmt: skip
    ended = run(words, bench.folder, bench.deadline).succeed()
    lines = [line for line in ended.stdout.splitlines() if line.startswith("Output [Text 0 Beam 0]")]
    tokens = len(lines[0].split('"')[1].split()) if lines else 0
    table = bench.table(f"scripts/run.py, [10,{devices},{devices},False]", "exit status", "seconds", "tokens")
    table.add(ended.status, ended.seconds, tokens)
    bench.keep({"seed_command": {"seconds": ended.seconds, "tokens": tokens}})


def _running(bench: Workbench, config: Path, output: Path) -> AbstractContextManager[Child]:
    """A run of many prompts, half of them sampled, that writes rows as they finish."""
    scale = bench.options.scale
    prompts = bench.folder / "prompts.jsonl"
    rows = [
        {"prompt": f"t{7 * index + 3} t{index + 5}", "max_tokens": scale.kill_tokens, "temperature": 0.8 * (index % 2),
         "seed": index, "ignore_eos": True}
        for index in range(scale.kill_prompts)
    ]  # fmt: skip
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for left in (output, output.with_name(output.name + ".partial")):
        left.unlink(missing_ok=True)
    # Few rows at a time, so that most of the prompts are still to come when the first are done.
    few = ("--set", "scheduler.max_batch_size=8")
    return bench.start("run", "--config", config, "--prompts", prompts, "--output", output, *few)


def _kill_in_run(bench: Workbench, config: Path, output: Path, rank: int) -> tuple[Ended, float]:
    """Kill a rank once rows are finished; the job's end, and how many seconds later it came.

    Raises:
        ChildError: no row was ever finished, or the job did not end in time.
    """
    partial = output.with_name(output.name + ".partial")
    with _running(bench, config, output) as child:
        child.wait_until(lambda: partial.exists() and partial.stat().st_size > 0, bench.deadline, "a finished row")
        ranks = ranks_below(child.process.pid)
        if rank not in ranks:
            raise ChildError(f"rank {rank} is not among the processes of the job: {sorted(ranks)}")
        os.kill(ranks[rank], signal.SIGKILL)
        started = time.monotonic()
        ended = child.wait(bench.deadline)
        return ended, time.monotonic() - started


def _texts(path: Path) -> dict[int, str]:
    """Finished rows of an output: index to text."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {int(row["index"]): str(row["text"]) for row in rows if "index" in row}


def _what_was_said(ended: Ended) -> str:
    """trtrun's line of the loss."""
    lines = [line for line in ended.stderr.splitlines() if "lost" in line or "killed" in line]
    return last_words("\n".join(lines) or ended.stderr)
