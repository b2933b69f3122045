"""The timed runs of a benchmark, on rank 0, and what they came to: prompts never seen before, clocks, and whether texts
stay the same.

Each workload takes turns between the two modes, so that a machine that slows down slows both. It knows the Python API.
It does not know how figures are shown, and nothing of peers.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from launch.batch.options import BenchOptions, Workload
from launch.batch.run import load_llm
from launch.bench.trace import BenchTrace
from launch.jobs.mpi.job import Job, finish_mpi
from launch.jobs.mpi.start_progress import STARTED
from launch.jobs.terminal import Bar
from trtrun.api.llm import LLM
from trtrun.core.outputs import RequestOutput, StartReport
from trtrun.core.request_statistics import ForesightStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError
from trtrun.timing.telemetry import ROUND_PARTS, round_parts

Prompts = list[list[int]]


@dataclass
class Case:
    """All timed runs of one mode with one number of rows."""

    prompts: list[Prompts] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    output_token_s: list[float] = field(default_factory=list)
    num_rounds: int = 0
    num_row_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_suffix_draft_tokens: int = 0
    num_accepted_suffix_draft_tokens: int = 0
    draft_losses: int = 0
    num_guesses: int = 0
    foresight: ForesightStatistics = field(default_factory=ForesightStatistics)
    num_captures: int = 0
    num_compilations: int = 0
    anticipating_s: float = 0.0
    elapsed_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROUND_PARTS, 0.0))

    def as_dict(self) -> dict[str, object]:
        """Medians over the runs, and what a round took on average: the parts of `round_ms` add up to `round_wall_ms`,
        which is all the time of the timed runs, prompts and outputs too, shared out over their rounds."""
        rounds = max(1, self.num_rounds)
        return {
            "tokens_per_s": round(statistics.median(self.tokens_per_s), 2),
            "tokens_per_s_runs": [round(value, 2) for value in self.tokens_per_s],
            "round_wall_ms_runs": [round(1e3 * value, 3) for value in self.round_s],
            "time_to_first_token_ms": round(1e3 * statistics.median(self.first_token_s), 3),
            "time_per_output_token_ms": round(1e3 * statistics.median(self.output_token_s), 3),
            "mean_acceptance_length": round(self.mean_acceptance_length, 3),
            "num_rounds": self.num_rounds,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_suffix_draft_tokens": self.num_suffix_draft_tokens,
            "num_accepted_suffix_draft_tokens": self.num_accepted_suffix_draft_tokens,
            "draft_losses": self.draft_losses,
            "num_captures": self.num_captures,
            "num_compilations": self.num_compilations,
            "round_wall_ms": round(1e3 * self.elapsed_s / rounds, 6),
            "round_ms": {name: round(1e3 * seconds / rounds, 6) for name, seconds in self.parts_s.items()},
        } | ({"drafting_ahead": self._foresight_figures()} if self.foresight.due_by_place else {})

    @property
    def first_over_next(self) -> float | None:
        """The first run's tokens a second as a multiple of the median of those that follow; None without any."""
        first, *following = self.tokens_per_s
        return round(first / statistics.median(following), 3) if following else None

    def _foresight_figures(self) -> dict[str, object]:
        """How drafting ahead went; a place is the number of draft tokens that the round before had accepted."""
        due = self.foresight.due_by_place
        places = zip(self.foresight.foreseen_by_place, due, strict=True)
        return {
            "hit_rate": round(self.foresight.hit_rate or 0.0, 4),
            "hit_rate_by_place": [round(hits / count, 4) if count else None for hits, count in places],
            "due_by_place": list(due),
            "guesses_per_row_round": round(self.num_guesses / max(1, sum(due)), 3),
            "redrafted_row_rounds": self.foresight.num_redrafted_rounds,
            "anticipating_ms": round(1e3 * self.anticipating_s / max(1, self.num_rounds), 6),
        }

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted + 1, averaged over the rounds of all rows."""
        return 1 + self.num_accepted_draft_tokens / self.num_row_rounds if self.num_row_rounds else 0.0


PLAIN = "plain"
SPECULATIVE = "speculative"
FIRST_TOKEN_ID = 3
"""Random prompts keep clear of the ids that most tokenizers give to special tokens."""

WARM_UP_TOKENS = 8

COLD_RUNS = 6
"""Of each workload, where the first is compared with the others."""


@dataclass
class Measured:
    """What the runs gave.

    Attributes:
        cases: by workload and mode.
        equal_rows: texts of each workload that are the same in both modes; only with `exact`.
        identical: whether all texts that were compared are; None where none were.
        report: what each rank holds, and how it started.
        start_s: seconds from the start of this process until all ranks were ready.
    """

    cases: dict[Workload, dict[str, Case]] = field(default_factory=dict)
    equal_rows: dict[Workload, int] = field(default_factory=dict)
    identical: bool | None = None
    report: StartReport = field(default_factory=StartReport)
    start_s: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Prompts, [rows][tokens], and how each is sampled."""

    prompts: Prompts
    sampling: list[SamplingParams]


