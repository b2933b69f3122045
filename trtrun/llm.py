"""The Python API: prompts in, completions out, in one process or as rank 0 of an MPI job.

    with LLM(target="checkpoints/target", draft="checkpoints/draft", draft_len=4) as llm:
        for output in llm.generate(["def main("], SamplingParams(max_tokens=64)):
            print(output.completions[0].text)

With a configuration whose devices need several ranks, the same program is started on every rank by mpirun: rank 0 goes
on with the program, the others serve inside the constructor and end there. This module knows requests and text; ranks
are `roles`' business.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from trtrun.config import RuntimeConfig, make_config
from trtrun.core import SamplingParams
from trtrun.errors import InvalidRequestError
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.outputs import RequestOutput, StartReport, StreamChunk
from trtrun.prompts import Prompt, PromptJob, PromptReader
from trtrun.roles.job import open_job
from trtrun.roles.orchestrator import Orchestrator
from trtrun.roles.startup import target_context
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.pacing import Pacer
from trtrun.text import Tokenizer, check_same_tokenizer, read_tokenizer


class LLM:
    """A target model, optionally with a draft model, ready to complete prompts.

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
            draft_quantization: 'none', or 'int8' for a draft of half the bytes of bfloat16.
            device: one slot for both models, such as 'cuda:0'; None takes the first GPU, else the CPU.
            on_load_progress: called with the bytes of weights that are in place and that will be, over all ranks.

        Raises:
            TrtrunError: a path, a model or the configuration is wrong; one line says what to do.
            TopologyError: the MPI world has another size than the devices need.
            SystemExit: on worker ranks of an MPI job, with code 0, when the job is over.
        """
        self.config = config or _simple_config(target, draft, draft_len, use_logits, dtype, draft_quantization, device)
        model = read_model_config(self.config.target.model)
        draft_model = read_model_config(self.config.draft.model) if self.config.draft is not None else None
        self.tokenizer = _read_tokenizers(self.config)
        job = open_job(self.config, on_load_progress)
        if job is None:
            raise SystemExit(0)
        self.report: StartReport = job.report
        self._prompts = PromptReader(model, self.tokenizer)
        self._limits = _limits(self.config, model, draft_model, job.num_blocks)
        self._orchestrator = Orchestrator(
            Scheduler(self._limits),
            job.fleet,
            self.tokenizer,
            self.config.scheduler.plans_ahead,
            Pacer(self.config.speculation.draft_len) if self.config.is_paced else None,
        )
        self._closed = False
        # A program that forgets to close, or dies of an exception, must not leave the other ranks waiting: MPI's own
        # end waits for all of them. This runs before it, and when the object is thrown away.
        self._finalizer = weakref.finalize(self, self._orchestrator.close)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let all ranks end; the object is of no use afterwards. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._finalizer()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
        seconds_left: Callable[[], float | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts together.

        Args:
            prompts: texts, or lists of token ids.
            sampling: one for all, or one for each prompt; None is greedy.
            on_finish: called with each output as soon as it is there, in order of completion.
            seconds_left: asked before every round. None: go on. A number: begin no more prompts, and give up those that
                have begun once it is 0 or less.

        Returns:
            One output a prompt, in their order. A prompt that can never run has `error` set; the others go on. Prompts
            that were given up have no output.
        """
        self._check_open()
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts came with {len(sampling)} sampling parameters")
        jobs: list[PromptJob] = []
        outputs: list[RequestOutput | None] = [None] * len(prompts)

        def settle(job: PromptJob) -> None:
            outputs[job.index] = output = job.output()
            if on_finish is not None:
                on_finish(output)

        unfinished: list[PromptJob] = []
        for index, (prompt, parameters) in enumerate(zip(prompts, sampling, strict=True)):
            job = PromptJob(index, prompt)
            jobs.append(job)
            self._add(job, parameters)
            if job.is_finished:
                settle(job)
            else:
                unfinished.append(job)
        try:
            while unfinished:
                left = seconds_left() if seconds_left is not None else None
                if left is not None:
                    unfinished = self._wind_down(unfinished, left)
                self._orchestrator.step()
                for job in [job for job in unfinished if job.is_finished]:
                    unfinished.remove(job)
                    settle(job)
            self._orchestrator.drain()
        except BaseException:
            self._cancel(unfinished)
            raise
        return [output for output in outputs if output is not None]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Complete one prompt and yield its text as rounds commit it. Ending the iteration early cancels the request.

        Raises:
            InvalidRequestError: the prompt can never run, or `n` is not 1.
        """
        self._check_open()
        if sampling is not None and sampling.n != 1:
            raise InvalidRequestError("a stream has one completion: set n to 1")
        job = PromptJob(0, prompt)
        self._add(job, sampling or SamplingParams())
        if job.error is not None:
            raise InvalidRequestError(job.error)
        stream = job.streams[0]
        shown_text = shown_tokens = 0
        try:
            finished = False
            while not finished:
                # Steps of other calls move this stream on, too, even to its end.
                finished = job.is_finished
                if not finished and len(stream.token_ids) == shown_tokens:
                    self._orchestrator.step()
                    continue
                chunk = StreamChunk(stream.text[shown_text:], tuple(stream.token_ids[shown_tokens:]), stream.reason)
                shown_text, shown_tokens = len(stream.text), len(stream.token_ids)
                yield chunk
        finally:
            if not job.is_finished:
                self._cancel([job])
            self._orchestrator.drain()

    def statistics(self) -> dict[str, Any]:
        """Totals since the start or the last reset, ready for JSON; times are seconds."""
        return self._orchestrator.statistics.as_dict()

    def reset_statistics(self) -> None:
        """Start the totals again at zero."""
        self._orchestrator.statistics = type(self._orchestrator.statistics)()

    def set_speculation(self, enabled: bool) -> None:
        """Switch between draft_target and the target alone, between calls. Without a draft model it stays off."""
        self._orchestrator.drain()
        self._orchestrator.scheduler.set_speculation(enabled)

    def check_idle(self) -> None:
        """Raise RuntimeError when no request runs but a KV block is still held: a defect."""
        self._orchestrator.scheduler.idle_is_whole()

    def _check_open(self) -> None:
        """Raise InvalidRequestError after `close`: the ranks have ended, and nobody would ever answer."""
        if self._closed:
            raise InvalidRequestError("this LLM is closed: make another one")

    def _add(self, job: PromptJob, sampling: SamplingParams) -> None:
        """Queue a prompt's completions; a refusal is noted in the job."""
        try:
            job.prompt_token_ids = self._prompts.encode(job.prompt)
            for request in self._prompts.requests(job.prompt_token_ids, sampling):
                job.streams.append(self._orchestrator.add(request))
        except InvalidRequestError as error:
            job.error = str(error)
            self._cancel([job])

    def _wind_down(self, jobs: Sequence[PromptJob], seconds_left: float) -> list[PromptJob]:
        """Give up the prompts that have not begun, and the others too once no time is left; returns those that go on.

        A prompt of several completions has begun when one of them has: the others may still be admitted.
        """
        going_on: list[PromptJob] = []
        given_up: list[PromptJob] = []
        for job in jobs:
            (going_on if seconds_left > 0 and self._has_begun(job) else given_up).append(job)
        self._cancel(given_up)
        return going_on

    def _has_begun(self, job: PromptJob) -> bool:
        return any(
            stream.finish_reason is not None or self._orchestrator.has_begun(stream.request.request_id)
            for stream in job.streams
        )

    def _cancel(self, jobs: Sequence[PromptJob]) -> None:
        for job in jobs:
            for stream in job.streams:
                self._orchestrator.cancel(stream.request.request_id)


