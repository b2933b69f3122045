"""What a caller gets back: completions, their statistics, and pieces of text while they are made.

Plain data. It knows the nouns of `core` and nothing of ranks, models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from trtrun.core.nouns import TokenLogprobs
from trtrun.core.request_statistics import RequestStatistics

RequestId = int | str
"""How a caller names a request."""

NONE_ALLOWED = (
    "no token may be chosen: bad_words, or stop tokens before min_tokens, forbid every one; or the target's logits are "
    "not finite (NaN or infinite)"
)
"""The error of a row whose own parameters forbid all tokens: they are the caller's, and other errors are not."""

GUIDE_ENDED = (
    "no token may be chosen: guided's grammar has become too expensive here, or bad_words or min_tokens forbid what it "
    "allows; or the target's logits are not finite (NaN or infinite)"
)
"""The error of a guided row for which no token is left."""

OWN_FAULTS = (NONE_ALLOWED, GUIDE_ENDED)
"""Errors of rows that are their requests' own."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log probabilities of the tokens of a prompt, under the target's raw distribution, of all but the first: nothing
    is before it. Packed, as a prompt may be long.

    Attributes:
        width: numbers of a position: its own token's, and those of the most likely ones, best first.
        token_ids: [positions, width] int32 of the machine's byte order.
        values: [positions, width] float32.
    """

    width: int
    token_ids: bytes
    values: bytes

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """Pack what `entries` returns, of all alternatives."""
        scored = [entry for entry in entries if entry is not None]
        tokens = [[entry.token_id, *(token for token, _ in entry.alternatives)] for entry in scored]
        values = [[entry.logprob, *(value for _, value in entry.alternatives)] for entry in scored]
        width = len(tokens[0]) if tokens else 1
        return cls(width, np.array(tokens, dtype=np.int32).tobytes(), np.array(values, dtype=np.float32).tobytes())

    def entries(self, alternatives: int | None = None) -> list[TokenLogprobs | None]:
        """One for each token of the prompt, None for the first; of the alternatives so many at most, None for all."""
        ids = np.frombuffer(self.token_ids, dtype=np.int32).reshape(-1, self.width)
        values = np.frombuffer(self.values, dtype=np.float32).reshape(-1, self.width)
        end = self.width if alternatives is None else 1 + alternatives
        entries: list[TokenLogprobs | None] = [None]
        for tokens, numbers in zip(ids[:, :end].tolist(), values[:, :end].tolist(), strict=True):
            entries.append(TokenLogprobs(tokens[0], numbers[0], tuple(zip(tokens[1:], numbers[1:], strict=True))))
        return entries


