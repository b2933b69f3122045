"""What stands beside a target leader whose rounds are launched before their drafts are there: messages, a gate of the
host's own, verdicts that are known at once, and a drafter that only keeps what it is told.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from parallel.communicator import Communicator
from parallel.transports.device_gate import Question
from parallel.transports.solo import SoloCommunicator
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.rounds.exchange.gated_drafts import GatedDrafts
from trtrun.rounds.exchange.message_exchange import MessageExchange
from trtrun.wire.messages import decode_packet, encode_packet
from trtrun.wire.reports import ReportArrays, RoundTimes

DRAFT_RANK, TARGET_RANK, DRAFT_LEN = 1, 2, 3


class Letters:
    """A mailbox of the target rank: what came, and what was posted."""

    def __init__(self) -> None:
        self.came: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self.posted: list[tuple[int, int, int]] = []

    def post(self, rank: int, tag: int, payload: bytes) -> None:
        self.posted.append((rank, tag, decode_packet(payload)[0]))

    def num_unsent_bytes(self) -> int:
        return 0

    def take(self, rank: int, tag: int) -> bytes | None:
        return self.came[tag].popleft() if self.came[tag] else None

    def wait(
        self, rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        return self.take(rank, tag)

    def close(self) -> None:
        """Nothing is under way."""


class OpenGate:
    """A gate whose numbers are -1 until it is opened, as nothing waits on the host."""

    def __init__(self) -> None:
        self.waiting: dict[int, torch.Tensor] = {}
        self.questions: dict[int, Question] = {}
        self.tables: dict[int, list[list[int]]] = {}

    def enqueue(self, opening: int, count: int, most_seconds: float) -> torch.Tensor:
        assert opening not in self.waiting
        self.waiting[opening] = torch.full((count,), -1, dtype=torch.int64)
        return self.waiting[opening]

    def enqueue_lookup(self, opening: int, question: Question, most_seconds: float) -> torch.Tensor:
        self.questions[opening] = question
        return self.enqueue(opening, len(question.rows) * (1 + question.width), most_seconds)

    def open(self, opening: int, numbers: np.ndarray) -> None:
        self.waiting[opening].copy_(torch.from_numpy(numbers))

    def send(self, opening: int, table: np.ndarray) -> None:
        assert opening in self.questions
        self.tables[opening] = table.tolist()


class Decided:
    """A round of the device with its verdict: each row gains a token."""

    may_be_followed = True

    def __init__(self, plan: RoundPlan, verified: int = 1) -> None:
        ones = np.ones(len(plan.sampled_rows), dtype=np.int64)
        self._report = ReportArrays(plan.round_index, RoundTimes(), ones, ones * verified, ones[:, None])

    def is_done(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing waits."""

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        assert self._report.num_tokens is not None
        return self._report.num_tokens, self._report.tokens

    def finish(self) -> ReportArrays:
        return self._report


def make_plan(round_index: int, lens: tuple[int, ...] = (DRAFT_LEN, 2), **values: Any) -> RoundPlan:
    rows, nothing = np.arange(len(lens), dtype=np.int32), np.zeros((0, 3), dtype=np.int32)
    return RoundPlan(round_index, (), (), nothing, (), rows, np.array(lens, dtype=np.int32), rows, 100, **values)


def packet(round_index: int, tokens: list[list[int]], lens: list[int], foreseen: list[int]) -> bytes:
    width = len(tokens[0])
    rows = [[a, b, 0, width, 0, *of_row] for a, b, of_row in zip(lens, foreseen, tokens, strict=True)]
    return encode_packet(round_index, np.array(rows, dtype=np.int64))


def make_exchange(letters: Letters, **values: Any) -> MessageExchange:
    group: Communicator = SoloCommunicator()
    return MessageExchange(
        mail=letters, rank=TARGET_RANK, draft_ranks=(DRAFT_RANK,), target_ranks=(TARGET_RANK,), peers=group,
        draft_peer=0, target_peer=1, group=group, target_vocab_size=100, use_logits=False,
        gated=GatedDrafts(OpenGate(), group, **values),
    )  # fmt: skip


def expect(exchange: MessageExchange, plan: RoundPlan) -> Draft:
    draft = exchange.transfer_draft(plan, None, ())
    assert draft is not None and draft.tokens.shape == (len(plan.decode_rows), plan.draft_len)
    return draft


class Drafted:
    """A drafter that drafts nothing, and keeps what it is told."""

    drafts_ahead = False

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def release_rows(self, plan: RoundPlan) -> None:
        """There are none."""

    begin_round = release_rows

    def guesses(self) -> np.ndarray | None:
        return None

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> None:
        return None

    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        self.seen.append([] if verdict is None else verdict.tokens.flatten().tolist())
