"""What the rows of a request ask for: inputs of the four generating models, read as prompts and sampling parameters.

Names differ between the models (`top_k`, `runtime_top_k`), meanings do not: those of TensorRT-LLM. What has no meaning
here is refused when it asks for something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.kserve.models import BLS, GUIDE_INPUTS, LOOKAHEAD_INPUTS
from launch.serve.api.kserve.requests import InferRequest, Row, read_word_list
from launch.serve.api.kserve.tensors import Array, refuse_input
from trtrun.api.prompts import Prompt
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.values import show_value
from trtrun.errors import InvalidRequestError
from trtrun.tokens.text import Tokenizer


@dataclass(frozen=True)
class Unsupported:
    """An input that the runtime cannot follow.

    Attributes:
        neutral: values that ask for nothing; an empty tensor does so everywhere.
        reason: why others are refused.
    """

    neutral: tuple[Any, ...] = ()
    reason: str = "this is not supported here"


_NAMED_ADAPTERS = Unsupported(reason="adapters are named in the configuration")

UNSUPPORTED: Mapping[str, Unsupported] = {
    "decoder_text_input": Unsupported((b"",)),
    "image_input": Unsupported(),
    "image_bytes_input": Unsupported(),
    "image_url_input": Unsupported((b"",)),
    "video_bytes_input": Unsupported(),
    "prompt_embedding_table": Unsupported(),
    "prompt_table_extra_id": Unsupported((0,)),
    "prompt_table_extra_ids": Unsupported((0,)),
    "prompt_vocab_size": Unsupported((0,)),
    "lora_weights": _NAMED_ADAPTERS,
    "lora_config": _NAMED_ADAPTERS,
    "beam_width": Unsupported((0, 1), "there is no beam search here"),
    "decoder_input_lengths": Unsupported((0, 1)),
    "draft_logits": Unsupported(reason="drafts are compared with the target's own tokens"),
    "draft_acceptance_threshold": Unsupported((0.0,), "drafts are accepted without loss alone"),
    "runtime_top_p_min": Unsupported((0.0,)),
    "runtime_top_p_decay": Unsupported((0.0, 1.0)),
    "runtime_top_p_reset_ids": Unsupported((-1, 0)),
}
"""Inputs that the runtime cannot follow, in the order in which they are checked."""

_NUMBERS: Mapping[str, tuple[str, float]] = {
    "n": ("num_return_sequences", 1),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "presence_penalty": ("presence_penalty", 0.0),
    "frequency_penalty": ("frequency_penalty", 0.0),
}
"""Sampling parameters that are one number of an input: the input's name, and the value where it is not there."""

_GUIDE_TYPES: Mapping[str, str] = {
    "json": "json",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
}
"""TensorRT-LLM's kinds of guides, and those of SamplingParams."""

_RENAMED: Mapping[str, str] = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "max_tokens": "request_output_len"}
"""Names of the models of text, and those of the models of tokens."""


@dataclass(frozen=True)
class RowRequest:
    """A row of a request.

    Attributes:
        prompt: a text or token ids.
        sampling: of its completions.
        end_tokens: tokens that end a completion, and are left out of it.
        pad_token: fills rows of a batch that are shorter than others.
        stream: whether the client wants pieces.
        has_prompt: whether outputs begin with the prompt, where they come whole.
        log_probs, reuse_stats: whether outputs of these are asked for.
    """

    prompt: Prompt
    sampling: SamplingParams
    end_tokens: frozenset[int]
    pad_token: int
    stream: bool
    has_prompt: bool
    log_probs: bool
    reuse_stats: bool


@dataclass(frozen=True)
class AskedRows:
    """What a request asks for beside its prompts and parameters.

    Attributes:
        request_id: the client's.
        outputs: names of those that are wanted, as they stand in the request; empty for all.
        binary, all_binary: of its outputs, those that the answer has as bytes; see InferBody.
        rows: of the batch.
    """

    request_id: str
    outputs: tuple[str, ...]
    binary: frozenset[str]
    all_binary: bool
    rows: tuple[RowRequest, ...]


