"""Train the drafters that ship in ``trtrun/assets`` for the shipped target, by trtrun's own commands.

Medusa heads, an EAGLE-3 head and PARD drafts. Stages: ``prompts`` (pieces of the corpus), ``start`` (what the PARD
drafts begin as; both drafter_material.py), ``data`` (trtrun generate-data), ``train`` (trtrun train-drafter, all
drafters side by side), ``export`` and ``evaluate`` (trtrun run, on the CPU, over the held-out prompts). They share out
``--minutes``. A run that was killed goes on from its last rows and checkpoints, with the data and minutes of training
that it had. The last line is JSON: tokens a round.

    python scripts/pair/train_shipped_drafters.py --device cuda:0 --minutes 8.5 --out trtrun/assets
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.pair.drafter_material import restack, write_heldout_prompts, write_prompts

PARD_TOKEN = 125
"""Stands for the byte 0xC0, which no UTF-8 text has."""

SAMPLED_SHARE, MOST_TOKENS, MAX_LENGTH = 0.25, 160, 256
LEAST_BYTES = {"cpu": 200_000, "cuda": 8_000_000}
"""Of data, however long they take."""

DATA_SHARE, START_SHARE, END_SHARE = 0.27, 0.08, 0.12
"""Of all the time: up to the end of the data; for a training's start; for its end and what is measured then."""

END_SECONDS = 60.0
"""That the end takes at most, however long the run."""

GRACE_SECONDS = 15.0
"""For a training whose end takes longer than that; more for what is measured when all is in place."""

HEADS = ("medusa", "eagle3")
"""Methods whose drafters sit where the target sits."""

NEW_TOKENS = 96


@dataclass(frozen=True)
class Drafter:
    """One of the drafters.

    Attributes:
        method: of train-drafter.
        options: of train-drafter.
        speculation: how trtrun run takes it.
        draft_len: with which it is measured.
    """

    method: str
    options: Sequence[object]
    speculation: str
    draft_len: int


SOFT = ("--divergence", 0.5, "--cross-entropy", 1)
"""Mostly the target's choice, as drafts are accepted by it, and some of what else it held likely."""

FAST = ("--optimizer", "muon", "--learning-rate", 0.0025)
MEDUSA = ("--num-tokens", 4, "--medusa-layers", 2, "--learning-rate", 0.001, *SOFT)
PARD = ("--num-tokens", 4, "--retention", 0.7, "--pard-token", PARD_TOKEN, *FAST, *SOFT)

DRAFTERS = {
    "medusa": Drafter("medusa", MEDUSA, "medusa", 4),
    "eagle3": Drafter("eagle3", ("--num-tokens", 6, "--clip-norm", 1, *FAST, *SOFT), "eagle3", 5),
    "pard_draft": Drafter("pard", PARD, "draft_target", 4),
}
"""By the name of their directory."""


class Run:
    """What the stages share.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.begun = arguments, time.monotonic()
        self.work, self.out = arguments.work_dir, arguments.out
        self.assets = arguments.assets.resolve()
        self.kind = arguments.device.partition(":")[0]
        self.is_gpu = self.kind == "cuda"
        self.seconds = 60 * arguments.minutes

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time is over."""
        return self.begun + share * self.seconds - time.monotonic()

    def write_config(self, name: str, device: str, draft: Path | None = None, **speculation: object) -> Path:
        """The shipped target, with its draft model or another drafter, in one process."""
        devices = [int(device.partition(":")[2] or 0)] if device.startswith("cuda") else [device]
        models = {"target": self.assets / "target", "draft": draft or self.assets / "draft"}
        sections = {role: {"model": str(path), "devices": devices} for role, path in models.items()}
        if speculation.get("method") in HEADS:
            del sections["draft"]["devices"]
        rows = self.arguments.batch_rows
        values = {
            **sections,
            "speculation": speculation,
            "scheduler": {"max_batch_size": rows},
            "kv_cache": {"max_tokens": rows * 2 * MAX_LENGTH},
            "threads": self.arguments.threads,
            "launch": {"drain_seconds": 20},
        }
        path = self.work / f"{name}.yaml"
        path.write_text(json.dumps(values), encoding="utf-8")
        return path


def say(run: Run, text: str) -> None:
    """Tell how far the run is."""
    print(f"{time.monotonic() - run.begun:6.1f} s  {text}", file=sys.stderr, flush=True)


