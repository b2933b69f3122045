"""One server without a model: the product's scheduler and pacer, rounds that take the time that such rounds were
measured to take, and verdicts drawn at random.

Rounds are those of docs/performance.md: 70B in FP8 with a draft of 1B, draft_len 10, both on the same four H200, in
tokens a second at 1, 8 and 32 rows; eight GPUs were not measured, and count as four. Between these numbers, and beyond,
rounds are on lines. The speed of prompts was measured for 8B on one GPU, and is reckoned from it.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.soak.simulated_cluster.load import Arrival, session_tokens
from trtrun.core.nouns import Request, RoundPlan
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import QueueFullError
from trtrun.rounds.commit import commit_round
from trtrun.scheduling.completions import Completion
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.pacing import Pacer
from trtrun.speculation.round_costs import RoundCosts
from trtrun.wire.reports import RoundReport, RoundTimes

DRAFT_LEN = 10
_TOKENS_A_ROUND = 5
_PLAIN, _SPECULATIVE = {1: 138, 8: 884, 32: 3073}, {1: 288, 8: 1749, 32: 3528}
COSTS = RoundCosts(
    {rows: {0: rows / _PLAIN[rows], DRAFT_LEN: rows * _TOKENS_A_ROUND / _SPECULATIVE[rows]} for rows in sorted(_PLAIN)}
)

PROMPT_TOKENS_A_SECOND = 10_000.0
"""8B reads 38,000 on one GPU; 70B has 8.75 times the weights, and four GPUs 1.55 times 1.55 times the speed of one."""

KV_TOKENS = 2_600_000
"""Of eight GPUs of 141 GB, 0.9 of which hold weights of 73 GB and 360,448 bytes a token of both models."""

_BLOCK = 16
_LONGEST = 16384


@dataclass(frozen=True)
class ServerSetup:
    """What all servers have.

    Attributes:
        max_batch_size, max_num_tokens, max_waiting: as in the configuration's section `scheduler`.
        kv_tokens: of the KV store.
        seconds: for which requests come; those of the first sixth are not counted.
    """

    max_batch_size: int = 32
    max_num_tokens: int = 2048
    max_waiting: int | None = None
    kv_tokens: int = KV_TOKENS
    seconds: float = 60.0

    @property
    def limits(self) -> SchedulerLimits:
        """Of the scheduler."""
        return SchedulerLimits(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=_LONGEST,
            draft_max_seq_len=_LONGEST,
            draft_len=DRAFT_LEN,
            block_size=_BLOCK,
            num_blocks=1 + self.kv_tokens // _BLOCK,
            plans_ahead=1,
            max_waiting=self.max_waiting,
        )


@dataclass
class ServerResult:
    """What came of one server's requests. Seconds are simulated, but for `host_seconds`.

    Attributes:
        first_token_s: of each request that is counted, from its arrival on.
        tokens_per_s: of each, behind its first token.
        num_refused: requests that found the queue full.
        num_tokens, num_pieces: gained in all, and in how many pieces, each of which a front process sends.
        num_prompt_tokens, num_reused: of prompts, and what of these was there.
        most_waiting, most_blocks: at any time.
        num_preemptions: rows that were taken back, where blocks were short or others had none.
        num_rounds, busy_s: how many there were, and how long they took.
        host_seconds: of this machine's core, for the scheduler alone.
        ended: when the last request did.
    """

    first_token_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    num_tokens: int = 0
    num_pieces: int = 0
    num_prompt_tokens: int = 0
    num_reused: int = 0
    most_waiting: int = 0
    most_blocks: int = 0
    num_preemptions: int = 0
    num_rounds: int = 0
    busy_s: float = 0.0
    host_seconds: float = 0.0
    ended: float = 0.0


@dataclass
class _Row:
    """What ranks know of a row: its conversation's tokens, how many of them it has, and how good drafts are."""

    tokens: list[int]
    length: int
    acceptance: float