@dataclass(frozen=True)
class ModelFacts:
    """What reading inputs takes of the served model.

    Attributes:
        tokenizer: None where there is none.
        vocab_size: of the target.
        eos_token_ids: tokens that end a text; may be none.
        draft_len: tokens drafted in a round, at most; 0 where none are.
        excludes_prompt: whether whole outputs begin behind the prompt where a request does not say; None where that is
            so of texts alone.
        lora_tasks: names of adapters, by their `lora_task_id`, from 1 on.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    draft_len: int
    excludes_prompt: bool | None = None
    lora_tasks: Sequence[str] = ()

    @property
    def end_id(self) -> int:
        """The token that ends a text, for clients that want one; -1 where there is none."""
        return self.eos_token_ids[0] if self.eos_token_ids else -1


def read_row_requests(request: InferRequest, facts: ModelFacts) -> list[RowRequest]:
    """What each row of a request asks for.

    Raises:
        Refusal: an input asks for what there is not, or has a value outside its range.
    """
    for name, unsupported in UNSUPPORTED.items():
        values = request.inputs.get(name)
        if values is not None and not all(value in unsupported.neutral for value in values.ravel().tolist()):
            raise refuse_input(name, f"{unsupported.reason}: leave the input out")
    beginning = request.inputs.get("decoder_input_ids")
    if beginning is not None and beginning.shape[1] > 1:  # preprocessing makes one, which says nothing
        raise refuse_input("decoder_input_ids", "this is not supported here: leave the input out")
    rows = [_read_row_request(Row(request.inputs, place), request, facts) for place in range(request.batch_size)]
    if len({row.sampling.n for row in rows}) > 1:
        raise refuse_input("num_return_sequences", "all rows of a batch must have the same number")
    if len({row.stream for row in rows}) > 1:
        raise refuse_input("stream" if request.model.has_text else "streaming", "must be the same in a whole batch")
    return rows


def _read_row_request(row: Row, request: InferRequest, facts: ModelFacts) -> RowRequest:
    has_text = request.model.has_text
    try:
        sampling, end_tokens = _read_sampling(row, request, facts)
        prompt = row.text("text_input") if has_text else _read_prompt(row)
    except InvalidRequestError as error:
        raise Refusal(Kind.INVALID, str(error)) from None
    end_id = row.number("end_id", facts.end_id)
    # The clients' own loops over the models of tokens go on with what comes back; texts come without the prompt, as
    # both are set up in the instructions for them. Who hands on what preprocessing gave, as the ensemble does, gets
    # what the ensemble gets: of the outputs of preprocessing, loops leave decoder_input_ids out.
    is_ensemble = has_text or "decoder_input_ids" in request.inputs
    excludes_prompt = is_ensemble if facts.excludes_prompt is None else facts.excludes_prompt
    return RowRequest(
        prompt,
        sampling,
        end_tokens,
        row.number("pad_id", max(end_id if end_id < facts.vocab_size else facts.end_id, 0)),
        row.flag("stream" if has_text else "streaming"),
        not row.flag("exclude_input_in_output", excludes_prompt),
        sampling.logprobs is not None,
        row.flag("return_kv_cache_reuse_stats") or any(name.startswith("kv_cache_") for name in request.outputs),
    )


def _read_sampling(row: Row, request: InferRequest, facts: ModelFacts) -> tuple[SamplingParams, frozenset[int]]:
    """Sampling parameters, and the tokens that end a completion."""
    max_tokens = row.number(_name(request, "max_tokens"), 0)
    if max_tokens < 1:
        raise refuse_input(_name(request, "max_tokens"), f"must be at least 1, not {max_tokens}")
    wants_log_probs = row.flag("return_log_probs") or not {"cum_log_probs", "output_log_probs"}.isdisjoint(
        request.outputs
    )
    values: dict[str, Any] = {
        f"return_{name}": row.flag(f"return_{name}") or name in request.outputs
        for name in ("context_logits", "generation_logits")
    }
    if values["return_context_logits"] and row.number("num_return_sequences", 1) > 1:
        raise refuse_input(
            "num_return_sequences", "must be 1 with return_context_logits: ask for the prompt's logits by themselves"
        )
    values |= {
        "max_tokens": max_tokens,
        "min_tokens": min(row.number("min_length", 0), max_tokens),
        **{field: row.number(name, default) for field, (name, default) in _NUMBERS.items()},
        "stop_sequences": _read_stops(row, facts),
        "bad_words": _read_bad_words(row, facts),
        "logit_bias": _read_bias(row, request, facts),
        "logprobs": 0 if wants_log_probs else None,
    }
    values |= _read_choice(row, request)
    values |= _read_draft(row, request, facts)
    values |= _read_guide(row)
    values["lora_name"] = _read_adapter(row, facts)
    if row.has("end_id"):
        end_id = row.number("end_id", -1)
        if end_id < -1:
            raise refuse_input("end_id", f"must be a token id, or -1 for none, not {end_id}")
        # Clients that want a fixed number of tokens name one that there is not.
        end_tokens = frozenset({end_id} if 0 <= end_id < facts.vocab_size else ())
        values |= {"ignore_eos": True, "stop_token_ids": tuple(end_tokens)}
    else:
        end_tokens = frozenset(facts.eos_token_ids)
    return SamplingParams(**values), end_tokens


def _read_choice(row: Row, request: InferRequest) -> dict[str, Any]:
    """How tokens are chosen, by TensorRT-LLM's rules: greedy unless top_k or top_p asks for more than one token, and
    with the seed 0 unless there is another."""
    top_k_name, top_p_name = _name(request, "top_k"), _name(request, "top_p")
    top_k, top_p = row.number(top_k_name, 0), row.number(top_p_name, 0.0)
    temperature = row.number("temperature", 1.0)
    if top_k < 0:
        raise refuse_input(top_k_name, f"must be 0 (off) or more, not {top_k}")
    if not 0.0 <= top_p <= 1.0:
        raise refuse_input(top_p_name, f"must be between 0 and 1, not {top_p}")
    is_greedy = temperature == 0 or top_k == 1 or (top_k == 0 and top_p == 0.0)
    seed = row.number("random_seed", 0)
    return {
        "temperature": 0.0 if is_greedy else temperature,
        "top_k": 0 if is_greedy else top_k,
        "top_p": 1.0 if is_greedy or top_p == 0.0 else top_p,
        "seed": seed % 2**63,
    }


def _read_draft(row: Row, request: InferRequest, facts: ModelFacts) -> dict[str, Any]:
    """How a row is drafted for."""
    values: dict[str, Any] = {}
    if request.model.name == BLS and row.has("num_draft_tokens"):
        wanted = row.number("num_draft_tokens", 0)
        if wanted < 0:
            raise refuse_input("num_draft_tokens", f"must be 0 (plain decoding) or more, not {wanted}")
        values["draft_len"] = min(wanted, facts.draft_len)
    if tokens := row.integers("draft_input_ids"):
        values["draft_token_ids"] = tokens
    given = [name for name in LOOKAHEAD_INPUTS if row.has(name)]
    if given:
        missing = next((name for name in LOOKAHEAD_INPUTS if name not in given), None)
        if missing is not None:
            raise refuse_input(missing, f"is missing beside {' and '.join(given)}: give all three or none")
        values["lookahead_config"] = tuple(row.number(name, 0) for name in LOOKAHEAD_INPUTS)
    return values


def _read_adapter(row: Row, facts: ModelFacts) -> str | None:
    """The adapter that a row names, by its place in the configuration."""
    task: int = row.number("lora_task_id", 0)
    if not task:
        return None
    if not facts.lora_tasks:
        raise refuse_input("lora_task_id", "no adapters are named in the configuration: leave the input out")
    if task > len(facts.lora_tasks):
        raise refuse_input(
            "lora_task_id", f"must be 1 to {len(facts.lora_tasks)}, the place of a name in `adapters`, not {task}"
        )
    return facts.lora_tasks[task - 1]


def _read_guide(row: Row) -> dict[str, Any]:
    """What a row's text must be."""
    type_name, guide_name = GUIDE_INPUTS
    kind, guide = row.text(type_name), row.text(guide_name)
    if not kind:
        if guide:
            raise refuse_input(type_name, f"is missing beside {guide_name}: give {', '.join(_GUIDE_TYPES)}")
        return {}
    if kind == "json":
        if guide:
            raise refuse_input(
                guide_name, "does not go with the type json, any JSON: give json_schema, or leave it out"
            )
        return {"guided": {"json": True}}
    if kind not in _GUIDE_TYPES:
        raise refuse_input(type_name, f"must be one of {', '.join(_GUIDE_TYPES)}, not {show_value(kind)}")
    if not guide:
        raise refuse_input(guide_name, f"is missing beside the type {kind}")
    return {"guided": {_GUIDE_TYPES[kind]: guide}}