def _simple_config(
    target: str | os.PathLike[str] | None,
    draft: str | os.PathLike[str] | None,
    draft_len: int,
    use_logits: bool,
    dtype: str,
    draft_quantization: str,
    device: str | None,
) -> RuntimeConfig:
    """Both models on one device."""
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu:0")
    values: dict[str, Any] = {
        "target": {"model": str(target) if target is not None else "", "devices": [device], "dtype": dtype},
        "speculation": {"method": "none" if draft is None else "draft_target", "draft_len": draft_len,
                        "use_logits": use_logits},
    }  # fmt: skip
    if target is None:
        raise InvalidRequestError("LLM needs `target`, the directory of a model, or `config`")
    if draft is not None:
        values["draft"] = {
            "model": str(draft), "devices": [device], "dtype": dtype, "quantization": draft_quantization
        }  # fmt: skip
    return make_config(values, base=Path.cwd(), where="LLM")


def _read_tokenizers(config: RuntimeConfig) -> Tokenizer | None:
    """The target's tokenizer, once it is known to be the draft's too.

    Raises:
        CheckpointError: the two differ.
    """
    target = read_tokenizer(config.tokenizer or config.target.model)
    draft = read_tokenizer(config.draft.model) if config.draft is not None else None
    if target is not None and draft is not None:
        check_same_tokenizer(target, draft)
    return target


def _limits(
    config: RuntimeConfig, model: ModelConfig, draft_model: ModelConfig | None, num_blocks: int
) -> SchedulerLimits:
    context = target_context(config, model)
    return SchedulerLimits(
        max_batch_size=config.scheduler.max_batch_size,
        max_num_tokens=config.scheduler.max_num_tokens,
        max_seq_len=context,
        draft_max_seq_len=min(context, draft_model.max_position_embeddings) if draft_model is not None else None,
        draft_len=config.draft_len,
        block_size=config.kv_cache.block_size,
        num_blocks=num_blocks,
        enable_block_reuse=config.kv_cache.enable_block_reuse,
        plans_ahead=config.scheduler.plans_ahead,
    )
