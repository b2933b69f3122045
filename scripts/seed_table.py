"""NVIDIA's table of Llama 3.3 70B with drafts of 1B, 3B and 8B ("Boost Llama 3.3 70B Inference Throughput 3x"), and
their figure of Medusa on 70B, measured here: models of these shapes in FP8 with made-up weights, one row, draft_len 10.

    python scripts/seed_table.py
    python scripts/seed_table.py --gpus 8 --cases medusa
    python scripts/seed_table.py --tiny

Made-up weights have no acceptance of their own: it is forced. Theirs is not published. By their ratio to plain
decoding it is at least `ratio * (1 + draft_len * bytes of the draft / bytes of the target)` tokens a round, as no round
of theirs is shorter than reading these takes; where they give no ratio, it is the 1B's. --acceptance forces another.
A round takes as long whatever is accepted, so the table also says how many tokens a round their figures take here. The
last line is one JSON object. With --tiny tiny models run on CPU slots: that tries the script, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench.gpu_bench.head_parts import WRITE_HEADS
from scripts.bench.gpu_bench.models import SHAPES
from scripts.bench.gpu_bench.placements import PLACEMENTS
from scripts.bench.gpu_bench.tables import Table
from scripts.bench.gpu_bench.workbench import Options, Workbench
from scripts.harness.children import ChildError, run

PLAIN_RATE = 51.14
"""Tokens a second of theirs without a draft: 70B in FP8 on one H200."""


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        pair: of the workbench's pairs.
        rate: tokens a second of theirs; None where the text that we have does not give it.
        ratio: of that to their plain decoding.
        about: what drafts, and on what theirs ran.
    """

    pair: str
    rate: float | None
    ratio: float
    about: str


CASES = {
    "1b": Case("70b", 181.74, 3.55, "1B draft (theirs: one H200)"),
    "3b": Case("70b-3b", None, 3.55, "3B draft"),
    "8b": Case("70b-8b", None, 3.55, "8B draft"),
    "medusa": Case("70b", 268.0, 1.5, "Medusa heads (theirs: eight H200, Llama 3.1 70B)"),
}


def main() -> int:
    """Measure the cases and print the table; the exit status is 0 where all that were begun were done."""
    arguments = parse_arguments()
    started = time.monotonic()
    until = started + arguments.time_limit
    quantizations = {"target_quantization": "none", "draft_quantization": "none"} if arguments.tiny else {}
    options = Options("cpu" if arguments.tiny else "cuda", arguments.gpus, **quantizations)
    columns = ("draft", "tokens/s", "plain", "ratio", "tokens a round", "round ÷ plain step", "theirs", "their ratio")
    table = Table(f"70B in FP8 on {arguments.gpus} of {options.kind}, one row", (*columns, "tokens a round for theirs"))
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="seed-table-", dir=arguments.folder) as folder:
        bench = Workbench(options, Path(folder), until)
        for name in arguments.cases:
            case = CASES[name]
            try:
                found = measure(bench, name, arguments.acceptance.get(name))
            except ChildError as error:
                measured[name] = {"failed": str(error)}
                print(f"{name}: failed: {error}", flush=True)
                continue
            measured[name] = found | {"theirs": case.rate}
            needed = None if case.rate is None else case.rate * found["round_ms"] / 1e3
            about = (found["round_over_step"], case.rate, case.ratio if case.rate else None, needed)
            rates = (found["tokens_per_s"], found["plain_tokens_per_s"], found["ratio"], found["tokens_a_round"])
            table.add(case.about, *rates, *about)
            print(f"{name}: {found['tokens_per_s']:.1f} tokens/s, plain {found['plain_tokens_per_s']:.1f}", flush=True)
    print(f"\n{table.markdown()}\n\nTheirs without a draft: {PLAIN_RATE} tokens/s.\n", flush=True)
    seconds = round(time.monotonic() - started, 1)
    summary = {"gpus": arguments.gpus, "devices": options.kind, "seconds": seconds, "plain_theirs": PLAIN_RATE}
    print(json.dumps(summary | {"cases": measured}), flush=True)
    return 1 if any("failed" in found for found in measured.values()) else 0


def measure(bench: Workbench, name: str, acceptance: float | None) -> dict[str, Any]:
    """Plain and speculative decoding of one case.

    Raises:
        ChildError: the job failed, or was not done in time.
    """
    case = CASES[name]
    placement = PLACEMENTS[bench.options.num_devices][0]
    pair = bench.pair(case.pair)
    if name == "medusa":
        heads = bench.folder / "heads"
        write = [sys.executable, WRITE_HEADS, bench.model(pair.target), f"medusa={heads}"]
        run(write, bench.folder, bench.deadline).succeed()
        forced = acceptance or case.ratio  # a head is next to nothing beside the target
        how: dict[str, Any] = {"heads": heads, "method": "medusa", "medusa_choices": "vicuna_33b_stage1"}
    else:
        share = SHAPES[pair.draft].read_numbers / SHAPES[pair.target].read_numbers
        forced = acceptance or min(case.ratio * (1 + pair.draft_len * share), pair.draft_len + 1)
        how = {}
    config = bench.config(case.pair, placement, forced_acceptance=round(forced, 2), **how)
    (entry,) = bench.bench(config, [1])["results"]
    plain, speculative = entry["plain"], entry["speculative"]
    step, took = plain["round_wall_ms"], speculative["round_wall_ms"]
    rate, plain_rate = speculative["tokens_per_s"], plain["tokens_per_s"]
    length = speculative["mean_acceptance_length"]
    return {
        "tokens_per_s": rate, "plain_tokens_per_s": plain_rate, "ratio": rate / plain_rate, "tokens_a_round": length,
        "round_ms": took, "plain_step_ms": step, "round_over_step": took / step,
    }  # fmt: skip


def read_acceptance(text: str) -> dict[str, float]:
    """Tokens a round by case, such as 1b=5,medusa=2.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    try:
        pairs = dict(part.split("=") for part in text.split(","))
        numbers = {name: float(number) for name, number in pairs.items()}
    except ValueError:
        numbers = {}
    if not numbers or not numbers.keys() <= CASES.keys() or min(numbers.values()) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not such as 1b=5,medusa=2, of {', '.join(CASES)}")
    return numbers


def read_cases(text: str) -> list[str]:
    """Names with commas between.

    Raises:
        argparse.ArgumentTypeError: one is unknown.
    """
    names = text.split(",")
    if not set(names) <= CASES.keys():
        raise argparse.ArgumentTypeError(f"'{text}' has others than {', '.join(CASES)}")
    return names


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=read_cases, default=list(CASES), metavar="A,B", help="of " + ", ".join(CASES))
    parser.add_argument("--gpus", type=int, choices=sorted(PLACEMENTS), default=1, help="that share the target")
    parser.add_argument("--acceptance", type=read_acceptance, default={}, metavar="CASE=N,…", help="tokens a round")
    parser.add_argument("--time-limit", type=float, default=530.0, metavar="SECONDS", help="for all (default: 530)")
    parser.add_argument("--folder", type=Path, help="where models are written (default: the temporary folder)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPU slots")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
