"""What parts of a benchmark share: its options, configurations, jobs of trtrun, and the tables that a part fills.

It knows YAML files and commands. It does not know what a part compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scripts.bench.gpu_bench.models import PAIRS, SHAPES, Pair, write_model
from scripts.bench.gpu_bench.placements import Placement
from scripts.bench.gpu_bench.tables import Table
from scripts.harness.children import TRTRUN, Child, Ended, run, started

WRITE_WEIGHTS = Path(__file__).resolve().parent / "write_weights.py"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rows: numbers of prompts that run together.
        most_rows: another, larger one.
        exact_rows: the same for the comparison of texts.
        long_prompts: workloads of long prompts, as --rows names them.
        states: workloads of longer and longer prompts, for layers that keep states.
        cold: workloads whose first runs are compared with later ones, by the number of devices.
        max_tokens: new tokens of each prompt.
        repeats: timed runs of each case.
        kill_prompts, kill_tokens: prompts of a run in which a rank is killed, and their tokens.
        turns: jobs of each kind, where kinds take turns.
        streams: of a server that loses a rank, at once.
    """

    rows: tuple[int, ...]
    most_rows: int
    exact_rows: tuple[int, ...]
    long_prompts: tuple[str, ...]
    states: tuple[str, ...]
    cold: dict[int, tuple[str, ...]]
    max_tokens: int
    repeats: int
    kill_prompts: int
    kill_tokens: int
    turns: int = 1
    streams: int = 4


ONE_COLD = ("1", "4", "16", "48", "100", "4x500", "1x12000", "16@0.7")
COLD = {1: ONE_COLD, 2: ("1", "8", "32", "4x6000", "20@0.7"), 4: ONE_COLD, 8: ONE_COLD}

SCALES = {
    "cuda": Scale(
        (1, 8, 32),
        128,
        (1, 8, 32, 64),
        ("1x2000", "8x2000", "1x8000"),
        ("1x1000", "1x8000", "1x32000", "1x100000"),
        COLD,
        128,
        3,
        200,
        256,
        turns=2,
        streams=24,
    ),
    "cpu": Scale(
        (1, 2), 4, (1, 2), ("1x48", "2x48", "1x96"), ("1x48", "1x96"), dict.fromkeys(COLD, ("1", "2x48")), 8, 1, 40, 24
    ),
}
"""On CPU slots it is the programs that are tried, with tiny models."""


@dataclass(frozen=True)
class Options:
    """What the script was asked for.

    Attributes:
        kind: of devices, "cuda" or "cpu".
        num_devices: of the host.
        target_quantization, draft_quantization: of the 70B-shaped pair.
        acceptances: tokens that a round gains in the 70B-shaped pair, one job each on one device.
        vllm_python: the interpreter that has vLLM, or None.
        overrides: KEY=VALUE for every job.
        seed: of prompts.
    """

    kind: str
    num_devices: int
    target_quantization: str = "fp8"
    draft_quantization: str = "fp8_with_head"
    acceptances: tuple[float, ...] = (5.0,)
    vllm_python: str | None = None
    overrides: tuple[str, ...] = ()
    seed: int = 12

    @property
    def scale(self) -> Scale:
        """How much is measured on these devices."""
        return SCALES[self.kind]


