"""Logits that requests ask for, which are many: 500 KB a token at 128k entries. How much one request may have of them,
and all together, until their clients have read them.

What a request may come to is known when it comes, and counted then. It knows numbers and sampling parameters. It does
not know how answers travel.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.serve.admission.limits import RETRY_SECONDS
from launch.serve.admission.refusals import Kind, Refusal
from trtrun.core.sampling_params import SamplingParams

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
        """Its client has read its answer, or will not; calling it again does nothing."""
        self._limit.num_bytes -= self._num_bytes
        self._num_bytes = 0
