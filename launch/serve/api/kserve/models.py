"""The models of tensorrtllm_backend 0.18.0 as they are served here: names, datatypes and shapes of inputs and outputs.

It is the table behind metadata and configurations, and what requests are held to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VERSION = "1"
"""The version of every model."""

ENSEMBLE = "ensemble"
BLS = "tensorrt_llm_bls"
TARGET = "tensorrt_llm"
DRAFT = "tensorrt_llm_draft"
PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"


@dataclass(frozen=True)
class TensorSpec:
    """An input or output.

    Attributes:
        datatype: KServe's name of it.
        dims: without the batch dimension; -1 is any size.
        is_optional: of an input, whether a request may leave it out.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True)
class Model:
    """A model, as its clients see it.

    Attributes:
        inputs, outputs: by name.
        backend: that Triton would run it with.
        is_decoupled: whether a request may have any number of responses.
        has_text: whether it needs a tokenizer.
    """

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    backend: str
    is_decoupled: bool
    has_text: bool

    @property
    def is_processing(self) -> bool:
        """Whether it is the tokenizer at one of the ends, and needs no engine."""
        return self.name in (PREPROCESSING, POSTPROCESSING)

    def metadata(self) -> dict[str, Any]:
        """The model's metadata, as KServe has it; the first size of each shape is the batch's."""
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self.backend,
            "inputs": [_tensor_metadata(spec) for spec in self.inputs.values()],
            "outputs": [_tensor_metadata(spec) for spec in self.outputs.values()],
        }

    def config(self, max_batch_size: int) -> dict[str, Any]:
        """Triton's configuration of it, with the fields that say something here."""
        return {
            "name": self.name,
            "platform": "ensemble" if self.name == ENSEMBLE else "",
            "backend": "" if self.name == ENSEMBLE else self.backend,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": max_batch_size,
            "input": [_tensor_config(spec) | {"optional": spec.is_optional} for spec in self.inputs.values()],
            "output": [_tensor_config(spec) for spec in self.outputs.values()],
            "model_transaction_policy": {"decoupled": self.is_decoupled},
        }


def _tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.dims]}


def _tensor_config(spec: TensorSpec) -> dict[str, Any]:
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.dims)}


