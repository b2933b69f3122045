"""The way of the target's hidden states to a head on a rank of its own: from the target leader's device to the head's,
of the tokens that a round has settled.

The target does not wait for it. Where both have NCCL, states are sent on a stream beside that of the rounds; else they
are messages of the host. What is not taken in time adds up: beyond some bytes a round's states are left out, which the
head is told. A round's states are announced by a message of the host, so that the head's rank knows what comes.

It knows plans, counts and tensors. It does not know what heads make of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from parallel.communicator import Communicator
from parallel.errors import LinkError
from parallel.mailbox import Mailbox
from trtrun.core.nouns import HiddenStates, RoundPlan
from trtrun.timing.phase_clock import Event, timing_event
from trtrun.wire.messages import HIDDEN_TAG

_LEFT_OUT = -1
_HEADER = 2


def fed_rows(plan: RoundPlan) -> list[int]:
    """Indices into `plan.decode_rows` of rows that heads are fed: those that something is drafted for in any round."""
    return [index for index, length in enumerate(plan.draft_lens.tolist()) if length >= 0]


def feeds(plan: RoundPlan) -> bool:
    """Whether heads are fed anything of a round."""
    return bool(fed_rows(plan)) or any(chunk.has_draft_kv for chunk in plan.prefill)


def settled(plan: RoundPlan, num_tokens: Sequence[int], hidden: HiddenStates) -> torch.Tensor:
    """[tokens, taps, hidden]: the states of what rows have gained, as far as heads are fed it, then of chunks.

    Args:
        plan: of the round.
        num_tokens: that each of the plan's sampled rows gained, decode rows first.
        hidden: what was tapped; of a tree along the accepted path.
    """
    width = hidden.decoded.shape[1]
    places = [index * width + step for index in fed_rows(plan) for step in range(num_tokens[index])]
    parts = [states for chunk, states in zip(plan.prefill, hidden.prompts, strict=True) if chunk.has_draft_kv]
    if places:
        index = torch.tensor(places, dtype=torch.int64).to(hidden.decoded.device, non_blocking=True)
        parts.insert(0, hidden.decoded.flatten(0, 1).index_select(0, index))
    return torch.cat(parts) if parts else hidden.decoded.flatten(0, 1)[:0]


def unsettled(plan: RoundPlan, num_tokens: Sequence[int], states: torch.Tensor) -> HiddenStates:
    """What `settled` was given, as far as it went: of other rows and chunks there are any states, and none. Each row
    has one at least."""
    fed = fed_rows(plan)
    width = max((num_tokens[index] for index in fed if num_tokens[index]), default=1)
    places, start = [[0] * width for _ in plan.decode_rows], 0
    for index in fed:
        count = num_tokens[index]
        places[index][:count] = range(start, start + count)
        start += count
    prompts = []
    for chunk in plan.prefill:
        length = chunk.length if chunk.has_draft_kv else 0
        prompts.append(states[start : start + length])
        start += length
    shape = (len(places), width, *states.shape[1:])
    if not len(states):  # no row has gained anything
        return HiddenStates(states.new_zeros(shape), prompts)
    taken = torch.tensor(places, dtype=torch.int64).to(states.device, non_blocking=True)
    return HiddenStates(states.index_select(0, taken.flatten()).view(shape), prompts)


@dataclass
class HiddenLink:
    """One end: of the target leader, which posts, or of the head's rank, which receives.

    Attributes:
        mail: messages on the host.
        peers: all workers.
        rank: of the other end, in the world.
        peer: its place among `peers`.
        shape: hidden states of a token, and numbers of each.
        dtype: of these.
        most_bytes: that may be under way; one round's may be more where nothing is.
    """

    mail: Mailbox
    peers: Communicator
    rank: int
    peer: int
    shape: tuple[int, int]
    dtype: torch.dtype
    most_bytes: int
    _stream: torch.cuda.Stream | None = None
    _sending: deque[tuple[Event, int]] = field(default_factory=deque)
    _is_given_up: bool = False

    @property
    def on_device(self) -> bool:
        """Whether states go from device to device."""
        return self.peers.is_capturable

    def post(self, round_index: int, states: torch.Tensor) -> None:
        """Send states [tokens, taps, hidden] of a round, without waiting for anybody."""
        under_way = self._bytes_under_way()
        if under_way and under_way + states.nbytes > self.most_bytes:
            self.mail.post(self.rank, HIDDEN_TAG, _header(round_index, _LEFT_OUT))
            return
        header = _header(round_index, len(states))
        if not self.on_device:
            numbers = states.contiguous().view(torch.uint8).cpu().numpy()
            self.mail.post(self.rank, HIDDEN_TAG, header + numbers.tobytes())
            return
        self.mail.post(self.rank, HIDDEN_TAG, header)
        if not len(states):
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(states.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(states.device))
        with torch.cuda.stream(self._stream):
            self.peers.send(states, self.peer)
            sent = timing_event()
            sent.record()
        states.record_stream(self._stream)
        self._sending.append((sent, states.nbytes))

    def receive(self, plan: RoundPlan, num_tokens: Sequence[int]) -> HiddenStates | None:
        """The states of a round; None where they were left out. The host waits for the announcement, and for no
        device.

        Raises:
            LinkError: they are not those of the round.
        """
        payload = self.mail.wait(self.rank, HIDDEN_TAG)
        assert payload is not None
        round_index, count = np.frombuffer(payload, dtype=np.int64, count=_HEADER).tolist()
        due = sum(num_tokens[index] for index in fed_rows(plan))
        due += sum(chunk.length for chunk in plan.prefill if chunk.has_draft_kv)
        if round_index != plan.round_index or count not in (due, _LEFT_OUT):
            raise LinkError(
                f"hidden states of {count} tokens of round {round_index} came in round {plan.round_index}, in which "
                f"{due} are due"
            )
        if count == _LEFT_OUT:
            return None
        shape = (count, *self.shape)
        if self.on_device:
            states = torch.empty(shape, dtype=self.dtype, device=self.peers.device)
            states = self.peers.recv(states, self.peer) if count else states
        elif count:
            numbers = np.frombuffer(payload, dtype=np.uint8, offset=_HEADER * 8).copy()
            states = torch.from_numpy(numbers).view(self.dtype).view(shape).to(self.peers.device)
        else:
            states = torch.empty(shape, dtype=self.dtype, device=self.peers.device)
        return unsettled(plan, num_tokens, states)

    def give_up(self) -> None:
        """Nobody takes what is under way: end it, so that no device waits."""
        if not self._is_given_up:
            self._is_given_up = True
            if self._sending and not all(sent.query() for sent, _ in self._sending):
                self.peers.abandon()

    def _bytes_under_way(self) -> int:
        if not self.on_device:
            return self.mail.num_unsent_bytes()
        while self._sending and self._sending[0][0].query():
            self._sending.popleft()
        return sum(nbytes for _, nbytes in self._sending)


def _header(round_index: int, count: int) -> bytes:
    return np.array([round_index, count], dtype=np.int64).tobytes()
