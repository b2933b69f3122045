"""Measures trtrun on the GPUs of one host: tables in Markdown, and one JSON object as the last line.

    python scripts/bench/bench_gpu.py --gpus 1 --output one.jsonl
    python scripts/bench/bench_gpu.py --gpus 1 --parts card,vllm --vllm-python /path/to/python
    python scripts/bench/bench_gpu.py --gpus 2 --parts 'card,tp2:8b,kernels,exchange' --output two.jsonl
    python scripts/bench/bench_gpu.py --gpus 8 --parts 'card,check:*,8b:*'
    python scripts/bench/bench_gpu.py --gpus 2 --devices cpu

Models are shapes with dummy weights: "8b" (a Llama of 8B with a draft of its first 4 layers), "70b" (with a 1B-shaped
draft, forced acceptance) and "1b". Parts run one after another; --list names them. A part that fails or takes too long
says so in its place, and the others go on. No part is begun that would not be done within --time-limit; which were left
out is said at the end. With --output every job's figures are written as they come, a JSON object a line. With
--devices cpu tiny models run on CPU slots: that tries the script, and measures nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.gpu_bench.part import Part
from scripts.bench.gpu_bench.parts import list_parts
from scripts.bench.gpu_bench.placements import PLACEMENTS
from scripts.bench.gpu_bench.tables import Table
from scripts.bench.gpu_bench.workbench import Options, Workbench
from scripts.harness.children import ChildError
from trtrun.errors import nearest

END_SECONDS = 15.0
"""Kept of the time limit for ending what runs, and the last words."""


class Stopped(Exception):
    """A signal has asked this script to end."""


class Records:
    """What was measured, and the file that gets it as it comes.

    Args:
        path: of the file; None keeps it in memory alone.
    """

    def __init__(self, path: Path | None) -> None:
        self.parts: list[dict[str, Any]] = []
        self._file: TextIO | None = path.open("a", encoding="utf-8") if path is not None else None

    def begin(self, part: Part) -> None:
        """A part begins."""
        self.parts.append({"part": part.name, "state": "running", "jobs": [], "tables": []})

    def keep(self, figures: dict[str, Any]) -> None:
        """Figures of a job of the part that runs."""
        self.parts[-1]["jobs"].append(figures)
        self._write({"part": self.parts[-1]["part"], **figures})

    def end(self, state: str, seconds: float, tables: list[Table]) -> None:
        """The part is over."""
        texts = [table.markdown() for table in tables if table.rows]
        self.parts[-1] |= {"state": state, "seconds": round(seconds, 1), "tables": texts}
        self._write({name: self.parts[-1][name] for name in ("part", "state", "seconds", "tables")})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def main() -> int:
    """Run the parts; the exit status is 0 where all that were begun were done."""
    arguments = parse_arguments()
    started = time.monotonic()
    options = Options(
        kind=arguments.devices,
        num_devices=arguments.gpus,
        target_quantization=arguments.target_quantization,
        draft_quantization=arguments.draft_quantization,
        acceptances=arguments.acceptances,
        vllm_python=arguments.vllm_python,
        overrides=tuple(arguments.overrides),
    )
    parts = choose_parts(options, arguments.parts)
    if arguments.list:
        print_parts(list_parts(options).values())
        return 0
    try:
        records = Records(arguments.output)
    except OSError as error:
        raise SystemExit(f"bench_gpu.py: --output {arguments.output} cannot be written: {error.strerror}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    print_parts(parts)
    until = started + arguments.time_limit - END_SECONDS
    left_out: list[str] = []
    stopped = False
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=arguments.folder) as name:
        bench = Workbench(options, Path(name), until, records.keep)
        try:
            for part in parts:
                # A part that is begun in vain is worse than one that is left for the next call.
                if time.monotonic() + arguments.pace * part.seconds > until:
                    left_out.append(part.name)
                else:
                    run_part(part, bench, records, until)
        except Stopped as error:
            stopped = True
            print(f"\nended by {error}", flush=True)
    for table in bench.summaries.values():
        print(f"\n{table.markdown()}\n", flush=True)
    if left_out:
        print(f"\nleft out, as the time was over: --parts {','.join(left_out)}", flush=True)
    # The file has the figures of all jobs; a reader of the last line alone may take but so much of it.
    known = ("part", "state", "seconds") if arguments.output else ("part", "state", "seconds", "jobs")
    seconds = round(time.monotonic() - started, 1)
    summary = {
        "gpus": options.num_devices, "devices": options.kind, "seconds": seconds, "left_out": left_out,
        "stopped": stopped, "output": str(arguments.output) if arguments.output else None,
        "parts": [{name: part[name] for name in known} for part in records.parts],
    }  # fmt: skip
    print(json.dumps(summary), flush=True)
    return 1 if stopped or any(part["state"] != "done" for part in records.parts) else 0


def run_part(part: Part, bench: Workbench, records: Records, until: float) -> None:
    """Run one part and print its tables; what goes wrong in it is told in its place."""
    print(f"\n## {part.name}: {part.about}\n", flush=True)
    begun = time.monotonic()
    bench.deadline = min(until, begun + part.limit)
    bench.tables, bench.reports = [], []
    records.begin(part)
    state = "stopped"
    try:
        part.play(bench)
        state = "done"
    except ChildError as error:
        state = f"failed: {error}"
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr, flush=True)
    except Stopped:
        raise
    except Exception as error:  # a defect of one part costs no other
        traceback.print_exc()
        state = f"failed: {type(error).__name__}: {error}"
    finally:
        seconds = time.monotonic() - begun
        records.end(state, seconds, bench.tables)
        for table in bench.tables:
            if table.rows:
                print(table.markdown() + "\n", flush=True)
        print(f"{part.name}: {state}, after {seconds:.0f} s", flush=True)


def choose_parts(options: Options, names: str | None) -> list[Part]:
    """The parts that are named, in the order of the table, * for any letters; the usual ones where none are."""
    known = list_parts(options)
    if names is None:
        return [part for part in known.values() if part.is_usual]
    wanted: set[str] = set()
    for name in (name.strip() for name in names.split(",")):
        found = fnmatch.filter(known, name)
        wanted.update(found)
        if not found:
            elsewhere = [count for count in PLACEMENTS if name in list_parts(Options(options.kind, count))]
            hint = f" (it is a part of --gpus {elsewhere[0]})" if elsewhere else nearest(name, known)
            raise SystemExit(f"bench_gpu.py: --parts: unknown part '{name}'{hint}; --list shows them")
    return [part for part in known.values() if part.name in wanted]


def print_parts(parts: Any) -> None:
    """The parts with their names, and about how long they take."""
    table = Table("Parts", ("part", "what", "about s"))
    for part in parts:
        table.add(part.name, part.about, round(part.seconds))
    table.add("all", "", round(sum(part.seconds for part in parts)))
    print(table.markdown(), flush=True)


def stop(number: int, frame: FrameType | None) -> None:
    """A signal ends the part that runs, and all that it started; what was measured is printed."""
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)


def read_acceptances(text: str) -> tuple[float, ...]:
    """Numbers from 1 on, with commas between.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers from 1 on, such as 2,5,10")
    return numbers


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus", type=int, choices=sorted(PLACEMENTS), default=1, help="devices of the host that are used"
    )
    parser.add_argument("--devices", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny models on CPU slots")
    parser.add_argument("--parts", metavar="A,B,…", help="parts to run, such as card,8b:* (default: the usual ones)")
    parser.add_argument("--list", action="store_true", help="list all parts and end")
    parser.add_argument("--time-limit", type=float, default=530.0, metavar="SECONDS", help="for all (default: 530)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="gets each job's figures as they come, as JSON lines"
    )
    parser.add_argument("--folder", type=Path, help="where models are written (default: the temporary folder)")
    quantization = "of the 70B-shaped {}: none, or as in the YAML file (default: {})"
    parser.add_argument("--target-quantization", metavar="NAME", help=quantization.format("target", "fp8"))
    parser.add_argument("--draft-quantization", metavar="NAME",
                        help=quantization.format("target's draft", "fp8_with_head"))  # fmt: skip
    parser.add_argument("--acceptances", type=read_acceptances, default=(5.0,), metavar="A,B,…",
                        help="tokens that a round of the 70B-shaped pair gains (default: 5)")  # fmt: skip
    parser.add_argument("--vllm-python", metavar="PATH", help="the interpreter that has vLLM; adds the parts beside it")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
                        help="a key of every job's YAML file; may be repeated")  # fmt: skip
    arguments = parser.parse_args()
    usual = ("none", "none") if arguments.devices == "cpu" else ("fp8", "fp8_with_head")
    arguments.target_quantization = arguments.target_quantization or usual[0]
    arguments.draft_quantization = arguments.draft_quantization or usual[1]
    arguments.pace = 1.0 if arguments.devices == "cuda" else 0.1
    return arguments


if __name__ == "__main__":
    sys.exit(main())
