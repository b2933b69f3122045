"""A job whose target waits at a gate, without a GPU and without models: the ranks' own loops, exchanges and drafter, a
scheduler, and a device that does what was enqueued piece by piece, in turns that are drawn at random (own_turns.py).

What follows a text is a hash of it, for the draft and for the target, which often agree. The draft's store holds
tokens, and what it drafts follows from what it finds there: a wrong, old or missing one gives other drafts. Every
verdict is held against what the draft rank believes to have proposed, every draft against the row's own tokens, and all
texts against plain decoding's.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from own_turns import Letterbox, Post, Turns

from parallel.control import ControlPlane
from parallel.transports.device_gate import DeviceGate, Question, _mark
from parallel.transports.solo import SoloCommunicator
from parallel.watchdog.activity import Activity
from trtrun.core.nouns import Draft, PrefillChunk, Request, RoundPlan, Step, Verdict
from trtrun.core.sampling_params import SamplingParams, TokenLists
from trtrun.engine.rows import RowState
from trtrun.roles.gated_drafts import GatedDrafts
from trtrun.roles.launched_round import LaunchedRound
from trtrun.roles.message_exchange import MessageExchange
from trtrun.roles.round import Worker
from trtrun.roles.served_rank import serve
from trtrun.scheduling.batch import Completion
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.speculation.ahead.guess_space import GuessSpace
from trtrun.speculation.ahead.policy import NEVER
from trtrun.timing.phase_clock import HostPhases
from trtrun.wire.packets import DRAFT_TAG, GUESS_TAG
from trtrun.wire.plans import encode_plan
from trtrun.wire.reports import ReportArrays, ReportKind, RoundTimes, decode_report

CPU = torch.device("cpu")
VOCAB, MAX_ROWS, BLOCK, DRAFT_LEN, MAX_SEQ_LEN, NUM_BLOCKS, GUESSES = 24, 4, 4, 3, 60, 48, 24
ORCHESTRATOR, TARGET, DRAFTS = 0, 1, (2, 3)
PLAN_TAG, REPORT_TAG = 100, 101
Work = Generator[None, None, Any]


@lru_cache(maxsize=1 << 16)
def ranked_behind(text: tuple[int, ...]) -> tuple[int, ...]:
    """What the draft takes for likely behind a text, best first: all ids."""
    seed = zlib.crc32(np.array(text, dtype=np.int32).tobytes())
    return tuple(np.random.default_rng(seed).permutation(VOCAB).tolist())


@lru_cache(maxsize=1 << 16)
def next_of(text: tuple[int, ...]) -> int:
    """What the target says behind a text: as a rule what the draft takes for likely."""
    drawn = zlib.crc32(np.array([*text, -7], dtype=np.int32).tobytes()) % 100
    return ranked_behind(text)[0 if drawn < 60 else 1 if drawn < 80 else 2 if drawn < 90 else drawn % VOCAB]


class TextEngine:
    """See DraftEngine: its store holds tokens, -1 where nothing was written."""

    device, vocab_size, has_graphs, most_positions, block_size = CPU, VOCAB, False, MAX_SEQ_LEN, BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.rows = RowState(MAX_ROWS, MAX_SEQ_LEN, BLOCK, DRAFT_LEN, VOCAB, CPU, GUESSES)
        self._store = np.full((num_blocks, BLOCK), -1)

    def begin_round(self, plan: RoundPlan) -> None:
        self.rows.apply(plan)

    def close(self) -> None:
        """There is nothing to give back."""

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        return self.rows.tables(rows, -(-context // BLOCK))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        for chunk in chunks:
            places = range(chunk.start, chunk.start + chunk.length)
            tokens, table = self.rows.token_ids[chunk.row].tolist(), self.rows.block_tables[chunk.row].tolist()
            self._write(table, [tokens[place] for place in places], places)

    def feed(
        self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, num_last: int = 1
    ) -> torch.Tensor:
        assert num_last == 1
        found = torch.zeros((len(tokens), VOCAB))
        for row, (of_row, where, table) in enumerate(
            zip(tokens.tolist(), positions.tolist(), tables.tolist(), strict=True)
        ):
            self._write(table, of_row, where)
            text = tuple(int(self._store[table[at // BLOCK], at % BLOCK]) for at in range(max(where) + 1))
            found[row, list(ranked_behind(text))] = torch.arange(VOCAB, 0, -1, dtype=torch.float32)
        return found

    def _write(self, table: list[int], tokens: Sequence[int], places: Sequence[int]) -> None:
        for token, place in zip(tokens, places, strict=True):
            if place >= 0:
                self._store[table[place // BLOCK], place % BLOCK] = token

    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(tables, positions[:, step : step + 1]) for step in range(positions.shape[1])]

    def decode(self, step: tuple[torch.Tensor, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return self.feed(tokens.unsqueeze(1), step[1], step[0])

    def rank_steps(self, *values: Any) -> None:
        return None

    def copy_tokens(self, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
        self._store[target.numpy(), offset.numpy()] = self._store[source.numpy(), offset.numpy()]

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._store[target.numpy()] = self._store[source.numpy()]


class HeldDrafter(AheadDrafter[Any]):
    """A drafter whose drafts, and whose idea of what was verified, are held against the rows' tokens."""

    def __init__(self, seen: Counter[str]) -> None:
        space = GuessSpace(GUESSES, MAX_ROWS, NUM_BLOCKS, (BLOCK + DRAFT_LEN - 2) // BLOCK + 1)
        super().__init__(TextEngine(NUM_BLOCKS + space.num_blocks), VOCAB, DRAFT_LEN, False, space)
        self.seen = seen
        self.tokens: dict[int, list[int]] = {}
        self.broken: set[int] = set()

    def begin_round(self, plan: RoundPlan) -> None:
        super().begin_round(plan)
        self.broken.difference_update(plan.dropped_rows)
        self.tokens.update({one.row: one.tokens.tolist() for one in plan.admissions})

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        found = super().propose(plan, probability_rows)
        for row, draft, count in zip(
            plan.decode_rows.tolist(), found.tokens.tolist(), found.draft_lens.tolist(), strict=True
        ):
            text = list(self.tokens[row])
            if row in self.broken:
                continue
            assert row not in self._texts or self._texts[row].length == len(text)
            for token in () if row in self._has_given else draft[:count]:
                assert token == ranked_behind(tuple(text))[0], f"row {row} has something wrong in its store"
                text.append(token)
        return found

    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        if verdict is not None:
            gained = zip(plan.sampled_rows, verdict.num_tokens.tolist(), verdict.tokens.tolist(), strict=True)
            for row, count, tokens in gained:
                if not count:  # the row is at its end, whatever the target does with it meanwhile
                    self.broken.add(row)
                elif row in self._texts and row not in self.broken:
                    believed = self._texts[row].draft[: count - 1]
                    assert tokens[: count - 1] == believed, f"row {row}: {tokens[: count - 1]}, not {believed}"
                self.tokens[row] += tokens[:count]
        super().observe(plan, verdict, step)


class Device:
    """A stream: what was enqueued is done in order, a piece each turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._enqueued: deque[Work] = deque()
        self.is_over = False

    def enqueue(self, work: Work) -> None:
        self._enqueued.append(work)

    def run(self) -> None:
        """Until there is nothing left, once it is over."""
        while self._enqueued or not self.is_over:
            if self._enqueued:
                try:
                    next(self._enqueued[0])
                except StopIteration:
                    self._enqueued.popleft()
            self._turns.give_way()


class SlowGate(DeviceGate):
    """The host's side of a gate, and what the kernels do on a device, which reads a few letters each turn."""

    def __init__(self, turns: Turns, device: Device, seen: Counter[str]) -> None:
        self._words = np.zeros(MAX_ROWS * (1 + DRAFT_LEN), dtype=np.int64)
        self._table_words = np.zeros((2, 2 + GUESSES * (3 + DRAFT_LEN)), dtype=np.int64)
        self._turns = turns
        self._stream = device
        self._seen = seen

    def enqueue(self, opening: int, count: int, most_seconds: float) -> torch.Tensor:
        values = torch.full((count,), -99)

        def work() -> Work:
            yield from self._pass(values, opening, self._turns.now + most_seconds)

        self._stream.enqueue(work())
        return values

    def enqueue_lookup(self, opening: int, question: Question, most_seconds: float) -> torch.Tensor:
        values = torch.full((len(question.rows) * (1 + question.width),), -99)
        self._stream.enqueue(self._look_up(values, opening, question, most_seconds))
        return values

    def _await(self, words: np.ndarray, at: int, opening: int, end: float) -> Generator[None, None, int | None]:
        while int(words[at]) >> 32 != _mark(opening):
            if self._turns.now >= end:
                return None
            yield
        return int(np.int64(words[at]).astype(np.int32))

    def _pass(self, values: torch.Tensor, opening: int, end: float) -> Generator[None, None, bool]:
        for at in (len(values) - 1, *range(len(values))):
            number = yield from self._await(self._words, at, opening, end)
            if number is None:
                values.zero_()
                self._seen["given up"] += 1
                return False
            values[at] = number
            if self._turns.random.random() < 0.2:
                yield
        return True

    def _load(self, words: np.ndarray, opening: int, end: float) -> Generator[None, None, list[list[int]]]:
        head, numbers = [], []
        for at in range(2):
            head.append((yield from self._await(words, at, opening, end)))
        if None in head:
            return []
        count, width = head[0] or 0, 3 + (head[1] or 0)
        for at in range(2, 2 + count * width):
            numbers.append((yield from self._await(words, at, opening, end)))
            if self._turns.random.random() < 0.1:
                yield
        if None in numbers:
            return []
        return [cast(list[int], numbers[at : at + width]) for at in range(0, count * width, width)]

    def _look_up(self, values: torch.Tensor, opening: int, question: Question, most: float) -> Work:
        end, words = self._turns.now + most, self._table_words[opening % 2]
        is_open, is_told = False, False
        while not (is_open or is_told) and self._turns.now < end:
            is_open = int(self._words[len(values) - 1]) >> 32 == _mark(opening)
            is_told = not is_open and int(words[0]) >> 32 == _mark(opening)
            yield
        entries = (yield from self._load(words, opening, end)) if is_told else []
        answers, missing = [], 0
        for row, wanted, line in question.rows.tolist():
            count = int(question.counts[line]) if line >= 0 else 0
            key = [row, count - 1, int(question.lines[line, count - 1])] if count > 0 else []
            found = next((entry[3 : 3 + max(wanted, 0)] for entry in entries if entry[:3] == key), [])
            answers.append(found)
            missing += wanted > 0 and not found
        if not entries or (missing and missing >= question.fewest_missing):
            yield from self._pass(values, opening, end)
            return
        self._seen["found"] += 1
        self._seen["sat out"] += missing
        values.zero_()
        for of_row, found in zip(values.view(-1, 1 + question.width), answers, strict=True):
            of_row[0] = len(found)
            of_row[1 : 1 + len(found)] = torch.tensor(found)


@dataclass
class DecidedOnDevice:
    """See VerdictRound."""

    turns: Turns
    plan: RoundPlan
    broken: list[bool]
    arrays: list[np.ndarray]
    may_be_followed = True

    def is_done(self) -> bool:
        return bool(self.arrays)

    def release(self) -> None:
        """Nothing waits."""

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        self.turns.wait(self.is_done)
        return np.where(self.broken, 0, self.arrays[0]), self.arrays[1]

    def finish(self) -> ReportArrays:
        counts, tokens = self.numbers()
        return ReportArrays(
            self.plan.round_index, RoundTimes(verifying=0.01), counts, np.maximum(self.arrays[2], 0), tokens
        )


class TargetRank:
    """A target leader's worker: it enqueues rounds whose verdicts are made by the device. See Worker."""

    device, guides = CPU, None

    def __init__(self, turns: Turns, device: Device, exchange: MessageExchange, breaks: float) -> None:
        self.activity, self.phases = Activity(), HostPhases()
        self._turns, self._stream, self._exchange, self._breaks = turns, device, exchange, breaks
        self._tokens: dict[int, list[int]] = {}

    def launch_round(self, plan: RoundPlan) -> LaunchedRound:
        draft = self._exchange.hand_over(plan, None, ())
        sampled, width = plan.sampled_rows, plan.draft_len + 1 if draft is not None else 1
        verdict = Verdict(torch.full((len(sampled),), -99), torch.full((len(sampled), width), -1))
        broken = [self._turns.random.random() < self._breaks for _ in sampled]
        decided = DecidedOnDevice(self._turns, plan, broken, [])
        self._stream.enqueue(self._verify(plan, draft, verdict, decided.arrays))
        if sampled:
            self._exchange.send_verdict(plan, verdict)
        self._turns.give_way()
        return self._exchange.conclude(plan, decided)

    def _verify(self, plan: RoundPlan, draft: Draft | None, verdict: Verdict, arrays: list[np.ndarray]) -> Work:
        for admission in plan.admissions:
            self._tokens[admission.row] = admission.tokens.tolist()
        for _ in range(self._turns.random.randrange(12)):
            yield
        lens = np.zeros(len(plan.sampled_rows), dtype=np.int64)
        for place, row in enumerate(plan.sampled_rows):
            text, gained = self._tokens[row], list[int]()
            proposed: list[int] = []
            if draft is not None and place < len(plan.decode_rows):
                lens[place] = int(draft.draft_lens[place])
                assert 0 <= lens[place] <= max(0, plan.draft_lens[place]), "what nothing wrote"
                proposed = draft.tokens[place, : lens[place]].tolist()
                assert all(0 <= token < VOCAB for token in proposed)
            for token in (*proposed, -1):
                gained.append(next_of(tuple(text)))
                text.append(gained[-1])
                if token != gained[-1]:
                    break
            verdict.num_tokens[place] = len(gained)
            verdict.tokens[place, : len(gained)] = torch.tensor(gained)
        yield
        arrays.extend((verdict.num_tokens.numpy().copy(), verdict.tokens.numpy().copy(), lens))


class Control:
    """A worker's end of the control plane."""

    def __init__(self, turns: Turns, post: Post, rank: int) -> None:
        self._turns, self._post, self._rank = turns, post, rank
        self.is_shut_down = False

    def receive(self, timeout: float | None = None, until: Callable[[], bool] | None = None) -> bytes | None:
        found: list[bytes] = []

        def look() -> bool:
            if (message := self._post.take(ORCHESTRATOR, self._rank, PLAN_TAG)) is not None:
                found.append(message)
            return bool(found) or (until is not None and until())

        self._turns.wait(look, timeout)
        self.is_shut_down = found == [b""]
        return found[0] if found and not self.is_shut_down else None

    def report(self, payload: bytes, kind: int = 0) -> None:
        assert kind == ReportKind.ROUND
        self._post.send(self._rank, ORCHESTRATOR, REPORT_TAG, payload)


class GatedJob:
    """All ranks of a job.

    Attributes:
        seen: how often each thing happened.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_drafts: int = 1,
        slowness: float = 0.02,
        loses_draft: bool = False,
        breaks: float = 0.0,
        given: bool = False,
        guided: bool = False,
        plans_ahead: int = 1,
        num_requests: int = 6,
    ) -> None:
        """Ranks that have not begun.

        Args:
            seed: of what is drawn.
            num_drafts: draft ranks of one engine.
            slowness: seconds that a message takes at most; a packet is waited for 0.1.
            loses_draft: whether the draft ranks end in the middle of a round.
            breaks: how often a row's logits are not finite.
            given: whether requests bring drafts of their own.
            guided: whether every third round has to have its draft on the host first.
            plans_ahead: as the scheduler's.
            num_requests: in all.
        """
        self.seen: Counter[str] = Counter()
        self.turns = Turns(seed)
        self._post = Post(self.turns, slowness)
        self._given, self._loses_draft, self._num_requests = given, loses_draft, num_requests
        self._ranks = (TARGET, *DRAFTS[:num_drafts])
        self._device = Device(self.turns)
        self._is_lost = False
        gate = SlowGate(self.turns, self._device, self.seen)
        self.gated = GatedDrafts(gate, SoloCommunicator(), lambda plan: guided and plan.round_index % 3 == 0)
        self._plans_ahead = plans_ahead
        exchange = self._exchange(TARGET, gated=self.gated, group=SoloCommunicator())
        target = TargetRank(self.turns, self._device, exchange, breaks)
        self.scheduler = Scheduler(
            SchedulerLimits(MAX_ROWS, 30, MAX_SEQ_LEN, MAX_SEQ_LEN - 6, DRAFT_LEN, BLOCK, NUM_BLOCKS, True, plans_ahead)
        )
        self._completions: list[Completion] = []
        self.turns.start("device", self._device.run)
        self.turns.start("target", lambda: self._serve_target(cast(Worker, target)))
        for rank in self._ranks[1:]:
            self.turns.start(f"draft {rank}", self._draft_rank(rank))
        self.turns.start("orchestrator", self._orchestrate)

    def run(self, most_turns: int = 400_000) -> None:
        """To its end, which it must come to; all texts must be plain decoding's then."""
        self.turns.run(most_turns)
        for one in self._completions:
            request, output = one.request, one.token_ids[len(one.request.prompt_token_ids) :]
            text = list(request.prompt_token_ids)
            while len(text) < len(one.token_ids):
                text.append(next_of(tuple(text)))
            assert text == one.token_ids
            assert one.finish_reason in ("error", "cancelled") or len(output) == request.sampling.max_tokens
            self.seen[str(one.finish_reason)] += 1
        assert not self.gated._due and not self.gated._asked and len(self.gated._guesses) <= 2

    def _exchange(self, rank: int, **values: Any) -> MessageExchange:
        settings: dict[str, Any] = {"group": None, **values}
        return MessageExchange(
            mail=Letterbox(self._post, self.turns, rank), rank=rank, draft_ranks=self._ranks[1:],
            target_ranks=(TARGET,), peers=SoloCommunicator(), draft_peer=0, target_peer=1, target_vocab_size=VOCAB,
            use_logits=False, draft_is_lost=lambda: self._is_lost, tells_guesses=True, **settings,
        )  # fmt: skip

    def _serve_target(self, worker: Worker) -> None:
        serve(cast(ControlPlane, Control(self.turns, self._post, TARGET)), worker)
        self._device.is_over = True

    def _draft_rank(self, rank: int) -> Callable[[], None]:
        exchange, drafter = self._exchange(rank), HeldDrafter(self.seen)
        worker = Worker(
            exchange, drafter, None, leads_draft=rank == self._ranks[1], leads_target=False, use_logits=False
        )
        control = Control(self.turns, self._post, rank)

        def run() -> None:
            with torch.inference_mode():
                try:
                    serve(cast(ControlPlane, control), worker)
                except _Lost:
                    self.seen["lost"] += 1

        if self._loses_draft:
            dies, give_way = self.turns.random.randrange(200, 3000), exchange.mail.take
            count = iter(range(dies))

            def take(of: int, tag: int) -> bytes | None:
                if self._is_lost or next(count, None) is None:
                    self._is_lost = True
                    raise _Lost
                return give_way(of, tag)

            exchange.mail.take = take  # type: ignore[method-assign]
        return run

    def _orchestrate(self) -> None:
        out: deque[RoundPlan] = deque()
        while self.scheduler.has_work or out or len(self._completions) < self._num_requests:
            self._change_requests()
            while len(out) <= self._plans_ahead and (plan := self._schedule()) is not None:
                out.append(plan)
                for rank in self._ranks:
                    self._post.send(ORCHESTRATOR, rank, PLAN_TAG, encode_plan(plan))
            if not out:
                continue
            report = self._next_report()
            self.seen["rounds"] += 1
            self.seen["foreseen"] += sum(report.foreseen)
            for tag in (DRAFT_TAG, GUESS_TAG):
                untaken = self._post.count_untaken(self._ranks[1], TARGET, tag)
                assert untaken <= 16, f"{untaken} messages that nobody takes"
            plan = out.popleft()
            self.scheduler.commit(plan, report.num_tokens, report.tokens, report.draft_lens, report.foreseen)
        for rank in self._ranks:
            self._post.send(ORCHESTRATOR, rank, PLAN_TAG, b"")

    def _next_report(self) -> Any:
        found: list[bytes] = []

        def look() -> bool:
            for rank in self._ranks[1:]:
                while self._post.take(rank, ORCHESTRATOR, REPORT_TAG) is not None:
                    pass
            if (message := self._post.take(TARGET, ORCHESTRATOR, REPORT_TAG)) is not None:
                found.append(message)
            return bool(found)

        self.turns.wait(look)
        return decode_report(found[0])

    def _schedule(self) -> RoundPlan | None:
        drawn = self.turns.random
        draft_len = 0 if self._is_lost else drawn.choice((None, None, None, None, None, None, 0, 1, 2))
        plan = self.scheduler.schedule(draft_len, takes_given=not self._is_lost)
        if plan is None:
            return None
        has_guesses = plan.draft_len or not len(plan.decode_rows)
        guesses = drawn.choice((0, 5, GUESSES, GUESSES, GUESSES)) if has_guesses else 0
        return replace(plan, num_guesses=guesses, redraft_from=drawn.choice((1, 1, 2, 3, NEVER)))

    def _change_requests(self) -> None:
        drawn = self.turns.random
        if len(self._completions) < self._num_requests and (not self.scheduler.has_work or drawn.random() < 0.1):
            number = len(self._completions)
            prompt = [drawn.randrange(VOCAB) for _ in range(drawn.randrange(1, 40))]
            if number and drawn.random() < 0.4:
                prompt = self._completions[-1].token_ids[:40]
            length, draft = drawn.randrange(1, MAX_SEQ_LEN - len(prompt)), tuple[int, ...]()
            if self._given and drawn.random() < 0.5:
                text = list(prompt)
                while len(text) < len(prompt) + drawn.randrange(1, 12):
                    text.append(next_of(tuple(text)))
                # It ends near, or is wrong, where the model has drafts of its own.
                draft = (*text[len(prompt) :], *(drawn.randrange(VOCAB) for _ in range(drawn.randrange(3))))
            sampling = SamplingParams(max_tokens=length, seed=number, draft_token_ids=draft)
            lists = TokenLists.of((), sampling.logit_bias, ())
            request = Request(number, tuple(prompt), sampling, frozenset(), lists)
            self._completions.append(self.scheduler.add(request))
        elif drawn.random() < 0.01 and self._completions:
            self.scheduler.cancel(drawn.randrange(len(self._completions)))


class _Lost(Exception):
    """A rank is gone."""
