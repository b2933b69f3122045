"""Admission: who is let in while how much is in work, how long a request may take, and how much it may bring, whatever
its protocol.

Completions that have a row run at once, others wait for one; the frontend knows how many of both there can be, so that
admission answers at once. Words are strings that stop a text, that must not come, or that have a bias. All of them are
gone through when a request comes, and some become tokens, while others wait. One list is held to what
`trtrun.core.values` says; a request has one for each of its prompts. It knows numbers and sampling parameters. It does
not know what prompts are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field

from launch.serve.admission.owners import Owner, Owners
from launch.serve.admission.refusals import Kind, Refusal
from trtrun.core import values
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError
from trtrun.scheduling.queue import has_share
from trtrun.tokens.text import Tokenizer

RETRY_SECONDS = 1
"""After which a client that was turned away may try again: a queue moves with every completion that ends."""

RESTART_RETRY_SECONDS = 5
"""The same while the engine starts, or hangs, and while the server ends: another may stand in for it."""


@dataclass
class AdmissionControl:
    """Counts what is in work, and turns away what is too much.

    Attributes:
        max_running: completions that have a row, at most.
        max_queue: completions beyond these.
        max_streams: requests in work, at most.
        is_open: whether the engine is there.
        is_hanging: whether it is there and does not get on.
        is_closing: whether the server ends: nobody is let in any more.
        num_completions, num_requests: in work.
    """

    max_running: int
    max_queue: int
    max_streams: int
    is_open: bool = False
    is_hanging: bool = False
    is_closing: bool = False
    num_completions: int = 0
    num_requests: int = 0
    _owners: Owners = field(default_factory=Owners)
    _is_empty: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until nothing is in work; whether that came within so many seconds."""
        self._is_empty.clear()
        if self.num_requests:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), seconds)
        return not self.num_requests

    def leave(self) -> None:
        """A request is over."""
        self.num_requests -= 1
        if not self.num_requests:
            self._is_empty.set()

    def check_open(self) -> None:
        """Raise a Refusal while nobody is let in."""
        if self.is_closing:
            raise server_ending()
        if not self.is_open:
            raise engine_starting()
        if self.is_hanging:
            raise Refusal(
                Kind.UNAVAILABLE, "the engine does not get on: send the request again later", code="engine_hanging",
                retry_after=RESTART_RETRY_SECONDS,
            )  # fmt: skip

    def enter(self, num_completions: int, owner: str = "") -> Ticket:
        """Let a request in. Places are shared by owners (`trtrun.scheduling.queue.has_share`).

        Raises:
            Refusal: there is no room, or nobody is let in.
        """
        self.check_open()
        most = self.max_running + self.max_queue
        if num_completions > most:
            raise Refusal(
                Kind.INVALID,
                f"the request asks for {num_completions} completions, more than the {most} that may be in work at once "
                "(scheduler.max_batch_size and server.max_queue)",
            )
        of_owner = self._owners.ask(owner)
        others = self._owners.num - 1
        if not has_share(num_completions, of_owner.num_completions, self.num_completions, most, others):
            own = f", {of_owner.num_completions} of them yours" if others else ""
            raise Refusal(
                Kind.BUSY,
                f"{self.num_completions} completions are in work{own}, {num_completions} more are asked for, and "
                f"{most} may be (scheduler.max_batch_size and server.max_queue): send the request again later",
                code="queue_full",
                retry_after=RETRY_SECONDS,
            )
        if not has_share(1, of_owner.num_requests, self.num_requests, self.max_streams, others):
            own = f", {of_owner.num_requests} of them yours" if others else ""
            raise Refusal(
                Kind.BUSY,
                f"{self.num_requests} requests are in work{own} (server.max_streams is {self.max_streams}): send the "
                "request again later",
                code="too_many_streams",
                retry_after=RETRY_SECONDS,
            )
        return Ticket(self, num_completions, of_owner)


class Ticket:
    """A request's place among those admitted, from `enter` until `leave`, and those of its completions, each until it
    has
    ended: an answer that is not read yet takes no place of those that are worked for."""

    def __init__(self, admission: AdmissionControl, num_completions: int, owner: Owner) -> None:
        self._admission = admission
        self._owner = owner
        self._num_completions = 0
        self._has_left = False
        admission.num_requests += 1
        owner.num_requests += 1
        self._change(num_completions)

    def _change(self, num_completions: int) -> None:
        for counted in (self._admission, self._owner):
            counted.num_completions += num_completions
        self._num_completions += num_completions

    def end_completion(self) -> None:
        """A completion has ended; more than there are are passed over."""
        if self._num_completions:
            self._change(-1)

    def leave(self) -> None:
        """Give the places back; calling it again does nothing."""
        self._change(-self._num_completions)
        if not self._has_left:
            self._has_left = True
            self._owner.num_requests -= 1
            self._admission.leave()


