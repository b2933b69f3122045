"""A job whose target waits at a gate, without a GPU and without models: the ranks' own loops, exchanges and drafter, a
scheduler, a device that is slow (slow_gates.py) and texts that are hashes (hashed_texts.py), in turns
that are drawn at random (own_turns.py).

Every verdict is held against what the draft rank believes to have proposed, every draft against the row's own tokens,
and all texts against plain decoding's.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from hashed_texts import BLOCK, CPU, DRAFT_LEN, GUESSES, MAX_ROWS, MAX_SEQ_LEN, NUM_BLOCKS, VOCAB, HeldDrafter, next_of
from own_turns import Letterbox, Post, Turns
from slow_gates import DecidedOnDevice, Device, SlowGate, Work

from parallel.control import ControlPlane
from parallel.transports.solo import SoloCommunicator
from parallel.watchdog.activity import Activity
from trtrun.core.nouns import Draft, Request, RoundPlan, Verdict
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import TokenLists
from trtrun.rounds.exchange.gated_drafts import GatedDrafts
from trtrun.rounds.exchange.message_exchange import MessageExchange
from trtrun.rounds.launched_round import LaunchedRound
from trtrun.rounds.round import Worker
from trtrun.rounds.served_rank import serve
from trtrun.scheduling.completions import Completion
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.policy import NEVER
from trtrun.timing.phase_clock import HostPhases
from trtrun.wire.messages import DRAFT_TAG, GUESS_TAG
from trtrun.wire.plans import encode_plan
from trtrun.wire.reports import ReportKind, decode_report

ORCHESTRATOR, TARGET, DRAFTS = 0, 1, (2, 3)
PLAN_TAG, REPORT_TAG = 100, 101


class TargetRank:
    """A target leader's worker: it enqueues rounds whose verdicts are made by the device. See Worker."""

    device, guides = CPU, None

    def __init__(self, turns: Turns, device: Device, exchange: MessageExchange, breaks: float) -> None:
        self.activity, self.phases = Activity(), HostPhases()
        self._turns, self._stream, self._exchange, self._breaks = turns, device, exchange, breaks
        self._tokens: dict[int, list[int]] = {}

    def launch_round(self, plan: RoundPlan) -> LaunchedRound:
        draft = self._exchange.transfer_draft(plan, None, ())
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
            self.seen["foreseen"] += sum(report.cache_hits)
            for tag in (DRAFT_TAG, GUESS_TAG):
                untaken = self._post.count_untaken(self._ranks[1], TARGET, tag)
                assert untaken <= 16, f"{untaken} messages that nobody takes"
            plan = out.popleft()
            self.scheduler.commit(plan, report.num_tokens, report.tokens, report.draft_lens, report.cache_hits)
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
        return replace(plan, num_guesses=guesses, redraft_threshold=drawn.choice((1, 1, 2, 3, NEVER)))

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
