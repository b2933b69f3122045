"""What answers the prompts of an evaluation: a job of trtrun's, or transformers in this process.

It knows prompts as tokens, and nothing of what is asked.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from typing_extensions import override

from launch.exit_codes import FailedError
from trtrun.api.llm import LLM
from trtrun.core.outputs import RequestOutput
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import CheckpointError, one_line


@dataclass(frozen=True)
class Answer:
    """What followed a prompt.

    Attributes:
        token_ids: with the token that ended it, if one did.
        perplexity: of the prompt and the answer without that token, where it was asked for.
    """

    token_ids: tuple[int, ...]
    perplexity: float | None = None


class Answerer(Protocol):
    """Answers prompts greedily.

    Attributes:
        name: as the original calls it where it prints.
        seconds: that the answers took so far.
    """

    name: str
    seconds: float

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, perplexity: bool = False) -> list[Answer]:
        """One answer a prompt, of `max_tokens` tokens at most. Prompts fit the context.

        Raises:
            FailedError: a prompt was refused.
        """


class TrtrunAnswerer(Answerer):
    """Answers by an LLM: with drafts, where it has any, and then without, which have to be the same tokens.

    Attributes:
        compared, same: answers that came both ways, and those of them with the same tokens.
    """

    name = "TensorRT-LLM"

    def __init__(self, llm: LLM) -> None:
        self.seconds = 0.0
        self.compared = self.same = 0
        self._llm = llm
        self._drafts = llm.config.speculation.method != "none"

    @override
    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, perplexity: bool = False) -> list[Answer]:
        wanted = 0 if perplexity else None
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=wanted, prompt_logprobs=wanted)
        started = time.perf_counter()
        answers = [_read(output) for output in self._llm.generate([list(prompt) for prompt in prompts], sampling)]
        self.seconds += time.perf_counter() - started
        if self._drafts:
            plainly = replace(sampling, draft_len=0)
            plain = [_read(output) for output in self._llm.generate([list(prompt) for prompt in prompts], plainly)]
            self.compared += len(answers)
            self.same += sum(one.token_ids == other.token_ids for one, other in zip(answers, plain, strict=True))
        return answers


class TransformersAnswerer(Answerer):
    """Answers by transformers' own model, one prompt at a time: nothing is padded.

    Attributes:
        context: tokens of a prompt and its answer, at most.
    """

    name = "Hugging Face"

    def __init__(self, directory: Path, dtype: str) -> None:
        """Load a model, onto a GPU where there is one.

        Raises:
            CheckpointError: transformers cannot load it.
        """
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.seconds = 0.0
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        except Exception as error:  # whatever the library raises for a model that it does not know
            raise CheckpointError(f"{directory}: transformers cannot load it ({one_line(error)})") from None
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        self.context: int = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
        ends = model.generation_config.eos_token_id
        self._ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        # In place of the model's own, which may sample or have penalties.
        self._model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=self._ends or None, pad_token_id=min(self._ends, default=0)
        )

    @override
    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, perplexity: bool = False) -> list[Answer]:
        started = time.perf_counter()
        answers = [self._complete(prompt, max_tokens, perplexity) for prompt in prompts]
        self.seconds += time.perf_counter() - started
        return answers

    @torch.inference_mode()
    def _complete(self, prompt: Sequence[int], max_tokens: int, perplexity: bool) -> Answer:
        fed = torch.tensor([list(prompt)], device=self._model.device)
        made = self._model.generate(
            fed,
            attention_mask=torch.ones_like(fed),
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_logits=perplexity,
        )
        chosen = tuple(made.sequences[0, len(prompt) :].tolist())
        if not perplexity:
            return Answer(chosen)
        logits = torch.cat([self._model(fed, use_cache=False).logits[0, :-1], *made.logits]).float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, made.sequences[0, 1:, None])[:, 0].tolist()
        return Answer(chosen, _perplexity(logprobs[: len(logprobs) - (chosen[-1] in self._ends)]))


def _read(output: RequestOutput) -> Answer:
    if output.error is not None:
        raise FailedError(f"prompt {output.index}: {output.error}")
    (completion,) = output.completions
    if completion.logprobs is None or output.prompt_logprobs is None:
        return Answer(completion.token_ids)
    ended = completion.finish_reason == "stop"
    entries = [*output.prompt_logprobs[1:], *completion.logprobs[: len(completion.logprobs) - ended]]
    return Answer(completion.token_ids, _perplexity([entry.logprob for entry in entries if entry is not None]))


def _perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs)) if logprobs else math.nan
