"""The whole pipeline for tests: an LLM in one process on tiny checkpoints, and transformers to compare it with.

`make_llm(target, draft, scheduler={"plans_ahead": 1})` is an LLM whose sections are given as in the YAML file. Nothing
here is faked: checkpoints, scheduler, engines and cycle are the product's own.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, save_weights

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.core.outputs import RequestOutput

LLM_VOCABULARY = 257 + 26
"""Of the `llm` fixture: bytes and pairs of letters, as its random model writes any bytes, halves of characters too."""


def configuration(
    target: Path,
    draft: Path | None,
    *,
    devices: tuple[Sequence[str], Sequence[str]] = (("cpu:0",), ("cpu:0",)),
    dtype: str = "auto",
    quantization: str = "none",
    target_quantization: str = "none",
    heads: Path | None = None,
    heads_apart: bool = False,
    expert_parallel: bool = False,
    **sections: dict[str, Any],
) -> RuntimeConfig:
    """A configuration; `devices` are the draft's and the target's, `sections` what YAML would say otherwise.

    `heads` are a directory with heads, of the method that `speculation` names; on the draft's devices with
    `heads_apart`, else on the target's.
    A draft with `quantization` computes in bfloat16, whatever the `dtype` of the target, and so does a target with
    `target_quantization`.
    With `expert_parallel` experts of both lie whole on ranks.
    draft_len does not depend on times unless `speculation` says so: tests count what was drafted.
    """
    speculation = sections.pop("speculation", {})
    is_apart = draft is not None and not {*devices[0]} & {*devices[1]}
    values: dict[str, Any] = {
        "threads": 1,
        "target": {"model": str(target), "devices": list(devices[1]), "dtype": dtype},
        "speculation": {
            "method": "none" if draft is None else "draft_target",
            "pacing": "fixed",
            # Whatever cores there are.
            **({"ahead": "on"} if is_apart and "method" not in speculation else {}),
            **speculation,
        },
        "kv_cache": {"max_tokens": 8192, **sections.pop("kv_cache", {})},
        **sections,
    }
    if target_quantization != "none":
        values["target"] |= {"quantization": target_quantization, "dtype": "bfloat16"}
    if heads is not None:
        values["draft"] = {"model": str(heads), **({"devices": list(devices[0])} if heads_apart else {})}
    if draft is not None:
        values["draft"] = {"model": str(draft), "devices": list(devices[0]), "dtype": dtype}
        if quantization != "none":
            values["draft"] |= {"quantization": quantization, "dtype": "bfloat16"}
    if expert_parallel:
        for role in ("target", *(("draft",) if draft is not None else ())):
            values[role]["expert_parallel"] = True
    return make_config(values)


def make_llm(target: Path, draft: Path | None = None, **settings: Any) -> LLM:
    """An LLM in this process; `settings` are those of `configuration`."""
    return LLM(config=configuration(target, draft, **settings))


def prompt_of(length: int, seed: int = 0, vocab_size: int = 199) -> list[int]:
    """Random token ids."""
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(1000 + seed)).tolist()


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    """Token ids by prompt and completion; a refused prompt fails the test."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [[completion.token_ids for completion in output.completions] for output in outputs]


def run_alone(llm: LLM, prompts: Sequence[Any], sampling: Sequence[SamplingParams]) -> list[list[tuple[int, ...]]]:
    """`tokens_of` when each prompt has the engines to itself."""
    return [
        tokens_of(llm.generate([prompt], parameters))[0] for prompt, parameters in zip(prompts, sampling, strict=True)
    ]


def noisy_copy(path: Path, target: Path, noise: float, seed: int = 5) -> Path:
    """A draft with the target's weights, each tensor disturbed by `noise` times its own deviation, where it has one."""
    from safetensors.torch import load_file

    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(target / "model.safetensors")
    for name, value in weights.items():
        if value.numel() == 1:
            continue
        disturbance = torch.randn(value.shape, generator=generator) * value.float().std() * noise
        weights[name] = (value.float() + disturbance).to(value.dtype)
    save_weights(path, weights)
    for file in target.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


def useless_draft(path: Path, **overrides: Any) -> Path:
    """A draft of another size and with weights of its own: it agrees with a target by chance only."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return make_checkpoint(path, seed=77, **{**small, "num_key_value_heads": 1, **overrides})


@lru_cache(maxsize=1)
def _load_reference(path: Path, files: frozenset[tuple[str, int, int]]) -> Any:
    """Tests of one target follow each other; `files` are what it has, so that one that changed is read anew."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


class Reference:
    """transformers with the checkpoint's weights in float32. Nobody changes its model."""

    def __init__(self, path: Path) -> None:
        found = ((file.name, file.stat()) for file in path.iterdir())
        self.model = _load_reference(path, frozenset((name, of.st_mtime_ns, of.st_size) for name, of in found))

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """Its greedy generate."""
        ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
        return tuple(output[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab] float32, without a cache."""
        logits: torch.Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits


def text_of(llm: LLM, prompt: str | list[int], sampling: SamplingParams) -> str:
    """The text of one prompt's first completion."""
    return llm.generate([prompt], sampling)[0].completions[0].text


def interrupt_call(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, error: BaseException | None = None
) -> None:
    """Have the `number`-th call of a method of `owner` interrupted: by Ctrl-C, or by `error`, after it has run."""
    original, calls = getattr(owner, name), 0

    def changed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments, **keywords)
        if calls == number:
            if error is not None:
                raise error
            signal.raise_signal(signal.SIGINT)
        return result

    patch.setattr(owner, name, changed)