class SimulatedServer:
    """A scheduler, and ranks that are a clock and a random number."""

    def __init__(self, setup: ServerSetup, arrivals: Sequence[Arrival], seed: int) -> None:
        self._setup = setup
        self._arrivals = arrivals
        self._random = random.Random(seed)
        self.scheduler = Scheduler(setup.limits)
        self._pacer = Pacer(DRAFT_LEN, COSTS)
        self._published: deque[tuple[RoundPlan, int, bool]] = deque()
        self._rows: dict[int, _Row] = {}
        self._tokens: dict[int, list[int]] = {}
        self._first: dict[int, float] = {}
        self._result = ServerResult()

    def run(self) -> ServerResult:
        """Serve all requests to their ends."""
        now, due, result = 0.0, 0, self._result
        for arrival in self._arrivals:
            needed = arrival.num_prompt_tokens + arrival.num_output_tokens
            if needed > len(self._tokens.get(arrival.session, ())):
                self._tokens[arrival.session] = session_tokens(arrival.session, needed + DRAFT_LEN)
        while True:
            started = time.process_time()
            while due < len(self._arrivals) and self._arrivals[due].time <= now:
                self._add(due)
                due += 1
            self._publish()
            result.host_seconds += time.process_time() - started
            if self._published:
                now = self._execute(now)
            elif due < len(self._arrivals):
                now = self._arrivals[due].time
            else:
                break
        self.scheduler.idle_is_whole()
        result.ended = now
        return result

    def _add(self, number: int) -> None:
        arrival = self._arrivals[number]
        try:
            self.scheduler.check_room(1, arrival.session)
        except QueueFullError:
            self._result.num_refused += 1
            return
        prompt = tuple(self._tokens[arrival.session][: arrival.num_prompt_tokens])
        sampling = SamplingParams(max_tokens=arrival.num_output_tokens, seed=1)
        self.scheduler.add(Request(number, prompt, sampling, frozenset()), owner=arrival.session)
        self._result.num_prompt_tokens += len(prompt)
        self._result.most_waiting = max(self._result.most_waiting, self.scheduler.num_waiting)

    def _publish(self) -> None:
        """As the orchestrator does (trtrun/rounds/orchestrator.py): as many plans as may be out."""
        scheduler, pacer = self.scheduler, self._pacer
        while len(self._published) <= scheduler.limits.plans_ahead:
            rows, plain = scheduler.decoding_load()
            draft_len = pacer.choose(rows, plain) if rows else None
            most = pacer.most_drafting(rows, plain) if rows else None
            plan = scheduler.schedule(draft_len, most_drafting=most, drafts_pay=pacer.pays, is_unsure=pacer.is_unsure)
            if plan is None:
                return
            if rows:
                pacer.note_plan(rows, plain, plan.draft_len, int((plan.draft_lens > 0).sum()))
            self._published.append((plan, plain, most is not None and plan.draft_len > 0))
            held = scheduler.limits.num_blocks - 1 - scheduler.num_free_blocks
            self._result.most_blocks = max(self._result.most_blocks, held)

    def _execute(self, now: float) -> float:
        """The oldest plan; returns when it is done."""
        plan, plain, is_partial = self._published.popleft()
        for row in plan.dropped_rows:
            del self._rows[row]
        for admission in plan.admissions:
            arrival = self._arrivals[admission.request_id]
            tokens = self._tokens[arrival.session]
            self._rows[admission.row] = _Row(tokens, len(admission.tokens), arrival.acceptance)
        gained = [self._verify(row, length) for row, length in zip(plan.decode_rows, plan.draft_lens, strict=True)]
        gained += [self._verify(chunk.row, 0) for chunk in plan.prefill if chunk.is_last]
        verified = [max(0, length) for length in plan.draft_lens.tolist()]
        verified += [0] * (len(gained) - len(verified))
        seconds = round_seconds(plan)
        counts = [len(tokens) for tokens in gained]
        report = RoundReport(plan.round_index, RoundTimes(), True, counts, verified, gained, [])
        started = time.process_time()
        results = commit_round(self.scheduler, plan, report, self._pacer, seconds, plain, is_partial)
        self._result.host_seconds += time.process_time() - started
        now += seconds
        self._result.num_rounds += 1
        self._result.busy_s += seconds
        for result in results:
            self._note(result.completion, len(result.new_token_ids), now)
        return now

    def _verify(self, row: int, draft_len: int) -> list[int]:
        """The tokens that a row gains."""
        state, accepted = self._rows[row], 0
        while accepted < draft_len and self._random.random() < state.acceptance:
            accepted += 1
        gained = state.tokens[state.length : state.length + accepted + 1]
        gained += [0] * (accepted + 1 - len(gained))
        state.length += len(gained)
        return gained

    def _note(self, completion: Completion, num_new: int, now: float) -> None:
        number, result = completion.request.request_id, self._result
        result.num_tokens += num_new
        result.num_pieces += 1
        arrival = self._arrivals[number]
        first = self._first.setdefault(number, now)
        if completion.finish_reason is None:
            return
        result.num_preemptions += completion.statistics.num_preemptions
        result.num_reused += completion.statistics.num_cached_prompt_tokens
        del self._first[number]
        if arrival.time >= self._setup.seconds / 6:
            result.first_token_s.append(first - arrival.time)
            if now > first:
                result.tokens_per_s.append((arrival.num_output_tokens - 1) / (now - first))


def round_seconds(plan: RoundPlan) -> float:
    """What a round takes: rows that decode, and the tokens of prompts."""
    rows, prompts = len(plan.decode_rows), sum(chunk.length for chunk in plan.prefill)
    decoding = COSTS.estimate(rows, plan.draft_len) if rows else 0.0
    reading = prompts / PROMPT_TOKENS_A_SECOND
    return decoding + reading if rows else max(COSTS.estimate(1, 0), reading)
