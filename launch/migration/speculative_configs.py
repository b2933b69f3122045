"""What vLLM and TensorRT-LLM call speculative_config, read as keys of the YAML file here.

It knows their fields, and that they mean the same in a program, on a command line and in a file. Whether what comes of
them is right the configuration says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from launch.migration.flags import Changes, read_object, whole
from trtrun.errors import nearest

VLLM_METHODS = {
    **{name: name for name in ("ngram", "suffix", "eagle", "eagle3", "medusa", "mtp", "dflash", "dspark")},
    **{"draft_model": "draft_target", "ngram_gpu": "ngram", "[ngram]": "ngram"},
}
"""Of vLLM's methods ours. Those that end in `_mtp` are mtp."""

TENSORRT_LLM_METHODS = {
    **{name: name for name in ("ngram", "eagle3", "medusa", "mtp", "dflash", "dspark", "lookahead")},
    **{"drafttarget": "draft_target", "pard": "draft_target", "sa": "suffix", "auto": "ngram"},
    "eagle": None,  # the head's files say which kind it is
}
"""Of decoding_type, without underscores and capitals. None: chosen here."""

Field = str | None | Callable[[Any], Changes]
"""The key that a field stands for, what is made of its value, or None: there is nothing to do for it."""


def _sets(key: str, value: object) -> Callable[[Any], Changes]:
    """A field that changes a key where it is true."""
    return lambda given: {} if given in (None, False) else {key: value}


def _refuses(reason: str) -> Callable[[Any], Changes]:
    """A field that is refused where it is true."""

    def read(given: Any) -> Changes:
        if given in (None, False):
            return {}
        raise click.UsageError(f"speculative_config: {reason}")

    return read


def _uses_logits(value: str, reason: str, *idle: str) -> Callable[[Any], Changes]:
    """A field by one value of which drafts are judged by their probabilities; other values, but idle ones, are
    refused."""

    def read(given: Any) -> Changes:
        if given is not None and given not in (value, *idle):
            raise click.UsageError(f"speculative_config: {given}: {reason}")
        return {"speculation.use_logits": True} if given == value else {}

    return read


_LOSSLESS = "texts here are those of the target alone: leave it out"
_SUFFIX = (
    *("max_tree_depth", "max_spec_factor", "max_spec_offset", "min_token_prob", "max_cached_requests"),
    "max_cached_tokens",
)
_VLLM: dict[str, Field] = {
    "model": "draft.model",
    "num_speculative_tokens": "speculation.draft_len",
    "prompt_lookup_min": "speculation.prompt_lookup_min",
    "prompt_lookup_max": "speculation.prompt_lookup_max",
    **{f"suffix_decoding_{name}": f"speculation.suffix_decoding_{name}" for name in _SUFFIX},
    "draft_tensor_parallel_size": lambda size: {"draft.devices": size},
    "quantization": lambda kind: {"draft.quantization": kind} if kind in ("fp8", "int8") else {},
    "parallel_drafting": _sets("speculation.parallel_drafting", "on"),
    "rejection_sample_method": _uses_logits("probabilistic", _LOSSLESS, "strict", "standard"),
    "draft_sample_method": _uses_logits("probabilistic", "greedy or probabilistic", "greedy"),
    "acceptance_method": _uses_logits("rejection_sampler", _LOSSLESS),
    "revision": _refuses("revision: write model as org/name@revision"),
    **dict.fromkeys(
        (
            *("enforce_eager", "max_model_len", "disable_by_batch_size", "disable_padded_drafter_batch"),
            *("code_revision", "tensor_parallel_size", "use_local_argmax_reduction", "draft_load_config"),
            *("moe_backend", "attention_backend", "disable_logprobs", "disable_mqa_scorer", "speculative_token_tree"),
        )
    ),
}