def engine_starting() -> Refusal:
    """What a request is told while there is no engine."""
    return Refusal(
        Kind.UNAVAILABLE, "the engine is starting: send the request again later", code="engine_starting",
        retry_after=RESTART_RETRY_SECONDS,
    )  # fmt: skip


def server_ending() -> Refusal:
    """What a request is told that comes too late, or is not done when the server's time is over."""
    return Refusal(Kind.UNAVAILABLE, "the server is ending", code="server_ending", retry_after=RESTART_RETRY_SECONDS)


def out_of_time(seconds: float) -> Refusal:
    """What a request is told that was not done in time."""
    return Refusal(
        Kind.TIMEOUT, f"the request was not done within {seconds:g} s (server.request_timeout_s)", code="timeout"
    )


PARSED_IN_LOOP_BYTES = 1 << 12
"""Bytes of a request that the event loop reads itself: its JSON, its lists, the tokens of its prompt. What is longer is
read in other processes (`reading`)."""

SHORT_BODY = 1 << 16
"""Bytes of a body that is not counted among those that are read at once, and that waits for no longer one."""


MOST_OF_ALL_PROMPTS = 1 << 20
"""Of one request, over its prompts: characters of words and guides, and tokens that parameters name. Each prompt goes
to the engine with its own."""


def check_words(name: str, words: Sequence[Sized], unit: str = "characters") -> None:
    """Hold a list to the limits, which are those of `trtrun.core.values.check_words`.

    Args:
        name: of the field or input, for the message.
        words: texts, or token ids of each.
        unit: what words are made of, for the message.

    Raises:
        Refusal: there are too many, or they are too long.
    """
    try:
        values.check_words(name, words, unit)
    except InvalidRequestError as error:
        raise Refusal(Kind.INVALID, str(error), name) from None


def check_all_prompts(sampling: Iterable[SamplingParams]) -> None:
    """Hold what the parameters of all prompts name to MOST_OF_ALL_PROMPTS.

    Args:
        sampling: of each prompt; several may have the same object.

    Raises:
        Refusal: it is more.
    """
    lengths: dict[int, int] = {}
    total = 0
    for parameters in sampling:
        length = lengths.get(id(parameters))
        if length is None:
            length = lengths[id(parameters)] = named_length(parameters)
        total += length
    if total > MOST_OF_ALL_PROMPTS:
        raise Refusal(
            Kind.INVALID,
            f"stop, stop_sequences, bad_words, logit_bias, stop_token_ids, draft_token_ids and guided hold {total} "
            f"characters and tokens over all prompts; {MOST_OF_ALL_PROMPTS} are the most: send fewer prompts in a "
            "request",
        )


def named_length(sampling: SamplingParams) -> int:
    """Characters of the words and of the guide, and tokens, that parameters name."""
    words = (*sampling.stop, *sampling.stop_sequences, *sampling.bad_words)
    tokens = (sampling.logit_bias, sampling.stop_token_ids, sampling.draft_token_ids)
    guide = 0 if sampling.guided is None else len(sampling.guided.text)
    return sum(map(len, words)) + sum(map(len, tokens)) + guide


MOST_PROMPTS = 1024
"""Of one request."""


def check_counts(prompts: Sized, sampling: Sequence[SamplingParams]) -> None:
    """Hold a request to the limits.

    Args:
        prompts: of the request.
        sampling: of each prompt; several may have the same object.

    Raises:
        Refusal: there are too many prompts, or their parameters name too much.
    """
    if not 0 < len(prompts) <= MOST_PROMPTS:
        raise Refusal(Kind.INVALID, f"a request has 1 to {MOST_PROMPTS} prompts, not {len(prompts)}", "prompt")
    check_all_prompts(sampling)


def check_text(text: str, tokenizer: Tokenizer | None, most_tokens: int) -> None:
    """Refuse a text of which it is known, before it becomes tokens, that these are too many.

    Args:
        text: of a prompt.
        tokenizer: of the model; None where there is none.
        most_tokens: that a prompt may have.

    Raises:
        Refusal: it is too long.
    """
    most = None if tokenizer is None else tokenizer.most_bytes_of_a_token
    if most is None or len(text) <= most * most_tokens:
        return
    raise Refusal(
        Kind.INVALID,
        f"the prompt is too long: it has {len(text)} characters, more than the {most_tokens} tokens that there is room "
        "for can spell; shorten it",
        "prompt",
        "context_length_exceeded",
    )


def distinct(sampling: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Each object once: the prompts of a request share theirs."""
    return list({id(parameters): parameters for parameters in sampling}.values())