def _read_prompt(row: Row) -> tuple[int, ...]:
    """Token ids, without what is behind input_lengths."""
    tokens, length = row.integers("input_ids"), row.number("input_lengths", 0)
    if not 0 <= length <= len(tokens):
        raise refuse_input("input_lengths", f"{length} of the {len(tokens)} tokens in input_ids")
    return tokens[:length]


def _read_stops(row: Row, facts: ModelFacts) -> tuple[tuple[int, ...], ...]:
    spelled = tuple(_spell(word, "stop_words", facts) for word in row.words("stop_words"))
    return read_word_list("stop_words_list", row.array("stop_words_list")) + tuple(filter(None, spelled))


def _read_bad_words(row: Row, facts: ModelFacts) -> tuple[str, ...]:
    """Words that must not be generated, as texts."""
    words = [word for word in row.words("bad_words") if word]
    listed = read_word_list("bad_words_list", row.array("bad_words_list"))
    if listed:
        tokenizer = _tokenizer("bad_words_list", facts)
        decoded = [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in listed]
        spelled = set(tokenizer.bad_word_ids(decoded))  # at once: one by one they take twice as long
        for tokens, word in zip(listed, decoded, strict=True):
            if not word or tokens not in spelled:
                raise refuse_input("bad_words_list", f"the tokens {list(tokens)[:20]} are not how any word is spelled")
        words += decoded
    return tuple(words)


