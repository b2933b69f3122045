"""The way of hidden states to a head on a rank of its own: what is sent of a round, laid out again as it was, and what
becomes of it where it is not taken in time, or never."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from parallel.errors import LinkError
from trtrun.core.nouns import HiddenStates, PrefillChunk, RoundPlan
from trtrun.rounds.exchange import hidden_link
from trtrun.rounds.exchange.hidden_link import HiddenLink, feeds, settled, unsettled

SHAPE, DTYPE = (2, 3), torch.bfloat16


class Mail:
    """A mailbox whose other end is its own; `unsent` bytes are on their way."""

    def __init__(self) -> None:
        self.posted: deque[bytes] = deque()
        self.unsent = 0

    def post(self, rank: int, tag: int, payload: bytes) -> None:
        self.posted.append(payload)

    def num_unsent_bytes(self) -> int:
        return self.unsent

    def take(self, rank: int, tag: int) -> bytes | None:
        return self.posted.popleft() if self.posted else None

    def wait(
        self, rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        return self.posted.popleft()

    def close(self) -> None:
        """Nothing is open."""


class Peers:
    """A communicator that keeps what is sent for whoever receives."""

    device = torch.device("cpu")

    def __init__(self, mail: Mail, *, on_device: bool) -> None:
        self.is_capturable = on_device
        self.sent: deque[torch.Tensor] = deque()
        self.announced: list[int] = []
        self.num_abandoned = 0
        self._mail = mail

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self.announced.append(len(self._mail.posted))
        self.sent.append(tensor.clone())

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self.sent.popleft())

    def abandon(self) -> None:
        self.num_abandoned += 1


class Passed:
    """An event that the device has passed, or not."""

    has_passed = True

    def record(self, stream: Any = None) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        return Passed.has_passed

    def elapsed_time(self, end_event: Any, /) -> float:
        return 0.0


class Stream:
    """Beside that of the rounds."""

    def __init__(self, device: torch.device) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.waited_for.append(stream)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """It is the current one."""
    assert stream.waited_for, "what is sent is made on the stream of the rounds"
    yield


@pytest.fixture(params=[False, True], ids=["messages", "device to device"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HiddenLink:
    """Both ends in one."""
    monkeypatch.setattr(hidden_link, "timing_event", Passed)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(Passed, "has_passed", True)
    mail = Mail()
    peers: Any = Peers(mail, on_device=request.param)
    return HiddenLink(mail, peers, rank=1, peer=0, shape=SHAPE, dtype=DTYPE, most_bytes=100)


def make_plan(draft_lens: list[int], prefill: tuple[PrefillChunk, ...] = (), round_index: int = 5) -> RoundPlan:
    lens = np.array(draft_lens, dtype=np.int32)
    rows, none = np.arange(len(lens), dtype=np.int32), np.zeros((0, 3), dtype=np.int32)
    return RoundPlan(round_index, (), (), none, prefill, rows, lens, np.zeros_like(lens), 50)


FOLLOWED, LEFT = PrefillChunk(5, 0, 4, False, True), PrefillChunk(6, 0, 2, True, False)
PLAN = make_plan([2, -1, 0, 2], (LEFT, FOLLOWED))
NUM_TOKENS = [3, 2, 1, 0, 1]


def tapped() -> HiddenStates:
    """Of PLAN, each number another one."""
    numbers = torch.arange(4 * 3 * 6 + 6 * 6, dtype=torch.float32).to(DTYPE)
    decoded, prompts = numbers[:72].view(4, 3, *SHAPE), numbers[72:].view(6, *SHAPE)
    return HiddenStates(decoded, [prompts[:2], prompts[2:]])


def assert_as_it_was(found: HiddenStates | None) -> None:
    hidden = tapped()
    assert found is not None and found.decoded.shape[:2] == (4, 3)
    for row, count in ((0, 3), (2, 1)):
        assert found.decoded[row, :count].equal(hidden.decoded[row, :count])
    assert [len(one) for one in found.prompts] == [0, 4] and found.prompts[1].equal(hidden.prompts[1])


def test_states_of_tokens_that_rows_gained_are_laid_out_as_they_were() -> None:
    states = settled(PLAN, NUM_TOKENS, tapped())
    assert len(states) == 3 + 1 + 0 + 4  # neither of rows that nothing is drafted for, nor of such prompts
    assert_as_it_was(unsettled(PLAN, NUM_TOKENS, states))


def test_rounds_that_feed_nothing_send_nothing() -> None:
    assert feeds(PLAN) and feeds(make_plan([0])) and feeds(make_plan([], (FOLLOWED,)))
    assert not feeds(make_plan([-1], (LEFT,))) and not feeds(make_plan([]))


def test_they_come_as_they_were_sent_behind_their_announcement(link: HiddenLink) -> None:
    link.post(PLAN.round_index, settled(PLAN, NUM_TOKENS, tapped()))
    peers: Any = link.peers
    assert peers.announced == ([1] if link.on_device else [])
    assert_as_it_was(link.receive(PLAN, NUM_TOKENS))
    # A round in which no row gained anything.
    plan = make_plan([2])
    link.post(plan.round_index, settled(plan, [0], HiddenStates(torch.zeros((1, 3, *SHAPE), dtype=DTYPE), [])))
    found = link.receive(plan, [0])
    assert found is not None and found.decoded.shape == (1, 1, *SHAPE)


def test_what_is_not_taken_adds_up_and_then_is_left_out(link: HiddenLink) -> None:
    Passed.has_passed = False
    states, mail = settled(PLAN, NUM_TOKENS, tapped()), link.mail
    assert isinstance(mail, Mail) and states.nbytes == 96
    link.post(PLAN.round_index, states)
    mail.unsent = 96
    link.post(PLAN.round_index, states)
    assert_as_it_was(link.receive(PLAN, NUM_TOKENS))
    assert link.receive(PLAN, NUM_TOKENS) is None
    Passed.has_passed, mail.unsent = True, 0
    link.post(PLAN.round_index, states)
    assert_as_it_was(link.receive(PLAN, NUM_TOKENS))


def test_those_of_another_round_are_no_states_of_this_one(link: HiddenLink) -> None:
    link.post(PLAN.round_index + 1, settled(PLAN, NUM_TOKENS, tapped()))
    with pytest.raises(LinkError, match="hidden states of 8 tokens of round 6 came in round 5, in which 8 are due"):
        link.receive(PLAN, NUM_TOKENS)


@pytest.mark.parametrize("is_taken", [False, True])
def test_what_nobody_takes_any_more_is_ended_once(link: HiddenLink, is_taken: bool) -> None:
    Passed.has_passed = is_taken
    link.post(PLAN.round_index, settled(PLAN, NUM_TOKENS, tapped()))
    for _ in range(2):
        link.give_up()
    peers: Any = link.peers
    assert peers.num_abandoned == int(link.on_device and not is_taken)
