"""The Python API: prompts in, completions out, in one process or as rank 0 of an MPI job.

    with LLM(target="checkpoints/target", draft="checkpoints/draft", draft_len=4) as llm:
        for output in llm.generate(["def main("], SamplingParams(max_tokens=64)):
            print(output.completions[0].text)

A program whose configuration needs several ranks is started on every rank by mpirun, and every rank comes here:

    with open_llm(load_config("run.yaml")) as llm:
        if llm is not None:  # rank 0; the others have served until it closed
            outputs = llm.generate(["def main("])

This module collects deltas of the engine core (`llm_engine`) for those who asked for them. It knows calls, threads and
interrupts; it does not know rounds or ranks.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from trtrun.config import RuntimeConfig, make_one_device_config
from trtrun.errors import InvalidRequestError, PlacementError, QueueFullError
from trtrun.interrupts import FairLock, held_interrupts, listening
from trtrun.llm_engine import LLMEngine
from trtrun.outputs import CompletionDelta, RequestId, RequestOutput, StartReport
from trtrun.pending import PendingRequest
from trtrun.prompts import Prompt
from trtrun.sampling_params import SamplingParams
from trtrun.text import Tokenizer


class LLM:
    """A target model, optionally with a draft model, ready to complete prompts.

    Several threads may call it at once: they share the running batch, and each gets what it asked for. After any
    exception in a call, Ctrl-C included, the next call works.

    Attributes:
        config: what it was made from.
        report: what each rank holds.
        tokenizer: None when the checkpoint has none; prompts are then token ids.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        draft: str | os.PathLike[str] | None = None,
        *,
        config: RuntimeConfig | None = None,
        draft_len: int = 4,
        use_logits: bool = False,
        dtype: str = "auto",
        draft_quantization: str = "none",
        target_quantization: str = "none",
        device: str | None = None,
        on_load_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the models.

        Args:
            target: directory of the target, when there is no `config`.
            draft: directory of the draft; None decodes with the target alone.
            config: everything, as in the YAML file; then the arguments before it are not used.
            draft_len: tokens drafted in one round.
            use_logits: accept sampled tokens by draft_probs instead of by equality.
            dtype: 'auto', 'bfloat16', 'float16' or 'float32', for both models.
            draft_quantization: 'none', or 'int8', 'fp8' or 'fp8_weight_only' for half the bytes of bfloat16.
            target_quantization: 'none', 'fp8' or 'fp8_weight_only'.
            device: one slot for both models, such as 'cuda:0'; None takes the first GPU, else the CPU.
            on_load_progress: called with the bytes of weights that are in place and that will be, over all ranks.

        Raises:
            TrtrunError: a path, a model or the configuration is wrong; one line says what to do.
            PlacementError: the MPI world has another size than the devices need; or, once the job is over, on a worker
                rank, where an LLM cannot be (see `open_llm`).
        """
        if config is None:
            device = device or ("cuda:0" if torch.cuda.is_available() else "cpu:0")
            config = make_one_device_config(
                target, draft, draft_len, use_logits, dtype, draft_quantization, device, target_quantization
            )
        engine = LLMEngine.open(config, on_load_progress)
        if engine is None:
            raise PlacementError(
                "this rank has served until the job was over, and an LLM is on rank 0 alone: write `with "
                "trtrun.open_llm(config) as llm:` on all ranks, and go on where llm is not None"
            )
        self._take(engine)

    @classmethod
    def open(cls, config: RuntimeConfig, on_load_progress: Callable[[int, int], None] | None = None) -> LLM | None:
        """Take this process's part in a job, on every rank of it: an LLM on rank 0, and None on the others, once they
        have served to its end. Arguments and errors are those of the constructor."""
        engine = LLMEngine.open(config, on_load_progress)
        if engine is None:
            return None
        llm = cls.__new__(cls)
        llm._take(engine)
        return llm

    def _take(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.config: RuntimeConfig = engine.config
        self.report: StartReport = engine.report
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self._closed = False
        self._turn = FairLock()
        self._inboxes: dict[RequestId, deque[CompletionDelta]] = {}
        # Requests that nobody reads any more. Whoever has the turn next aborts them: an iterator may be thrown away
        # anywhere, also by a garbage collection inside the engine core.
        self._given_up: deque[RequestId] = deque()
        # A program that forgets to close, or dies of an exception, must not leave the other ranks waiting: MPI's own
        # end waits for all of them. This runs before it, and when the object is thrown away.
        self._finalizer = weakref.finalize(self, engine.close)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let all ranks end; the object is of no use afterwards. Calling it again does nothing."""
        with held_interrupts(), self._turn:
            self._closed = True
            self._finalizer()

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
        seconds_left: Callable[[], float | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts together.

        Args:
            prompts: texts, or lists of token ids; a single text is one prompt.
            sampling: one for all, or one for each prompt; None is greedy.
            on_finish: called with each output as soon as it is there, in order of completion.
            seconds_left: see `generate_as_completed`.

        Returns:
            One output a prompt, in their order. A prompt that can never run has `error` set; the others go on. Prompts
            that were given up have no output.
        """
        self._check_open()
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts came with {len(sampling)} sampling parameters")
        outputs: list[RequestOutput] = []
        with listening():
            for output in self.generate_as_completed(zip(prompts, sampling, strict=True), seconds_left):
                outputs.append(output)
                if on_finish is not None:
                    on_finish(output)
        return sorted(outputs, key=lambda output: output.index)

    def generate_as_completed(
        self,
        prompts: Iterable[tuple[Prompt, SamplingParams]],
        seconds_left: Callable[[], float | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete any number of prompts in bounded memory: they are taken as rows become free.

        Args:
            prompts: texts or token ids, each with its sampling parameters; at most as many as the batch has rows are
                taken ahead of those that run.
            seconds_left: asked before every round. None: go on. A number: begin no more prompts, and give up those that
                have begun once it is 0 or less.

        Yields:
            Each prompt's output as soon as it is there; `index` counts the prompts from 0. A prompt that can never run
            has `error` set. Prompts that were given up have no output.
        """
        self._check_open()
        source = enumerate(prompts)
        pending: dict[RequestId, PendingRequest] = {}
        held: tuple[int, tuple[Prompt, SamplingParams]] | None = None
        left: float | None = None
        call = object()  # its prompts are one group: those of another thread's call wait for none of them but in turn
        try:
            while True:
                left = seconds_left() if seconds_left is not None else None
                while left is None and self._has_room(pending):
                    item, held = held or next(source, None), None
                    if item is None:
                        break
                    try:
                        refused = self._begin(item[0], *item[1], pending, call)
                    except QueueFullError:
                        held = item  # others fill the queue: it is taken up again after a round
                        break
                    if refused is not None:
                        yield refused
                if left is not None:
                    self._wind_down(pending, left)
                if not pending and (held is None or left is not None):
                    break
                self._pump()
                for request_id in [key for key in pending if self._inboxes[key]]:
                    output = pending[request_id].take(self._inboxes[request_id])
                    if output is not None:
                        self._forget(request_id, pending)
                        yield output
            self._settle()
        finally:
            self._given_up.extend(pending)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[CompletionDelta]:
        """Complete one prompt and yield its tokens and text as rounds commit them. Ending the iteration early, or
        throwing the iterator away, cancels the request.

        Raises:
            InvalidRequestError: the prompt can never run, `n` is not 1, or the engine lost the request.
        """
        self._check_open()
        if sampling is not None and sampling.n != 1:
            raise InvalidRequestError("a stream has one completion: set n to 1")
        pending: dict[RequestId, PendingRequest] = {}
        try:
            refused = self._begin(0, prompt, sampling or SamplingParams(), pending)
            if refused is not None:
                raise InvalidRequestError(str(refused.error))
            (request_id,) = pending
            inbox = self._inboxes[request_id]
            while True:
                while not inbox:
                    self._pump()
                delta = inbox.popleft()
                if delta.finish_reason is not None:
                    self._forget(request_id, pending)
                if delta.error is not None:
                    raise InvalidRequestError(delta.error)
                yield delta
                if delta.finish_reason is not None:
                    break
            self._settle()
        finally:
            self._given_up.extend(pending)

    def statistics(self) -> dict[str, Any]:
        """Totals since the start or the last reset, ready for JSON; times are seconds."""
        return self.engine.statistics()

    def reset_statistics(self) -> None:
        """Start the totals again at zero."""
        self.engine.reset_statistics()

    def set_speculation(self, enabled: bool) -> None:
        """Switch between drafting and the target alone, between calls. Without a draft it stays off."""
        with self._exclusive():
            self.engine.set_speculation(enabled)

    def check_idle(self) -> None:
        """Raise RuntimeError when no request runs but a KV block is still held: a defect."""
        with self._exclusive():
            self.engine.check_idle()

    def _check_open(self) -> None:
        """Raise InvalidRequestError after `close`: the ranks have ended, and nobody would ever answer."""
        if self._closed:
            raise InvalidRequestError("this LLM is closed: make another one")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The engine core to one thread, uninterrupted, once what was given up is aborted."""
        with held_interrupts(), self._turn:
            self._check_open()
            while self._given_up:
                request_id = self._given_up.popleft()
                self.engine.abort_request(request_id)
                self._inboxes.pop(request_id, None)
            self.engine.drain()
            yield

    def _settle(self) -> None:
        """Take in what rounds still give for requests that have ended, so that nothing is left for later calls."""
        with self._exclusive():
            pass

    def _pump(self) -> None:
        """One round for all requests, whoever asked for them."""
        with self._exclusive():
            for delta in self.engine.step():
                if delta.request_id in self._inboxes:
                    self._inboxes[delta.request_id].append(delta)

    def _has_room(self, pending: dict[RequestId, PendingRequest]) -> bool:
        return not pending or self.engine.num_waiting < self.config.scheduler.max_batch_size

    def _begin(
        self,
        index: int,
        prompt: Prompt,
        sampling: SamplingParams,
        pending: dict[RequestId, PendingRequest],
        group: Hashable = None,
    ) -> RequestOutput | None:
        """Queue a prompt and enter it in `pending`; returns the output of one that is refused.

        Raises:
            QueueFullError: there is no room now, but there will be.
        """
        text = prompt if isinstance(prompt, str) else None
        with self._exclusive():
            try:
                request_id = self.engine.add_request(prompt, sampling, group=group)
            except QueueFullError as error:
                if self.engine.has_unfinished_requests:
                    raise
                return RequestOutput(index, text, (), (), str(error))
            except InvalidRequestError as error:
                return RequestOutput(index, text, (), (), str(error))
            self._inboxes[request_id] = deque()
            pending[request_id] = PendingRequest(index, text, self.engine.prompt_token_ids(request_id), sampling)
        return None

    def _wind_down(self, pending: dict[RequestId, PendingRequest], seconds_left: float) -> None:
        """Give up the prompts that have not begun, and the others too once no time is left.

        A prompt of several completions has begun when one of them has: the others may still be admitted.
        """
        with self._exclusive():
            for request_id in list(pending):
                if seconds_left <= 0 or not self.engine.has_begun(request_id):
                    self.engine.abort_request(request_id)
                    self._forget(request_id, pending)

    def _forget(self, request_id: RequestId, pending: dict[RequestId, PendingRequest]) -> None:
        self._inboxes.pop(request_id, None)
        pending.pop(request_id, None)


@contextmanager
def open_llm(config: RuntimeConfig, on_load_progress: Callable[[int, int], None] | None = None) -> Iterator[LLM | None]:
    """An LLM over all ranks of a job, entered on every one of them.

    Args:
        config: of the job, the same on every rank.
        on_load_progress: see `LLM`.

    Yields:
        On rank 0, and in a job of one process, the LLM. On the other ranks None, after they have served to its end.
    """
    llm = LLM.open(config, on_load_progress)
    if llm is None:
        yield None
        return
    with llm:
        yield llm