_TENSORRT_LLM: dict[str, Field] = {
    "max_draft_len": "speculation.draft_len",
    "num_nextn_predict_layers": "speculation.draft_len",
    "speculative_model": "draft.model",
    "speculative_model_dir": "draft.model",
    "sa_config": _sets("speculation.enable_suffix_decoding", True),
    "medusa_choices": "speculation.medusa_choices",
    "eagle_choices": "speculation.eagle_choices",
    "dynamic_tree_max_topK": "speculation.eagle_topk",
    "eagle3_layers_to_capture": "speculation.eagle3_layers_to_capture",
    "use_relaxed_acceptance_for_thinking": _refuses(f"use_relaxed_acceptance_for_thinking: {_LOSSLESS}"),
    "posterior_threshold": _refuses(f"posterior_threshold: {_LOSSLESS}"),
    **dict.fromkeys(
        (
            *("relaxed_topk", "relaxed_delta", "use_mtp_vanilla", "mtp_eagle_one_model", "use_dynamic_tree"),
            *("eagle3_one_model", "eagle3_model_arch", "num_eagle_layers", "max_non_leaves_per_layer"),
            *("is_keep_all", "is_use_oldest", "is_public_pool", "is_auto_heuristic", "num_medusa_heads"),
            *("max_concurrency", "draft_len_schedule", "max_total_draft_tokens", "load_format", "mask_token_id"),
            *("enable_global_pool", "acceptance_window", "acceptance_length_threshold", "allow_advanced_sampling"),
            "greedy_sampling",
        )
    ),
}

_WINDOW = ("max_window_size", "max_ngram_size", "max_verification_set_size")


def read_vllm(given: Any) -> Changes:
    """The keys that vLLM's speculative_config stands for; `draft.devices` is a number of devices.

    Args:
        given: a mapping, or its JSON.

    Raises:
        ValueError: it is no mapping.
        click.UsageError: a field or method is not known, or would change texts.
    """
    fields = dict(read_object(given))
    method = fields.pop("method", None)
    if method is None and fields.get("model") in VLLM_METHODS:
        method = fields.pop("model")
    if method is None:
        return _read(fields, _VLLM)  # a draft's files say what it is
    ours = "mtp" if str(method).endswith("_mtp") else VLLM_METHODS.get(str(method))
    if ours is None:
        raise click.UsageError(f"speculative_config: no method {method!r} here{nearest(str(method), VLLM_METHODS)}")
    return {"speculation.method": ours, **_read(fields, _VLLM)}


def read_tensorrt_llm(given: Any) -> Changes:
    """The keys that TensorRT-LLM's speculative_config stands for.

    Args:
        given: a mapping, or its JSON.

    Raises:
        ValueError: it is no mapping, or a field is no number.
        click.UsageError: a field or decoding_type is not known, or would change texts.
    """
    fields = dict(read_object(given))
    written = str(fields.pop("decoding_type", "auto"))
    kind = written.replace("_", "").lower()
    if kind not in TENSORRT_LLM_METHODS:
        raise click.UsageError(
            f"speculative_config: no decoding_type {written!r} here{nearest(kind, TENSORRT_LLM_METHODS)}"
        )
    method = TENSORRT_LLM_METHODS[kind]
    changes: Changes = {} if method is None else {"speculation.method": method}
    window = [fields.pop(name) for name in _WINDOW if name in fields]
    if kind == "lookahead" and len(window) == len(_WINDOW):
        changes["speculation.lookahead_config"] = window
    elif window:
        raise click.UsageError(f"speculative_config: {', '.join(_WINDOW)} are of Lookahead, and go together")
    longest = fields.pop("max_matching_ngram_size", None)
    if longest is not None and whole(longest) > 0:  # others leave it to the drafter
        key = "suffix_decoding_max_tree_depth" if method == "suffix" else "prompt_lookup_max"
        changes[f"speculation.{key}"] = longest
    changes |= _read(fields, _TENSORRT_LLM)
    return {**changes, "speculation.parallel_drafting": "on"} if kind == "pard" else changes


def _read(fields: Mapping[str, Any], known: Mapping[str, Field]) -> Changes:
    changes: Changes = {}
    for name, value in fields.items():
        if name not in known:
            raise click.UsageError(f"speculative_config: unknown field {name!r}{nearest(name, known)}")
        field = known[name]
        if callable(field):
            changes |= field(value)
        elif field is not None and value is not None:
            changes[field] = value
    return changes