def _read_bias(row: Row, request: InferRequest, facts: ModelFacts) -> dict[int, float]:
    """Numbers that are added to logits, by token."""
    bias: dict[int, float] = {}
    dense: Array | None = row.array("embedding_bias")
    if dense is not None:
        bias = {token: float(value) for token, value in enumerate(dense.tolist()) if value}
    words, weights = row.words("embedding_bias_words"), row.numbers("embedding_bias_weights")
    if len(words) != len(weights):
        raise refuse_input("embedding_bias_weights", f"{len(weights)} weights for {len(words)} words")
    for word, weight in zip(words, weights, strict=True):
        for token in _spell(word, "embedding_bias_words", facts):
            bias[token] = bias.get(token, 0.0) + weight
    return bias


def _spell(word: str, name: str, facts: ModelFacts) -> tuple[int, ...]:
    return tuple(_tokenizer(name, facts).encode(word, add_special_tokens=False)) if word else ()


def _tokenizer(name: str, facts: ModelFacts) -> Tokenizer:
    if facts.tokenizer is None:
        raise refuse_input(name, "words need a tokenizer, which this checkpoint does not have")
    return facts.tokenizer


def _name(request: InferRequest, name: str) -> str:
    """What the model of a request calls an input."""
    return name if request.model.has_text else _RENAMED[name]
