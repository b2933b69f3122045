"""Limits on what one request may bring, whatever its protocol: prompts, words and their lengths, what the event loop
parses itself; and on the logits that are kept for all.

Words are strings that stop a text, that must not come, or that have a bias. All of them are checked when a request
comes, and some are encoded, while others wait. One list is held to `trtrun.core.values`; a request has one for each of
its prompts. Logits are large, 500 KB a token at 128k entries: what a request may come to is known when it comes, and
counted until its client has read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from launch.serve.admission.refusals import RETRY_SECONDS, Kind, Refusal
from trtrun.core import values
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError
from trtrun.tokens.text import Tokenizer

PARSED_IN_LOOP_BYTES = 1 << 12
"""Bytes of a request that the event loop reads itself: its JSON, its lists, the tokens of its prompt. What is longer is
parsed by worker processes (`launch.serve.parsing`)."""

SHORT_BODY = 1 << 16
"""Bytes of a body that is not counted among those that are read at once, and that waits for no longer one."""


MOST_OF_ALL_PROMPTS = 1 << 20
"""The most that one request may name over its prompts: characters of words and guides, and tokens that parameters name.
Each prompt goes to the engine with its own."""


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
"""The most prompts of one request."""


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


_LOGIT_BYTES = 4


class LogitsLimit:
    """Counts the logits of requests. It belongs to one event loop.

    Attributes:
        vocab_size: numbers of a position.
        most_bytes: over all positions of a request.
        most_together: bytes over all requests.
        num_bytes: of these, now.
    """

    def __init__(self, vocab_size: int, most_bytes: int, most_together: int) -> None:
        self.vocab_size = vocab_size
        self.most_bytes = most_bytes
        self.most_together = most_together
        self.num_bytes = 0

    def enter(self, lengths: Sequence[int], sampling: Sequence[SamplingParams], max_length: int) -> LogitsPlace:
        """Let a request in. Completions of one answer are filled up to the longest.

        Args:
            lengths: tokens of each prompt.
            sampling: of each prompt.
            max_length: tokens at which the engine ends a completion, its prompt among them.

        Raises:
            Refusal: it may come to more than one may have, or there is no room for it now.
        """
        num_bytes = self._check(lengths, sampling, max_length)
        if num_bytes and self.num_bytes + num_bytes > self.most_together:
            raise Refusal(
                Kind.BUSY,
                f"with {num_bytes} bytes of this request more logits would be kept at once than the "
                f"{self.most_together} bytes that may be (server.max_total_logits_bytes): send the request again later",
                code="too_many_bytes",
                retry_after=RETRY_SECONDS,
            )
        return LogitsPlace(self, num_bytes)

    def _check(self, lengths: Sequence[int], sampling: Sequence[SamplingParams], max_length: int) -> int:
        """The bytes that a request may come to."""
        of_prompts = of_tokens = 0
        for length, parameters in zip(lengths, sampling, strict=True):
            if parameters.return_context_logits:
                of_prompts = max(of_prompts, length)
            if parameters.return_generation_logits:
                of_tokens = max(of_tokens, min(parameters.max_tokens, max_length - length))
        count = sum(parameters.n for parameters in sampling)
        num_bytes = count * (of_prompts + of_tokens) * self.vocab_size * _LOGIT_BYTES
        if num_bytes <= self.most_bytes:
            return num_bytes
        asked = {"return_context_logits": of_prompts, "return_generation_logits": of_tokens}
        names = [name for name, length in asked.items() if length]
        raise Refusal(
            Kind.INVALID,
            f"{' and '.join(names)}: logits of {of_prompts + of_tokens} tokens, {self.vocab_size} each, for each of "
            f"{count} completions take {num_bytes} bytes, and a request may have {self.most_bytes} "
            "(server.max_logits_bytes): send a shorter prompt, or ask for fewer tokens",
            names[0],
        )


class LogitsPlace:
    """What is counted of one request, from `enter` until `leave`."""

    def __init__(self, limit: LogitsLimit, num_bytes: int) -> None:
        self._limit = limit
        self._num_bytes = num_bytes
        limit.num_bytes += num_bytes

    def leave(self) -> None:
        """Make room, once the client has read its answer or will not; calling it again does nothing."""
        self._limit.num_bytes -= self._num_bytes
        self._num_bytes = 0