def start_trtrun(log: Path, *words: object) -> subprocess.Popen[bytes]:
    """Start a command of trtrun, which says what it says in a file."""
    with open(log, "ab") as file:
        command = [sys.executable, "-m", "launch.cli", *map(str, words)]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def prompts(run: Run) -> None:
    """Prompts for the data, and those that are held out."""
    write_prompts(run.assets, run.work / "prompts.jsonl", run.arguments.rows, run.arguments.seed)
    write_heldout_prompts(run.assets, run.work / "heldout.jsonl")


def make_starts(run: Run) -> None:
    """The shipped draft with more layers, which still computes the same."""
    if "pard_draft" in run.arguments.drafters:
        restack(run.assets / "draft", [index % 2 for index in range(8)], 2, run.work / "start_pard_draft")


def data_files(run: Run) -> list[Path]:
    """What the target has answered so far; rows of a run that was drained are in a file beside the output."""
    outputs = [run.work / f"data_{part}.jsonl" for part in range(1, run.arguments.generators + 1)]
    found = [path if path.exists() else path.with_name(path.name + ".partial") for path in outputs]
    return [path for path in found if path.exists()]


def generate(run: Run) -> None:
    """Let the target answer the prompts until the time is over; most rows are greedy, as acceptance is measured so."""
    if kept_minutes(run).exists():
        say(run, f"a training goes on with its data; another --work-dir than {run.work} begins anew")
        return
    config = run.write_config("generate", run.arguments.device)
    children = []
    for part in range(1, run.arguments.generators + 1):
        # The draft does not pay for so many rows.
        given = ("--config", config, "--speculation", "none", "--prompts", run.work / "prompts.jsonl", "--resume")
        sampling = ("--max-tokens", MOST_TOKENS, "--sampled-share", SAMPLED_SHARE, "--temperature", 0.8)
        others = ("--seed", run.arguments.seed, "--part", f"{part}/{run.arguments.generators}")
        output = ("--output", run.work / f"data_{part}.jsonl")
        children.append(
            start_trtrun(run.work / f"data_{part}.log", "generate-data", *given, *sampling, *others, *output)
        )
    while any(child.poll() is None for child in children):
        enough = sum(path.stat().st_size for path in data_files(run)) >= LEAST_BYTES[run.kind]
        if run.left(DATA_SHARE) <= 0 and enough:
            for child in children:
                child.send_signal(signal.SIGTERM)
            break
        time.sleep(0.2)
    for child in children:
        wait(run, child, 40)
    size = sum(path.stat().st_size for path in data_files(run))
    rows = sum(path.read_bytes().count(b"\n") for path in data_files(run))
    say(run, f"{rows} rows of data, {size / 1e6:.1f} MB")
    if not rows:
        raise SystemExit((run.work / "data_1.log").read_text(encoding="utf-8"))


def kept_minutes(run: Run) -> Path:
    """Where it says for how long the drafters are trained: a training goes on with the same minutes and data alone."""
    return run.work / "minutes.txt"


def wait(run: Run, child: subprocess.Popen[bytes], seconds: float) -> int:
    """The status of a command; one that takes longer is ended."""
    try:
        return child.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        say(run, f"ended: {' '.join(map(str, child.args))}")  # type: ignore[union-attr]
        child.kill()
        return child.wait()


def train(run: Run) -> None:
    """Train all drafters side by side: none alone keeps a GPU busy."""
    arguments = run.arguments
    config = run.write_config("train", arguments.device)
    end = min(END_SECONDS, END_SHARE * run.seconds)
    if not kept_minutes(run).exists():
        left = max(0.05, (run.left() - end - START_SHARE * run.seconds) / 60)
        kept_minutes(run).write_text(str(left), encoding="utf-8")
    minutes = float(kept_minutes(run).read_text(encoding="utf-8"))
    say(run, f"{minutes:.2f} minutes of training")
    data = [word for path in data_files(run) for word in ("--data", usable(path))]
    batch, micro = (arguments.batch_size, arguments.batch_size) if run.is_gpu else (8, 8)
    sizes = ("--batch-size", batch, "--micro-batch-size", micro, "--max-length", MAX_LENGTH, "--minutes", minutes)
    kept = ("--heldout-rows", 64 if run.is_gpu else 16, "--evaluation-steps", 500, "--checkpoint-steps", 1000)
    precision = ("--precision", "bfloat16" if run.is_gpu else "float32", "--seed", arguments.seed)
    children = {}
    for name in arguments.drafters:
        drafter = DRAFTERS[name]
        start = ("--from", run.work / f"start_{name}") if drafter.method == "pard" else ()
        given = ("--config", config, "--method", drafter.method, *data, "--output", run.work / name, "--resume", *start)
        words = ("train-drafter", *given, *sizes, *kept, *precision, *drafter.options)
        children[name] = start_trtrun(run.work / f"{name}.log", *words)
    for name, child in children.items():
        status = wait(run, child, run.left() + GRACE_SECONDS)
        say(run, f"{name}: status {status}; {last_line(run.work / f'{name}.log')}")


