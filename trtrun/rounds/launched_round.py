"""A round that an engine rank has launched, and its report: the verdict on its way from the device to the host, which
is the one copy of a round.

A GPU works after the calls that launch its work have returned, so the next round can be launched before the report of
this one is read: then the device goes from one to the other without a gap. It knows the verdict's tensors and the
report's layout. It does not know what a round is made of, or who reads the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from trtrun.core.nouns import RoundPlan, Step, Verdict
from trtrun.kernels.chooser import operations_of
from trtrun.tensors import to_host
from trtrun.timing.phase_clock import Event, timing_event
from trtrun.wire.reports import ReportArrays, RoundTimes


class VerdictCopy:
    """A verdict that is copied to the host. Counts, lengths, tokens and the bits of their logits travel in one tensor.

    A GPU writes it to pinned memory behind what it has to do first, and nothing waits for that here. The memory must be
    kept until `wait`: torch does not know that a kernel still writes there, and would hand it to somebody else.
    """

    def __init__(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None = None) -> None:
        """Begin to copy.

        Args:
            plan: the round's.
            verdict: the leader's own; None where the round samples nothing.
            step: what it was made from; None where nothing of it is reported.
        """
        self._round_index = plan.round_index
        self._width = 1
        self._tells_suffix = False
        self._event: Event | None = None
        self._copies: list[torch.Tensor] = []
        self._of_prompts: list[torch.Tensor] = []
        self._prompt_logits = None if step is None else step.prompt_logits
        self._logits: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, int] = {}
        scores = None if step is None else step.prompt_logprobs
        if scores is not None:
            self._of_prompts = [to_host(scores.token_ids), to_host(scores.values)]
        if verdict is not None:
            self._copy(verdict)
        if (
            (verdict is not None and verdict.tokens.is_cuda)
            or (scores is not None and scores.values.is_cuda)
            or (self._prompt_logits is not None and self._prompt_logits.is_pinned())
        ):
            self._event = timing_event()
            self._event.record()

    def _copy(self, verdict: Verdict) -> None:
        assert verdict.draft_lens is not None and verdict.chosen_logits is not None  # the leader's own
        self._width, self._waiting = verdict.tokens.shape[1], {**verdict.waiting}
        found = verdict.num_suffix_tokens
        self._tells_suffix = found is not None
        pack = operations_of(verdict.tokens.device.type).pack_verdict
        self._copies = [pack(verdict.num_tokens, verdict.draft_lens, verdict.tokens, verdict.chosen_logits, found)]
        if verdict.logprobs is not None:
            self._copies += [to_host(verdict.logprobs.token_ids), to_host(verdict.logprobs.values)]
        # On a GPU the next forward writes where they are, behind the copy.
        self._logits = {place: to_host(one) for place, one in verdict.reported_logits.items()}

    def is_here(self) -> bool:
        """Whether `wait` would not wait."""
        return self._event is None or self._event.query()

    def wait(self, take_times: Callable[[], RoundTimes] = RoundTimes) -> ReportArrays:
        """Wait for the copy, and make the report of it.

        Args:
            take_times: tells what phases took, once the copy is there.
        """
        if self._event is not None:
            self._event.synchronize()
        report = self._report(take_times)
        if self._of_prompts:
            ids, values = self._of_prompts
            report = replace(report, prompt_ids=ids.numpy(), prompt_values=values.numpy())
        if self._prompt_logits is not None:
            report = replace(report, prompt_logits=self._prompt_logits.numpy())
        if self._logits:
            assert report.num_tokens is not None
            gained = report.num_tokens.clip(min=0).tolist()
            report = replace(
                report, logits={place: one[: gained[place]].numpy() for place, one in self._logits.items()}
            )
        return report

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the copy; num_tokens [rows] and tokens [rows, width].

        A row with a logit that is not finite gains no token: looking for that here costs the device nothing.
        """
        if self._event is not None:
            self._event.synchronize()
        if not self._copies:
            tokens = np.empty((0, 1), dtype=np.int64)
            return tokens[:, 0], tokens
        packed, width = self._copies[0].numpy(), self._width
        num_tokens, tokens = packed[:, 0], packed[:, 2 : 2 + width]
        chosen = np.isfinite(packed[:, 2 + width : 2 + 2 * width].astype(np.int32).view(np.float32))
        if not chosen.all():
            num_tokens = np.where((chosen | (tokens < 0)).all(axis=1), num_tokens, 0)
        return num_tokens, tokens

    def _report(self, take_times: Callable[[], RoundTimes]) -> ReportArrays:
        """The report without log probabilities of prompts, and without logits."""
        num_tokens, tokens = self.numbers()
        if not self._copies:
            return ReportArrays(self._round_index, take_times(), num_tokens, num_tokens, tokens)
        if self._waiting:
            num_tokens = num_tokens.copy()
            num_tokens[[*self._waiting]] = [*self._waiting.values()]
        packed = self._copies[0].numpy()
        report = ReportArrays(self._round_index, take_times(), num_tokens, np.maximum(packed[:, 1], 0), tokens)
        if self._tells_suffix:
            report = replace(report, num_suffix_tokens=packed[:, -1])
        if len(self._copies) == 1:
            return report
        _, ids, values = self._copies
        return replace(report, logprob_ids=ids.numpy(), logprob_values=values.numpy())


class LaunchedRound(Protocol):
    """One round of this rank. Rounds are finished in the order in which they were launched."""

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        ...

    @property
    def may_be_followed(self) -> bool:
        """Whether the next round may be launched before this one is finished."""
        ...

    def release(self) -> None:
        """Give the device what it waits for in this round, if it does: called once the round before is finished. It
        waits for what comes from other ranks, and may be called again."""
        ...

    def finish(self) -> ReportArrays | None:
        """Wait for the device; the report of a leader, None elsewhere."""
        ...


class VerdictRound(LaunchedRound, Protocol):
    """A round of the target leader."""

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the verdict: its num_tokens [rows] and tokens [rows, width], as the report has them."""
        ...


@dataclass(frozen=True)
class DoneRound(LaunchedRound):
    """A round without anything to wait for.

    Attributes:
        report: of a leader; None elsewhere.
    """

    report: ReportArrays | None
    may_be_followed = True

    @override
    def is_done(self) -> bool:
        return True

    @override
    def release(self) -> None:
        """Do nothing: no device waits in this round."""

    @override
    def finish(self) -> ReportArrays | None:
        return self.report


@dataclass(frozen=True)
class DecidedRound(VerdictRound):
    """A round of the target leader, whose verdict is on its way to the host.

    Attributes:
        verdict: the copy.
        take_times: tells what phases took, once the verdict is there.
    """

    verdict: VerdictCopy
    take_times: Callable[[], RoundTimes]
    may_be_followed = True

    @override
    def is_done(self) -> bool:
        return self.verdict.is_here()

    @override
    def release(self) -> None:
        """Do nothing: no device waits in this round."""

    @override
    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        return self.verdict.numbers()

    @override
    def finish(self) -> ReportArrays:
        return self.verdict.wait(self.take_times)


@dataclass
class AwaitedRound(LaunchedRound):
    """A round of a rank that drafts, whose verdict comes as a message.

    Attributes:
        is_here: whether the verdict is.
        end: takes the verdict in; the round's report.
    """

    is_here: Callable[[], bool]
    end: Callable[[], LaunchedRound]
    may_be_followed = False

    @override
    def is_done(self) -> bool:
        return self.is_here()

    @override
    def release(self) -> None:
        """Do nothing: no device waits."""

    @override
    def finish(self) -> ReportArrays | None:
        return self.end().finish()
