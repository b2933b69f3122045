"""The Python API: prompts in, completions out, in one process or as rank 0 of an MPI job.

    with LLM(target="checkpoints/target", draft="checkpoints/draft", draft_len=4) as llm:
        for output in llm.generate(["def main("], SamplingParams(max_tokens=64)):
            print(output.completions[0].text)

A program whose configuration needs several ranks is started on every rank by mpirun, and every rank comes here:

    with open_llm(load_config("run.yaml")) as llm:
        if llm is not None:  # rank 0; the others have served until it closed
            outputs = llm.generate(["def main("])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from trtrun.api.calls import Call, SharedEngine
from trtrun.api.interrupts import listening
from trtrun.api.llm_engine import LLMEngine
from trtrun.api.prompts import Prompt
from trtrun.chats.chat import Chat, ChatEncoder, read_chats
from trtrun.configuration.config import RuntimeConfig, load_config, make_one_device_config
from trtrun.core.outputs import CompletionDelta, RequestOutput, StartReport
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError, PlacementError, TrtrunError
from trtrun.start.job_spec import JobSpec
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
        generation_config: str = "auto",
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
            generation_config: 'auto' or 'none': whether `default_sampling` is the target's generation_config.json's.
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
                *(target, draft, device, dtype, (target_quantization, draft_quantization)),
                {"draft_len": draft_len, "use_logits": use_logits},
                adapters,
                generation_config,
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
        config: RuntimeConfig | JobSpec | str | os.PathLike[str],
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
        self._chats = ChatEncoder(engine.config.tokenizer or engine.config.target.model, engine.tokenizer)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let all ranks end; the object is of no use afterwards. Calling it again does nothing."""
        self._shared.close()

    @property
    def default_sampling(self) -> SamplingParams:
        """The parameters of calls without any: greedy, but for what the target's generation_config.json says
        (`server.generation_config`)."""
        return self.engine.default_sampling

    def generate(
        self,
        prompts: Sequence[Prompt | Chat] | str,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
        seconds_left: Callable[[], float | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts together.

        Args:
            prompts: texts, lists of token ids, or chats; a single text is one prompt.
            sampling: one for all, or one for each prompt; None is `default_sampling`.
            on_finish: called with each output as soon as it is there, in order of completion.
            seconds_left: see `generate_as_completed`.

        Returns:
            One output a prompt, in their order. A prompt that can never run has `error` set; the others go on. Prompts
            that were given up have no output.
        """
        self._shared.check_open()
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or self.default_sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts came with {len(sampling)} sampling parameters")
        outputs: list[RequestOutput] = []
        with listening():
            for output in self.generate_as_completed(zip(prompts, sampling, strict=True), seconds_left):
                outputs.append(output)
                if on_finish is not None:
                    on_finish(output)
        return sorted(outputs, key=lambda output: output.index)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, each by the checkpoint's chat template.

        Args:
            messages: a conversation, in OpenAI's words (`[{"role": "user", "content": "…"}]`), or several.
            sampling_params: as `generate` takes them.
            tools: that the model is shown, as OpenAI's API has them. Calls stay as the model writes them.
            add_generation_prompt: the prompt ends where an answer begins.
            continue_final_message: the last message is gone on with; `add_generation_prompt` is then to be False.
            chat_template_kwargs: further values for the template, such as {"enable_thinking": False}.
            on_finish: as `generate` takes it.

        Returns:
            One output a conversation, in their order; `prompt` is the template's text. A conversation that the template
            refuses has `error` set.

        Raises:
            InvalidRequestError: messages or tools are not what they should be.
        """
        chats = read_chats(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(chats, sampling_params, on_finish)

    def generate_as_completed(
        self,
        prompts: Iterable[tuple[Prompt | Chat, SamplingParams]],
        seconds_left: Callable[[], float | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete any number of prompts in bounded memory: they are taken as rows become free.

        Args:
            prompts: texts, token ids or chats, each with its sampling parameters; at most as many as the batch has rows
                are taken ahead of those that run.
            seconds_left: asked before every round. None: go on. A number: begin no more prompts, and give up those that
                have begun once it is 0 or less.

        Yields:
            Each prompt's output as soon as it is there; `index` counts the prompts from 0. A prompt that can never run
            has `error` set. Prompts that were given up have no output.
        """
        self._shared.check_open()
        call = Call(self._shared, self._chats)
        yield from call.complete(prompts, self.config.scheduler.max_batch_size, seconds_left)

    def stream(self, prompt: Prompt | Chat, sampling: SamplingParams | None = None) -> Iterator[CompletionDelta]:
        """Complete one prompt and yield its tokens and text as rounds commit them. Ending the iteration early, or
        throwing the iterator away, cancels the request.

        Args:
            prompt: a text, token ids or a chat (`Chat.read`).
            sampling: None is `default_sampling`.

        Raises:
            QueueFullError: as many requests wait as may (`scheduler.max_waiting`).
            InvalidRequestError: the prompt can never run, `n` is not 1, or the engine lost the request.
        """
        self._shared.check_open()
        if sampling is not None and sampling.n != 1:
            raise InvalidRequestError("a stream has one completion: set n to 1")
        call = Call(self._shared, self._chats)
        try:
            refused = call.begin(0, prompt, sampling or self.default_sampling)
            if refused is not None:
                raise InvalidRequestError(str(refused.error))
            (request_id,) = call.pending
            inbox = self._shared.inboxes[request_id]
            while True:
                while not inbox:
                    self._shared.step()
                delta = inbox.popleft()
                if delta.finish_reason is not None:
                    call.forget(request_id)
                if delta.error is not None:
                    raise InvalidRequestError(delta.error)
                yield delta
                if delta.finish_reason is not None:
                    break
            self._shared.settle()
        finally:
            call.give_up()

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


def _read(config: RuntimeConfig | JobSpec | str | os.PathLike[str]) -> RuntimeConfig | JobSpec:
    """A configuration that may be a file's path."""
    return config if isinstance(config, RuntimeConfig | JobSpec) else load_config(config)