class Logits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The target's logits at some positions, before penalties, masks and temperature. They are many: packed, and in
    parts, so that nobody puts them together before that is needed.

    Attributes:
        width: tokens of the target's vocabulary.
        parts: [positions, width] float32 of the machine's byte order each, one behind the other.
    """

    width: int
    parts: tuple[bytes, ...]

    @property
    def num_positions(self) -> int:
        """Over all parts."""
        return sum(map(len, self.parts)) // (_FLOAT_BYTES * self.width)

    def arrays(self) -> list[np.ndarray]:
        """[positions, width] float32 for each part, which cannot be written to."""
        return [np.frombuffer(part, dtype=np.float32).reshape(-1, self.width) for part in self.parts]

    def array(self) -> np.ndarray:
        """[positions, width] float32 of all parts, which cannot be written to."""
        return Logits(self.width, (b"".join(self.parts),)).arrays()[0]

    def behind(self, count: int) -> Logits | None:
        """Without the first `count` positions; None where no other is left."""
        left = self.array()[count:]
        return Logits(self.width, (left.tobytes(),)) if len(left) else None


_FLOAT_BYTES = 4


def join_logits(found: Sequence[Logits | None]) -> Logits | None:
    """Logits of several deltas, one behind the other; None where there are none."""
    known = [one for one in found if one is not None]
    if len(known) < 2:
        return known[0] if known else None
    return Logits(known[0].width, tuple(part for one in known for part in one.parts))


@dataclass(frozen=True)
class CompletionOutput:
    """One finished completion of a prompt.

    Attributes:
        index: in [0, n).
        text: the tokens as text, stop strings cut off; empty for a checkpoint without a tokenizer.
        token_ids: every token generated, a final end-of-sequence token included.
        finish_reason: 'stop' or 'length'.
        statistics: rounds, drafted and accepted tokens, times.
        logprobs: one entry a token where the request asked for them.
        token_origins: how each token came, a letter each: `a` an accepted draft token, `r` recovered after a rejected
            one, `b` the bonus behind a draft that was accepted whole, `p` plain: no draft was verified, as for the
            first token. After a preemption, and on another engine, the next token is plain again.
        generation_logits: [tokens, vocab] float32 where the request asked for them: of each token those of the target
            that it was chosen from, before penalties, masks and temperature. It cannot be written to.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    statistics: RequestStatistics
    logprobs: list[TokenLogprobs] | None = None
    token_origins: str = ""
    generation_logits: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt.

    Attributes:
        index: place of the prompt in the input.
        prompt: its text, None when it came as token ids.
        prompt_token_ids: its tokens.
        completions: `n` of them; empty when the request was refused.
        error: why it was refused, else None.
        prompt_logprobs: one entry a token of the prompt, None for the first, where the request asked for them.
        context_logits: [prompt tokens, vocab] float32 where the request asked for them: the target's behind each token
            of the prompt, so that the last are those of the first new token. It cannot be written to. Comparisons
            leave arrays out.
    """

    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[CompletionOutput, ...]
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    context_logits: np.ndarray | None = field(default=None, compare=False)


class CompletionDelta(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What one round added to a completion. Nobody changes it. Between processes of a server it travels as it is: a
    list without names, which would take as long as making it.

    Attributes:
        request_id: of the request, as `LLMEngine.add_request` returned it.
        index: which of the request's `n` completions.
        token_ids: its new tokens; none where a round gave only the end, or logits of the prompt.
        text: its new text: never ends inside a character or inside what may become a stop string, so it may lag behind
            the tokens; empty for a checkpoint without a tokenizer.
        logprobs: one entry a new token where the request asked for them, else None.
        finish_reason: 'stop', 'length' or 'error' on the last delta, else None.
        error: why, where it ended with 'error'.
        token_origins: how each new token came; see CompletionOutput.
        statistics: of the completion so far; final on the last delta.
        prompt_logprobs: on the first delta of a request's first completion, where it asked for them, else None.
        context_logits: where the request asked for them, those behind further tokens of its prompt, on deltas of its
            first completion: as they come, before its first token on deltas without tokens, the last ones with it.
        generation_logits: of each new token where the request asked for them, else None.
    """

    request_id: RequestId
    index: int
    token_ids: tuple[int, ...]
    text: str
    statistics: RequestStatistics
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    token_origins: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    context_logits: Logits | None = None
    generation_logits: Logits | None = None


def merge_deltas(deltas: Sequence[CompletionDelta]) -> CompletionDelta:
    """What several rounds in a row added to one completion, as one delta."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return msgspec.structs.replace(
        last,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        token_origins="".join(delta.token_origins for delta in deltas),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        context_logits=join_logits([delta.context_logits for delta in deltas]),
        generation_logits=join_logits([delta.generation_logits for delta in deltas]),
        logprobs=None
        if all(delta.logprobs is None for delta in deltas)
        else tuple(entry for delta in deltas for entry in delta.logprobs or ()),
    )


@dataclass(frozen=True)
class RankReport:
    """What one rank holds once it has started. Bytes; `kv_tokens` counts tokens that its KV store holds.

    `working_bytes` is what its largest round needs beside weights and KV: measured on GPUs, an upper bound on CPUs.
    `device_used_bytes` is what its GPU's driver counts then, of all processes; 0 on CPUs.
    `kernels` says what its engines compute with: "triton", "avx512_bf16" (trtrun's own on the CPU) or "torch".
    `device_kind` names the make of its device, as far as speeds depend on it.
    `files_hash` tells the files of its models, as they were once it had read them, from others.
    `start_seconds` is what phases of its start took, by name, in order: from communicators to all kernels run once.
    """

    rank: int
    host: str
    role: str
    device: str
    bytes_read: int = 0
    shard_bytes: int = 0
    working_bytes: int = 0
    kv_bytes: int = 0
    kv_tokens: int = 0
    peak_memory_bytes: int = 0
    device_used_bytes: int = 0
    kernels: str = ""
    device_kind: str = ""
    files_hash: str = ""
    start_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StartReport:
    """All ranks' reports, in rank order."""

    ranks: tuple[RankReport, ...] = field(default_factory=tuple)

    def phase_seconds(self) -> dict[str, float]:
        """What phases of the start took, in order, on the rank that was the last in each."""
        found: dict[str, float] = {}
        for phase, seconds in (item for rank in self.ranks for item in rank.start_seconds.items()):
            found[phase] = max(seconds, found.get(phase, 0.0))
        return found