class Draws:
    """Random prompts; every call draws new ones, so that no prefix is ever in the KV store.

    Args:
        seed: of prompts and sampling.
        vocabulary: tokens of the target.
        options: of the benchmark.
    """

    def __init__(self, seed: int, vocabulary: int, options: BenchOptions) -> None:
        self._generator = random.Random(seed)
        self._tokens = range(min(FIRST_TOKEN_ID, vocabulary - 1), vocabulary)
        self._options = options

    def draw(self, workload: Workload, max_tokens: int | None = None, mixed: bool = False) -> Batch:
        """A workload's prompts, completed to exactly `max_tokens`, the benchmark's own unless given. Mixed ones are of
        different lengths, half of the workload's and more."""
        most, rows = workload.prompt_tokens, range(workload.rows)
        lengths = [self._generator.randint((most + 1) // 2, most) if mixed else most for _ in rows]
        prompts = [self._generator.choices(self._tokens, k=length) for length in lengths]
        sampling = [
            SamplingParams(
                max_tokens=max_tokens or self._options.max_tokens,
                ignore_eos=True,
                temperature=workload.temperature,
                top_p=self._options.top_p if workload.temperature else 1.0,
                seed=self._generator.getrandbits(48),
            )
            for _ in rows
        ]
        return Batch(prompts, sampling)


def measure(job: Job, options: BenchOptions, seed: int, modes: Sequence[str], trace: BenchTrace) -> Measured:
    """Load the models, run every workload in every mode, and let the ranks end. Worker ranks serve to the end here."""
    result = Measured()
    runs, num_runs = COLD_RUNS if options.cold else options.repeats, 0
    with load_llm(job.spec) as llm, Bar("runs") as bar:
        result.start_s = time.monotonic() - STARTED
        draws = Draws(seed, job.spec.target.vocab_size, options)
        for workload in options.workloads:
            cases = result.cases[workload] = {mode: Case() for mode in modes}
            for mode in () if options.cold else modes:
                llm.set_speculation(mode == SPECULATIVE)
                _generate(llm, draws.draw(workload, min(WARM_UP_TOKENS, options.max_tokens)))
            for _ in range(runs):
                for mode in modes:
                    llm.set_speculation(mode == SPECULATIVE)
                    batch = draws.draw(workload)
                    with trace.run(llm, mode, workload):
                        _run_once(llm, cases[mode], batch)
                    num_runs += 1
                    bar.update(num_runs, runs * len(modes) * len(options.workloads))
        if SPECULATIVE in modes and job.config.speculation.forced_acceptance is None:
            _compare(llm, draws, options, result)
        result.report = llm.report
    finish_mpi()
    return result


def _compare(llm: LLM, draws: Draws, options: BenchOptions, result: Measured) -> None:
    """Complete the same prompts in both modes, untimed: all workloads' where texts are to be counted, else one row."""
    if not options.exact:
        first = options.workloads[0]
        one = Workload(1, first.prompt_tokens, first.temperature)
        result.identical = _count_equal(llm, draws.draw(one)) == 1
        return
    for workload in options.workloads:
        result.equal_rows[workload] = _count_equal(llm, draws.draw(workload, mixed=True))
    result.identical = all(workload.rows == equal for workload, equal in result.equal_rows.items())


def _count_equal(llm: LLM, batch: Batch) -> int:
    """Prompts for which both modes write the same tokens."""
    tokens = []
    for enabled in (False, True):
        llm.set_speculation(enabled)
        tokens.append(_generate(llm, batch))
    return sum(plain == speculative for plain, speculative in zip(*tokens, strict=True))


def _generate(llm: LLM, batch: Batch) -> list[tuple[int, ...]]:
    """Complete prompts untimed; returns the tokens of each."""
    return [output.completions[0].token_ids for output in _checked(llm.generate(batch.prompts, batch.sampling))]


def _run_once(llm: LLM, case: Case, batch: Batch) -> None:
    """One timed run, added to the case."""
    llm.reset_statistics()
    started = time.perf_counter()
    outputs = llm.generate(batch.prompts, batch.sampling)
    elapsed = time.perf_counter() - started
    tokens = 0
    for output in _checked(outputs):
        times = output.completions[0].statistics
        count = len(output.completions[0].token_ids)
        tokens += count
        if times.first_token is not None and times.finished is not None:
            case.first_token_s.append(times.first_token - times.arrival)
            case.output_token_s.append((times.finished - times.first_token) / max(1, count - 1))
        case.num_row_rounds += times.num_rounds
    totals = llm.statistics()
    case.prompts.append(batch.prompts)
    case.tokens_per_s.append(tokens / elapsed)
    case.num_rounds += totals["num_rounds"]
    case.round_s.append(elapsed / max(1, totals["num_rounds"]))
    case.num_draft_tokens += totals["num_draft_tokens"]
    case.num_accepted_draft_tokens += totals["num_accepted_draft_tokens"]
    case.num_suffix_draft_tokens += totals["num_suffix_draft_tokens"]
    case.num_accepted_suffix_draft_tokens += totals["num_accepted_suffix_draft_tokens"]
    case.num_guesses += totals["num_guesses"]
    case.foresight.add(ForesightStatistics(**totals["foresight"]))
    case.anticipating_s += totals["anticipating_s"]
    case.draft_losses = totals["draft_losses"]
    case.num_captures += totals["num_captures"]
    case.num_compilations += totals["num_compilations"]
    case.elapsed_s += elapsed
    for name, seconds in round_parts(totals, elapsed).items():
        case.parts_s[name] += seconds


def _checked(outputs: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
    """The outputs, none of which was refused."""
    for output in outputs:
        if output.error is not None:
            raise InvalidRequestError(output.error)
    return outputs
