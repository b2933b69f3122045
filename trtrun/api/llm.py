"""The Python API: prompts in, completions out, in one process or as rank 0 of an MPI job.

    with LLM(target="checkpoints/target", draft="checkpoints/draft", draft_len=4) as llm:
        for output in llm.generate(["def main("], SamplingParams(max_tokens=64)):
            print(output.completions[0].text)

A program whose configuration needs several ranks is started on every rank by mpirun, and every rank comes here:

    with open_llm(load_config("run.yaml")) as llm:
        if llm is not None:  # rank 0; the others have served until it closed
            outputs = llm.generate(["def main("])

This module puts deltas of the engine core (`llm_engine`) together to outputs. It knows calls and their prompts; it does
not know how threads share the core (`shared_engine`), rounds or ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from trtrun.api.interrupts import listening
from trtrun.api.llm_engine import LLMEngine
from trtrun.api.prompts import Prompt
from trtrun.api.shared_engine import PendingRequest, SharedEngine
from trtrun.configuration.config import RuntimeConfig, load_config, make_one_device_config
from trtrun.core.outputs import CompletionDelta, RequestId, RequestOutput, StartReport
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError, PlacementError, QueueFullError, TrtrunError
from trtrun.tokens.text import Tokenizer


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
        config: RuntimeConfig | str | os.PathLike[str] | None = None,
        draft_len: int = 4,
        use_logits: bool = False,
        dtype: str = "auto",
        draft_quantization: str = "none",
        target_quantization: str = "none",
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        device: str | None = None,
        on_load_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the models.

        Args:
            target: directory of the target, when there is no `config`.
            draft: directory of the draft; None decodes with the target alone.
            config: everything, as in the YAML file, or the file's path; then the arguments before it are not used.
            draft_len: tokens drafted in one round.
            use_logits: accept sampled tokens by draft_probs instead of by equality.
            dtype: 'auto', 'bfloat16', 'float16' or 'float32', for both models.
            draft_quantization: 'none', or 'int8', 'fp8', 'fp8_block', 'fp8_with_head' or 'fp8_weight_only' for half the
                bytes of bfloat16.
            target_quantization: 'none', 'fp8', 'fp8_block', 'fp8_with_head' or 'fp8_weight_only'.
            adapters: LoRA adapters of the target: directories by name.
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
                target, draft, draft_len, use_logits, dtype, draft_quantization, device, target_quantization, adapters
            )
        engine = LLMEngine.open(_read(config), on_load_progress)
        if engine is None:
            raise PlacementError(
                "this rank has served until the job was over, and an LLM is on rank 0 alone: write `with "
                "trtrun.open_llm(config) as llm:` on all ranks, and go on where llm is not None"
            )
        self._take(engine)

    @classmethod
    def open(
        cls,
        config: RuntimeConfig | str | os.PathLike[str],
        on_load_progress: Callable[[int, int], None] | None = None,
    ) -> LLM | None:
        """Take this process's part in a job, on every rank of it: an LLM on rank 0, and None on the others, once they
        have served to its end. Arguments and errors are those of the constructor."""
        engine = LLMEngine.open(_read(config), on_load_progress)
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
        self._shared = SharedEngine(engine)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let all ranks end; the object is of no use afterwards. Calling it again does nothing."""
        self._shared.close()

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
        self._shared.check_open()
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
        self._shared.check_open()
        source = enumerate(prompts)
        pending: dict[RequestId, PendingRequest] = {}
        held: tuple[int, tuple[Prompt, SamplingParams]] | None = None
        left: float | None = None
        call = object()  # its prompts are one group: those of another thread's call wait for none of them but in turn
        try:
            while True:
                left = seconds_left() if seconds_left is not None else None
                while left is None and self._has_room(pending, call):
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
                self._shared.step()
                inboxes = self._shared.inboxes
                for request_id in [key for key in pending if inboxes[key]]:
                    output = pending[request_id].take(inboxes[request_id])
                    if output is not None:
                        self._forget(request_id, pending)
                        yield output
            self._shared.settle()
        finally:
            self._shared.give_up(pending)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[CompletionDelta]:
        """Complete one prompt and yield its tokens and text as rounds commit them. Ending the iteration early, or
        throwing the iterator away, cancels the request.

        Raises:
            QueueFullError: as many requests wait as may (`scheduler.max_waiting`).
            InvalidRequestError: the prompt can never run, `n` is not 1, or the engine lost the request.
        """
        self._shared.check_open()
        if sampling is not None and sampling.n != 1:
            raise InvalidRequestError("a stream has one completion: set n to 1")
        pending: dict[RequestId, PendingRequest] = {}
        try:
            refused = self._begin(0, prompt, sampling or SamplingParams(), pending)
            if refused is not None:
                raise InvalidRequestError(str(refused.error))
            (request_id,) = pending
            inbox = self._shared.inboxes[request_id]
            while True:
                while not inbox:
                    self._shared.step()
                delta = inbox.popleft()
                if delta.finish_reason is not None:
                    self._forget(request_id, pending)
                if delta.error is not None:
                    raise InvalidRequestError(delta.error)
                yield delta
                if delta.finish_reason is not None:
                    break
            self._shared.settle()
        finally:
            self._shared.give_up(pending)

    def statistics(self) -> dict[str, Any]:
        """Totals since the start or the last reset, ready for JSON; times are seconds."""
        return self.engine.statistics()

    def reset_statistics(self) -> None:
        """Start the totals again at zero."""
        self.engine.reset_statistics()

    def set_speculation(self, enabled: bool) -> None:
        """Switch between drafting and the target alone, between calls. Without a draft it stays off."""
        with self._shared.turn() as engine:
            engine.set_speculation(enabled)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter on every target rank, beside those that are there; other threads may generate meanwhile.

        Args:
            name: that requests call it by (`SamplingParams.lora_name`).
            path: as PEFT has saved it; the same on every host.

        Raises:
            InvalidRequestError: there is one of that name, or no slot is free (`adapter_slots.max_loaded`).
            CheckpointError: it is damaged, not supported or not for this model; nothing has changed.
        """
        ended: list[TrtrunError | None] = []
        with self._shared.turn() as engine:
            engine.begin_adapter(name, Path(path).absolute(), ended.append)
        while not ended:
            self._shared.step()
        if ended[0] is not None:
            raise ended[0]

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that have it go on; its slot is free once they have ended.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        with self._shared.turn() as engine:
            engine.drop_adapter(name)

    def check_idle(self) -> None:
        """Raise RuntimeError when no request runs but a KV block is still held: a defect."""
        with self._shared.turn() as engine:
            engine.check_idle()

    def _has_room(self, pending: dict[RequestId, PendingRequest], call: object) -> bool:
        """Whether another prompt of a call may wait; what others have waiting takes none of its turns."""
        return not pending or self.engine.num_waiting_of(call) < self.config.scheduler.max_batch_size

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
        with self._shared.turn() as engine:  # one turn for all of it: an interrupt would lose the request
            try:
                request_id = engine.add_request(prompt, sampling, group=group)
            except QueueFullError:
                raise
            except InvalidRequestError as error:
                return RequestOutput(index, text, (), (), str(error))
            self._shared.open_inbox(request_id)
            pending[request_id] = PendingRequest(index, text, engine.prompt_token_ids(request_id), sampling)
        return None

    def _wind_down(self, pending: dict[RequestId, PendingRequest], seconds_left: float) -> None:
        """Give up the prompts that have not begun, and the others too once no time is left.

        A prompt of several completions has begun when one of them has: the others may still be admitted.
        """
        with self._shared.turn() as engine:
            for request_id in list(pending):
                if seconds_left <= 0 or not engine.has_begun(request_id):
                    engine.abort_request(request_id)
                    self._forget(request_id, pending)

    def _forget(self, request_id: RequestId, pending: dict[RequestId, PendingRequest]) -> None:
        self._shared.forget(request_id)
        pending.pop(request_id, None)


@contextmanager
def open_llm(
    config: RuntimeConfig | str | os.PathLike[str], on_load_progress: Callable[[int, int], None] | None = None
) -> Iterator[LLM | None]:
    """An LLM over all ranks of a job, entered on every one of them.

    Args:
        config: of the job, or its YAML file's path, the same on every rank.
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


def _read(config: RuntimeConfig | str | os.PathLike[str]) -> RuntimeConfig:
    """A configuration that may be a file's path."""
    return config if isinstance(config, RuntimeConfig) else load_config(config)