def _table(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


def _needed(name: str, datatype: str, *dims: int) -> TensorSpec:
    return TensorSpec(name, datatype, dims)


def _optional(datatype: str, dims: tuple[int, ...], *names: str) -> list[TensorSpec]:
    return [TensorSpec(name, datatype, dims, is_optional=True) for name in names]


ONE, ANY = (1,), (-1,)

LOOKAHEAD_INPUTS = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
"""Inputs for lookahead, in the order of SamplingParams.lookahead_config."""

GUIDE_INPUTS = ("guided_decoding_guide_type", "guided_decoding_guide")
"""Inputs of later versions of the backend."""

_COMMON_INPUTS = [
    *_optional("INT32", ONE, "end_id", "pad_id", "min_length", "beam_width", "num_return_sequences"),
    *_optional("INT32", ONE, "prompt_vocab_size"),
    *_optional("INT32", ONE, *LOOKAHEAD_INPUTS),
    *_optional("FP32", ONE, "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *_optional("UINT64", ONE, "random_seed", "lora_task_id"),
    *_optional("BOOL", ONE, "exclude_input_in_output", "return_log_probs", "return_context_logits"),
    *_optional("BOOL", ONE, "return_generation_logits", "return_kv_cache_reuse_stats"),
    *_optional("FP16", (-1, -1), "prompt_embedding_table", "lora_weights"),
    *_optional("INT32", (-1, 3), "lora_config"),
    *_optional("BYTES", ONE, *GUIDE_INPUTS),
]
_TEXT_INPUTS = [
    _needed("text_input", "BYTES", 1),
    _needed("max_tokens", "INT32", 1),
    *_optional("BYTES", ONE, "decoder_text_input"),
    *_optional("BYTES", ANY, "bad_words", "stop_words", "embedding_bias_words"),
    *_optional("FP32", ANY, "embedding_bias_weights"),
    *_optional("INT32", ONE, "top_k"),
    *_optional("FP32", ONE, "top_p", "length_penalty"),
    *_optional("UINT64", ONE, "prompt_table_extra_id"),
    *_optional("BOOL", ONE, "stream"),
    *_COMMON_INPUTS,
]
_BLS_INPUTS = [
    *_TEXT_INPUTS,
    *_optional("INT32", ONE, "num_draft_tokens"),
    *_optional("BOOL", ONE, "use_draft_logits"),
    *_optional("FP16", (-1, 3, -1, -1), "image_input"),
    *_optional("UINT8", (-1, -1, -1, -1), "image_bytes_input", "video_bytes_input"),
    *_optional("BYTES", ONE, "image_url_input"),
]
_TOKEN_INPUTS = [
    _needed("input_ids", "INT32", -1),
    _needed("input_lengths", "INT32", 1),
    _needed("request_output_len", "INT32", 1),
    *_optional("INT32", ANY, "draft_input_ids", "decoder_input_ids"),
    *_optional("INT32", ONE, "decoder_input_lengths", "runtime_top_k", "runtime_top_p_reset_ids"),
    *_optional("INT32", (2, -1), "stop_words_list", "bad_words_list"),
    *_optional("FP32", ANY, "embedding_bias"),
    *_optional("FP32", (-1, -1), "draft_logits"),
    *_optional("FP32", ONE, "draft_acceptance_threshold", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay"),
    *_optional("FP32", ONE, "len_penalty", "beam_search_diversity_rate"),
    *_optional("UINT64", ANY, "prompt_table_extra_ids"),
    *_optional("BOOL", ONE, "stop", "streaming", "early_stopping"),
    *_COMMON_INPUTS,
]
_COMMON_OUTPUTS = [
    _needed("cum_log_probs", "FP32", -1),
    _needed("output_log_probs", "FP32", -1, -1),
    _needed("context_logits", "FP32", -1, -1),
    _needed("generation_logits", "FP32", -1, -1, -1),
    _needed("batch_index", "INT32", 1),
    _needed("sequence_index", "INT32", 1),
    _needed("kv_cache_alloc_new_blocks", "INT32", 1),
    _needed("kv_cache_reused_blocks", "INT32", 1),
    _needed("kv_cache_alloc_total_blocks", "INT32", 1),
]
_TEXT_OUTPUTS = [_needed("text_output", "BYTES", -1), *_COMMON_OUTPUTS]
_TOKEN_OUTPUTS = [_needed("output_ids", "INT32", -1, -1), _needed("sequence_length", "INT32", -1), *_COMMON_OUTPUTS]
_PREPROCESSING_INPUTS = [
    _needed("QUERY", "BYTES", 1),
    _needed("REQUEST_OUTPUT_LEN", "INT32", 1),
    *_optional("BYTES", ONE, "DECODER_QUERY", "IMAGE_URL"),
    *_optional("UINT8", (-1, -1, -1, -1), "IMAGE_BYTES", "VIDEO_BYTES"),
    *_optional("BYTES", ANY, "BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS"),
    *_optional("FP32", ANY, "EMBEDDING_BIAS_WEIGHTS"),
    *_optional("INT32", ONE, "END_ID", "PAD_ID"),
    *_optional("UINT64", ONE, "PROMPT_TABLE_EXTRA_ID"),
]
_PREPROCESSING_OUTPUTS = [
    _needed("INPUT_ID", "INT32", -1),
    _needed("REQUEST_INPUT_LEN", "INT32", 1),
    _needed("DECODER_INPUT_ID", "INT32", -1),
    _needed("REQUEST_DECODER_INPUT_LEN", "INT32", 1),
    _needed("BAD_WORDS_IDS", "INT32", 2, -1),
    _needed("STOP_WORDS_IDS", "INT32", 2, -1),
    _needed("EMBEDDING_BIAS", "FP32", -1),
    _needed("REQUEST_OUTPUT_LEN", "INT32", -1),
    _needed("OUT_END_ID", "INT32", 1),
    _needed("OUT_PAD_ID", "INT32", 1),
]

_TOKEN_MODEL = (_table(_TOKEN_INPUTS), _table(_TOKEN_OUTPUTS), "tensorrtllm", True, False)

MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model(ENSEMBLE, _table(_TEXT_INPUTS), _table(_TEXT_OUTPUTS), "ensemble", True, True),
        Model(BLS, _table(_BLS_INPUTS), _table(_TEXT_OUTPUTS), "python", True, True),
        Model(TARGET, *_TOKEN_MODEL),
        Model(DRAFT, *_TOKEN_MODEL),
        Model(PREPROCESSING, _table(_PREPROCESSING_INPUTS), _table(_PREPROCESSING_OUTPUTS), "python", False, True),
        Model(
            POSTPROCESSING,
            _table([_needed("TOKENS_BATCH", "INT32", -1, -1), _needed("SEQUENCE_LENGTH", "INT32", -1)]),
            _table([_needed("OUTPUT", "BYTES", -1)]),
            "python",
            False,
            True,
        ),
    )
}

PARTS: Mapping[str, tuple[str, str, str]] = dict.fromkeys((ENSEMBLE, BLS), (PREPROCESSING, TARGET, POSTPROCESSING))
"""Models that are made of others: those that read their requests, generate, and write their responses."""