@dataclass
class Workbench:
    """One part at work.

    Attributes:
        options: of the script.
        folder: for configurations, models and outputs.
        deadline: by time.monotonic(); the part is stopped then.
        keep: called with each job's figures as soon as they are there.
        tables: what the part has filled so far.
        reports: of `trtrun bench`, all of the part.
        summaries: tables that several parts fill, by title; they are shown at the end.
        read_bytes_per_s: what a part before measured of the card, or 0.
    """

    options: Options
    folder: Path
    deadline: float
    keep: Callable[[dict[str, Any]], None] = lambda figures: None
    tables: list[Table] = field(default_factory=list)
    read_bytes_per_s: float = 0.0
    reports: list[dict[str, Any]] = field(default_factory=list)
    summaries: dict[str, Table] = field(default_factory=dict)

    def table(self, title: str, *columns: str) -> Table:
        """Begin a table."""
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def summary(self, title: str, *columns: str) -> Table:
        """A table that several parts fill."""
        return self.summaries.setdefault(title, Table(title, columns))

    def pair(self, name: str) -> Pair:
        """A pair of shapes; a tiny one on CPU slots."""
        return PAIRS[PAIRS[name].tiny if self.options.kind == "cpu" else name]

    def model(self, shape: str) -> Path:
        """The directory of a shape, made when it is first asked for."""
        return write_model(self.folder / "models", shape)

    def write_weights(self, *shapes: str) -> None:
        """Make sure that the directories of shapes hold weights.

        Raises:
            ChildError: they cannot be written.
        """
        paths = [self.model(shape) for shape in shapes]
        run([sys.executable, WRITE_WEIGHTS, *paths], self.folder, self.deadline).succeed()

    def config(
        self,
        pair: str,
        placement: Placement,
        job: int = 0,
        *,
        drafts: bool = True,
        files: bool = False,
        most_rows: int = 0,
        as_shipped: bool = False,
        heads: Path | None = None,
        **speculation: Any,
    ) -> Path:
        """Write the YAML file of a job.

        Args:
            pair: of PAIRS.
            placement: who sits where.
            job: which of the placement's jobs.
            drafts: whether there is a draft; else the target runs alone, or drafts itself by a `method`, whose heads
                have the draft's device where this is not the target's.
            files: read weights from files, which are there.
            most_rows: that run at once, where they are more than the usual ones.
            as_shipped: leave the settings of speculation at their defaults; else rounds are all alike.
            heads: a directory of heads, which draft in the pair's draft's place: on the target's devices, or on the
                draft's where these are apart.
            speculation: changes of that section.
        """
        options, shapes = self.options, self.pair(pair)
        format_of_weights = {} if files else {"load_format": "dummy"}
        draft, target = placement.devices(options.kind, job)
        most_rows = max(most_rows, *options.scale.rows)
        values: dict[str, Any] = {
            "target": {"model": str(self.model(shapes.target)), "devices": target, **format_of_weights},
            "scheduler": {"max_batch_size": most_rows},
            "speculation": {"method": "none", **speculation},
        }
        if drafts:
            model = {"model": str(self.model(shapes.draft)), "devices": draft, **format_of_weights}
            own = {"devices": draft} if placement.is_apart else {}
            values["draft"] = model if heads is None else {"model": str(heads), **own}
            of_models = {"draft_len": shapes.draft_len, "ahead": "off"} if heads is None else {}
            alike = {"pacing": "fixed", **of_models, **speculation}
            values["speculation"] = speculation if as_shipped else alike
        elif "method" in speculation and placement.is_apart:
            values["draft"] = {"devices": draft}
        if pair.startswith("70b"):
            for role, name in (("target", options.target_quantization), ("draft", options.draft_quantization)):
                # Heads are read as they are.
                if name != "none" and role in values and (heads is None or role == "target"):
                    values[role]["quantization"] = name
        if options.kind == "cpu":
            values |= {"threads": 1, "kv_cache": {"max_tokens": 4096}}
            values["scheduler"]["max_num_tokens"] = 512
            for role in ("target", "draft"):
                if values.get(role, {}).get("quantization") == "int8":
                    values[role]["dtype"] = "bfloat16"
        file = self.folder / f"job{len(list(self.folder.glob('job*.yaml'))):03d}.yaml"
        file.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
        return file

    def bench(
        self,
        config: Path,
        rows: Sequence[object],
        *extra: object,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """One `trtrun bench`, with `variables` in its environment; returns its JSON.

        Raises:
            ChildError: it failed, or was not done in time.
        """
        return self.bench_together([config], rows, *extra, variables=variables)[0]

    def own_caches(self, name: str) -> dict[str, str]:
        """Variables of a job that finds nothing that others have left, but for compiled GPU kernels."""
        return {"XDG_CACHE_HOME": str(self.folder / f"caches-{name}")}

    def bench_together(
        self,
        configs: Sequence[Path],
        rows: Sequence[object],
        *extra: object,
        traced: bool = False,
        times: int = 1,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> list[dict[str, Any]]:
        """Several jobs of `trtrun bench` at the same time; traced, their JSON has shares of time idle. Texts are so
        many `times` as long as others."""
        scale, reports = self.options.scale, list[dict[str, Any]]()
        with ExitStack() as stack:
            children = []
            for config in configs:
                words = ["bench", "--config", config, "--rows", ",".join(map(str, rows)), "--json"]
                words += ["--max-tokens", times * scale.max_tokens, "--repeats", scale.repeats]
                words += ["--seed", self.options.seed]
                words += ["--trace", config.with_suffix(".trace")] if traced else []
                children.append(stack.enter_context(self.start(*words, *extra, variables=variables)))
            for child in children:
                ended = child.wait(self.deadline)
                report = ended.last_json()
                reports.append(report)
                self.reports.append(report)
                self.keep({"command": child.words[len(TRTRUN) :], "seconds": round(ended.seconds, 2), "report": report})
                ended.succeed()
        for config in configs:
            config.with_suffix(".trace").unlink(missing_ok=True)  # tens of megabytes each
        return reports

    @contextmanager
    def start(self, *words: object, variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[Child]:
        """A trtrun command that runs as long as the block does, at most; see `Child`."""
        sets = [word for override in self.options.overrides for word in ("--set", override)]
        with started([*TRTRUN, *words, *sets], self.folder, variables) as child:
            yield child

    def trtrun(self, *words: object) -> Ended:
        """A trtrun command, to its end.

        Raises:
            ChildError: it was not done in time.
        """
        with self.start(*words) as child:
            return child.wait(self.deadline)

    def read_bytes(self, pair: str) -> int:
        """Bytes of the target's weights that a token of one row reads, as they are without quantization."""
        return 2 * SHAPES[self.pair(pair).target].read_numbers