def usable(path: Path) -> Path:
    """A data file without a torn last line."""
    whole = path.with_suffix(".rows")
    content = path.read_bytes()
    whole.write_bytes(content[: content.rfind(b"\n") + 1])
    return whole


def last_line(path: Path) -> str:
    """The last line of a file."""
    return path.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]


def export(run: Run) -> None:
    """Put what was trained in place; each appears complete by a rename."""
    run.out.mkdir(parents=True, exist_ok=True)
    for name in run.arguments.drafters:
        trained, incoming, retired = run.work / name, run.out / f".{name}.incoming", run.out / f".{name}.retired"
        if not (trained / "config.json").exists():
            say(run, f"{name} is not trained")
            continue
        shutil.rmtree(incoming, ignore_errors=True)
        shutil.copytree(trained, incoming, ignore=shutil.ignore_patterns("training"))
        path = incoming / "config.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        if "base_model_name_or_path" in values:
            values["base_model_name_or_path"] = "../target"
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if (run.out / name).exists():
            os.rename(run.out / name, retired)
        os.rename(incoming, run.out / name)
        shutil.rmtree(retired, ignore_errors=True)


def evaluate(run: Run) -> None:
    """What a user gets on the CPU, greedy, for the held-out prompts; the shipped draft model beside them."""
    children, result = {}, {}
    chosen = {"draft": DRAFTERS["pard_draft"], **{name: DRAFTERS[name] for name in run.arguments.drafters}}
    for name, drafter in chosen.items():
        model = run.assets / name if name == "draft" else run.out.resolve() / name
        if not model.exists():
            continue
        speculation = {"method": drafter.speculation, "draft_len": drafter.draft_len, "pacing": "fixed"}
        config = run.write_config(f"heldout_{name}", "cpu:0", model, **speculation)
        given = ("--prompts", run.work / "heldout.jsonl", "--max-tokens", NEW_TOKENS)
        output = run.work / f"heldout_{name}.jsonl"
        output.unlink(missing_ok=True)
        words = ("run", "--config", config, *given)
        children[name] = start_trtrun(run.work / f"heldout_{name}.log", *words, "--output", output)
    for name, child in children.items():
        if wait(run, child, run.left() + 10 * GRACE_SECONDS):
            say(run, f"{name}: {last_line(run.work / f'heldout_{name}.log')}")
            continue
        rows = [json.loads(line) for line in (run.work / f"heldout_{name}.jsonl").read_text().splitlines()]
        rounds = sum(row["num_rounds"] for row in rows)
        result[name] = round(1 + sum(row["num_accepted_draft_tokens"] for row in rows) / rounds, 3)
    say(run, "done")
    print(json.dumps({"tokens_per_round": result}), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--work-dir", type=Path, default=Path("build/train_shipped_drafters"))
    parser.add_argument("--assets", type=Path, default=Path("trtrun/assets"), help="holds the pair")
    parser.add_argument("--out", type=Path, default=Path("trtrun/assets"), help="where the drafters are written")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--device", default="cpu:0", help="cpu:0 or cuda:0")
    parser.add_argument("--minutes", type=float, default=240, help="for all stages")
    parser.add_argument("--rows", type=int, default=80_000, help="prompts, answered as far as time allows")
    parser.add_argument("--batch-rows", type=int, default=128, help="that a generator runs at once")
    parser.add_argument("--generators", type=int, help="processes that make data (1 on the CPU, 4 on a GPU)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a training step on a GPU")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // len(DRAFTERS)))
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    arguments.generators = arguments.generators or (4 if arguments.device.startswith("cuda") else 1)
    return arguments


STAGES: dict[str, Callable[[Run], None]] = {
    "prompts": prompts,
    "start": make_starts,
    "data": generate,
    "train": train,
    "export": export,
    "evaluate": evaluate,
}


def main() -> None:
    """Run the stages asked for, in order."""
    run = Run(parse_arguments())
    run.work.mkdir(parents=True, exist_ok=True)
    for name in run.arguments.stages:
        say(run, name)
        STAGES[name](run)


if __name__ == "__main__":
    main()
