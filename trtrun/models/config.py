"""Read a config.json of Hugging Face, as transformers 4 and 5 write it, or of TensorRT-LLM, into one plain description
of the model.

Each architecture is a `ModelFamily`, registered by its own file, which plans the layers. This module reads no weights
(at most their dtype) and knows no rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from parallel.sharding import loaded_vocabulary_range, vocabulary_range
from trtrun.errors import CheckpointError, ConfigError, TrtrunError, shorten, wrap_errors
from trtrun.kvcache.formats import KVScheme
from trtrun.kvcache.specs import LayerSpecs, paged_of, state_of
from trtrun.layers.ends import PLAIN_ENDS, ModelEnds
from trtrun.layers.rope import RopeConfig
from trtrun.linear.quantization import QUANTIZATIONS, Quantization, of_head
from trtrun.linear.quantization.base import StoredQuantizations
from trtrun.linear.quantization.quantizations import Rounded
from trtrun.linear.stored.layout import StoredLinear
from trtrun.models.experts_plan import cut_by_experts, find_experts
from trtrun.models.installed_families import find_family
from trtrun.models.layer_inputs_plan import LayerInputsPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape, NormPlan
from trtrun.models.mtp_plan import MTPPlan
from trtrun.models.rope_config import parse_rope, read_number
from trtrun.registry import MODEL_FAMILIES
from trtrun.weights.checkpoint import ITEM_BYTES, read_json
from trtrun.weights.quantization_config import attention_names, find_section, read_kv_scheme, read_quantization
from trtrun.weights.rank_files import open_checkpoint, read_hugging_face_config
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**13),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 2**12),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 2**22),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input"), 2**16),
    "vocab_size_per_layer_input": 2**24,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2**14),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), 2**13),
}
"""Sizes well beyond any model's: what is larger is a misprint, refused before anything is counted or allocated."""

_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of config.json that name a mask token, in the order in which vLLM looks for them: PARD's (arXiv:2504.18583) and
those of its kin whose drafts are ordinary decoders."""

MOST_POSITIONS = 2**24
"""Tokens of one text. A model that promises more is taken for one of so many: tables of rows are as long as the
context, and no KV store holds such texts."""


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """Shapes and options of one decoder-only model.

    Attributes:
        architecture: name in config.json, such as "LlamaForCausalLM".
        vocab_size: rows of the embedding in the checkpoint (the tokenizer may know fewer tokens).
        max_position_embeddings: the context, MOST_POSITIONS at most.
        layers: plan of each layer, as the family has it.
        ends: what the model does where tokens come in and logits go out.
        layer_inputs: inputs of each layer beside the residual stream; None where there are none.
        checkpoint_dtype: name of the dtype that config.json states, or else that of the first tensor of the weights.
        eos_token_ids: tokens that end a text; empty when the checkpoint names none.
        quant_method: what the checkpoint calls the way in which it is quantized; None where it is not.
        stored: how it has stored each matrix; None where it has stored all plainly.
        kv_scheme: how it was made to have keys and values kept; None where it says nothing.
        mask_token: a token that stands for one that is not known, for models that were trained to draft several in one
            forward (see `_MASK_TOKENS`); None for others.
        values: config.json in Hugging Face's words, with what ModelOpt's file beside it says.
    """

    architecture: str
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    layers: tuple[LayerPlan, ...]
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    quant_method: str | None = None
    stored: StoredQuantizations | None = None
    mask_token: int | None = None
    kv_scheme: KVScheme | None = None
    ends: ModelEnds = PLAIN_ENDS
    layer_inputs: LayerInputsPlan | None = None
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def to_values(self) -> dict[str, Any]:
        """For JSON: what `from_values` makes the same description of, without a file."""
        return {
            "values": self.values,
            "checkpoint_dtype": self.checkpoint_dtype,
            "eos_token_ids": self.eos_token_ids,
            "kv_scheme": None if self.kv_scheme is None else asdict(self.kv_scheme),
        }

    @classmethod
    def from_values(cls, told: Mapping[str, Any]) -> ModelConfig:
        """The description that another process has read, from what its `to_values` gave."""
        values, scheme = told["values"], told["kv_scheme"]
        section = values.get("quantization_config")
        quant_method, stored = read_quantization(Path(), values) if section else (None, None)
        return replace(
            _parse(values),
            checkpoint_dtype=told["checkpoint_dtype"],
            eos_token_ids=tuple(told["eos_token_ids"]),
            quant_method=quant_method,
            stored=stored,
            kv_scheme=None if scheme is None else KVScheme(**scheme),
            values=values,
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, in tokens; None where it sees all, or keeps no keys."""
        kept = (paged_of(layer.keeps(Share(0, 1))) for layer in self.layers)
        return tuple(None if paged is None else paged.window for paged in kept)

    @override
    def keeps(self, share: Share) -> Sequence[LayerSpecs]:
        return [layer.keeps(share) for layer in self.layers]

    @property
    def heads_with_keys(self) -> Mapping[str, int]:
        """What stands in front of the names of each attention that keeps keys and values, and how many heads these
        have."""
        kept = zip(attention_names(self.num_layers), map(paged_of, self.keeps(Share(0, 1))), strict=True)
        return {name: paged.kv_heads for name, paged in kept if paged is not None}

    @property
    def layers_with_states(self) -> tuple[int, ...]:
        """Indices of layers that keep a state of each row."""
        return tuple(index for index, specs in enumerate(self.keeps(Share(0, 1))) if state_of(specs) is not None)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """How each layer rotates."""
        attention = (getattr(layer, "attention", None) for layer in self.layers)
        return tuple(getattr(it, "rope", None) or self.rope for it in attention)

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """How each layer rotates, and numbers of its heads."""
        attention = (getattr(layer, "attention", None) for layer in self.layers)
        sizes = (getattr(it, "shape", self).head_dim for it in attention)
        return tuple(zip(self.ropes, sizes, strict=True))

    @override
    @property
    def attention_shapes(self) -> Collection[ModelShape]:
        attention = (getattr(layer, "attention", None) for layer in self.layers)
        shapes = [getattr(it, "shape", self) for it in attention]
        return {(it.num_heads, it.num_kv_heads, it.head_dim): it for it in shapes}.values()

    def in_context(self, tokens: int) -> ModelConfig:
        """The model for texts of so many tokens at most."""
        return replace(self, rope=self.rope.in_context(tokens))

    @property
    def has_experts(self) -> bool:
        """Whether a layer is a mixture."""
        return any(True for layer in self.layers for _ in find_experts(layer))

    def cut_by_experts(self) -> ModelConfig:
        """The model whose experts lie whole on the ranks of a group, in place of features of each.

        Raises:
            ConfigError: it has none.
        """
        layers = tuple(cut_by_experts(layer) for layer in self.layers)
        if all(map(operator.is_, layers, self.layers)):
            raise ConfigError(f"{self.architecture} has no experts: leave expert_parallel out")
        return replace(self, layers=layers)

    @property
    def embedding(self) -> Weight:
        """[vocabulary share, hidden]. Dummy rows are long, so that tokens differ."""
        return self._of_vocabulary("model.embed_tokens.weight", 50.0)

    @property
    def head(self) -> Weight:
        """[vocabulary share, hidden]; the embedding's own rows where embeddings are tied."""
        held = self.embedding if self.tie_word_embeddings else self._of_vocabulary("lm_head.weight", 4.0)
        return replace(held, use="head")

    def _of_vocabulary(self, name: str, dummy_scale: float) -> Weight:
        entries = Axis(self.vocab_size, loaded_vocabulary_range, padded=vocabulary_range)
        return Weight((StoredTensor(name, (entries, Axis(self.hidden_size)), dummy_scale),))

    @property
    def final_norm_plan(self) -> NormPlan:
        """The norm behind the last layer."""
        ends = self.ends
        return NormPlan("model.norm", self.hidden_size, self.rms_norm_eps, ends.norm_adds_one, ends.norm_in_float32)

    @property
    def final_norm(self) -> Weight:
        """[hidden]."""
        return self.final_norm_plan.weight

    @cached_property
    def weights(self) -> Sequence[Weight]:
        """All that the model has."""
        inputs = () if self.layer_inputs is None else self.layer_inputs.weights()
        beside = (self.embedding, self.final_norm, self.head)
        return [*beside, *inputs, *(weight for layer in self.layers for weight in layer.weights())]

    def quantization_of(self, weight: Weight, default: Quantization) -> Quantization:
        """How a weight is held: as the checkpoint has stored it, else as `default` says and, if the head, goes with it.

        Raises:
            CheckpointError: what is multiplied with as one is not stored as one.
        """
        if weight.use in ("plain", "float32"):
            return QUANTIZATIONS.get("none")
        if weight.stored is not None:
            is_plain = self.quant_method is None and default is not QUANTIZATIONS.get("none")
            return Rounded(weight.stored, default) if is_plain else weight.stored
        if weight.use == "head" and self.tie_word_embeddings:
            return of_head(default)  # an embedding, which no checkpoint quantizes
        held = {part.name: self.stored(part.name) if self.stored is not None else None for part in weight.parts}
        if len(set(held.values())) > 1:
            raise CheckpointError(f"{', '.join(held)} are multiplied with as one, but stored in different ways")
        stored = held[weight.parts[0].name]
        if stored is not None:
            if weight.use == "dense" and isinstance(stored, StoredLinear):
                return replace(stored, becomes_dense=True)
            return stored
        if weight.use == "dense":
            return QUANTIZATIONS.get("none")
        return of_head(default) if weight.use == "head" else default


@dataclass(frozen=True)
class ModelFamily:
    """What one architecture is.

    Attributes:
        defaults: values that transformers' config class takes for keys that config.json leaves out.
        plan_layers: sizes and all values of config.json → the plan of each layer. Raises CheckpointError.
        activations: values of `hidden_act` that its layers compute; the first where config.json leaves it out.
        model_type: transformers' name of it in config.json; empty where it has none.
        read_ends: all values of config.json → what the model does at its ends. Raises CheckpointError.
        rope_type_of: type of the layers whose rotation counts as the model's, where each type has its own.
        text_models: model_type of `text_config` → the architecture that is meant by it, where config.json describes
            several models and this family is never planned itself (weights/nested_models.py).
        rotates_in_part: whether its plans hold heads so that a part of them may be rotated.
        head_dim_key: key of config.json that says how many numbers of a head are rotated together.
        plan_mtp: of the same as `plan_layers` the layer that drafts, where config.json says that files have one; None
            where it says that they have none, or the family has none. Raises CheckpointError.
        plan_inputs: as `plan_layers` → the plan of inputs of layers beside the residual stream, where these have any.
        scales_late_queries: whether queries are multiplied by a number that grows behind the context that the model was
            trained with first: its rows are no longer than that.
    """

    defaults: Mapping[str, Any]
    plan_layers: Callable[[ModelShape, Mapping[str, Any]], Sequence[LayerPlan]]
    activations: tuple[str, ...] = ("silu",)
    model_type: str = ""
    read_ends: Callable[[Mapping[str, Any]], ModelEnds] = lambda values: PLAIN_ENDS
    rope_type_of: str | None = None
    text_models: Mapping[str, str] = field(default_factory=dict)
    rotates_in_part: bool = False
    head_dim_key: str = "head_dim"
    scales_late_queries: bool = False
    plan_inputs: Callable[[ModelShape, Mapping[str, Any]], LayerInputsPlan | None] = lambda shape, values: None
    plan_mtp: Callable[[ModelShape, Mapping[str, Any]], MTPPlan | None] = lambda shape, values: None


def count_mtp_layers(values: Mapping[str, Any], key: str) -> int:
    """How many layers that draft files have, as `key` of config.json says; one where it is left out.

    Raises:
        CheckpointError: it is no number of layers.
    """
    count = values.get(key, 1)
    if type(count) is not int or count < 0:
        raise CheckpointError(f"'{key}' must be a number of layers, not {shorten(count)}")
    return count


def read_flag(values: Mapping[str, Any], name: str) -> bool:
    """Whether a key of config.json is on; off where it is left out or null.

    Raises:
        CheckpointError: it is neither true nor false.
    """
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"'{name}' must be true or false, not {shorten(value)}")
    return bool(value)


def read_window(values: Mapping[str, Any]) -> int | None:
    """`sliding_window`: how many tokens back a query sees, itself included; None where it is null and sees all.

    Raises:
        CheckpointError: it is no size.
    """
    return None if values["sliding_window"] is None else min(read_size(values, "sliding_window"), MOST_POSITIONS)


def windows_by_layer_type(values: Mapping[str, Any]) -> Sequence[int | None]:
    """Qwen's rule, layer by layer: `layer_types` where given, else the layers from `max_window_layers` on, if
    `use_sliding_window`.

    Raises:
        CheckpointError: one of these is not what it should be.
    """
    layers = int(values["num_hidden_layers"])
    window = read_window(values) if read_flag(values, "use_sliding_window") else None
    if values.get("layer_types") is None:
        first = values["max_window_layers"]
        if window is not None and (isinstance(first, bool) or not isinstance(first, int)):
            raise CheckpointError(f"'max_window_layers' must be a whole number, not {shorten(first)}")
        return [window if window is not None and index >= first else None for index in range(layers)]
    return [window if kind == SLIDING else None for kind in read_layer_types(values, [])]


FULL, SLIDING = "full_attention", "sliding_attention"
"""Layers that see all, and layers that see a window."""


def read_layer_types(
    values: Mapping[str, Any], usual: Sequence[str], known: tuple[str, ...] = (FULL, SLIDING)
) -> Sequence[str]:
    """The type of each layer, one of those `known`: `layer_types`, or what is `usual` where it is left out.

    Raises:
        CheckpointError: it is not one of them for each layer.
    """
    types, layers = values.get("layer_types"), int(values["num_hidden_layers"])
    if types is None:
        return usual
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise CheckpointError(f"'layer_types' must be a list with the type of each layer, not {shorten(types)}")
    unknown = sorted(set(types) - set(known))
    if unknown or len(types) != layers:
        detail = (
            f"unknown layer type {shorten(unknown[0])}" if unknown else f"{len(types)} layer_types for {layers} layers"
        )
        raise CheckpointError(f"{detail}; known layer types: {', '.join(known)}")
    return types


def read_model_config(path: Path) -> ModelConfig:
    """Read `path`/config.json and generation_config.json.

    Raises:
        CheckpointError: the directory or config.json is missing or invalid, the architecture is unknown, or the model
            uses something that is not supported; one line that names the directory.
    """
    values = read_hugging_face_config(path)
    generation = read_json(path, "generation_config.json", required=False)
    with _naming(path / "config.json"):
        config = _parse(values)
        dtype = _parse_dtype(values)
    quant_method, stored = read_quantization(path, values)
    said = {**values, "quantization_config": find_section(path, values)[1]}
    scheme = read_kv_scheme(path, values, config.heads_with_keys)
    config = replace(config, quant_method=quant_method, stored=stored, kv_scheme=scheme, values=said)
    # generation_config.json decides where it exists, as in transformers: without the key nothing ends a text.
    with _naming(path / ("generation_config.json" if generation else "config.json")):
        config = replace(config, eos_token_ids=_parse_eos(generation or values, config.vocab_size))
    # As transformers does: without a stated dtype, that of the weights.
    return replace(config, checkpoint_dtype=open_checkpoint(path).first_dtype() if dtype is None else dtype)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """What goes wrong becomes a CheckpointError with the file's name in front."""
    with wrap_errors(file, CheckpointError):
        try:
            yield
        except TrtrunError as error:
            raise CheckpointError(f"{file}: {error}") from None


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise CheckpointError(
            f"'architectures' must name one of {', '.join(MODEL_FAMILIES)}, not {shorten(architectures)}"
        )
    family: ModelFamily = find_family(str(architectures[0])[:200])
    values = {**family.defaults, **raw}
    if raw.get("rope_parameters") is None:  # null, too, leaves it out
        values["rope_parameters"] = family.defaults.get("rope_parameters")
    values["head_dim"] = values.get(family.head_dim_key)
    if values.get("hidden_act", family.activations[0]) not in family.activations:
        known = ", ".join(family.activations)
        raise CheckpointError(f"hidden_act {shorten(values['hidden_act'])} is not supported; known: {known}")
    hidden_size, num_heads = read_size(values, "hidden_size"), read_size(values, "num_attention_heads")
    if values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = hidden_size // num_heads if values.get("head_dim") is None else read_size(values, "head_dim")
    num_kv_heads = num_heads if values.get("num_key_value_heads") is None else read_size(values, "num_key_value_heads")
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}, "
            f"and head_dim {head_dim} even"
        )
    shape = ModelShape(
        hidden_size=hidden_size,
        intermediate_size=read_size(values, "intermediate_size"),
        num_layers=read_size(values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read_number(values, "rms_norm_eps"),
    )
    max_positions = read_size(values, "max_position_embeddings")
    rope = parse_rope(values, max_positions, head_dim, family.rope_type_of, in_part=family.rotates_in_part)
    if family.scales_late_queries and rope.original_max_position_embeddings:
        max_positions = min(max_positions, int(rope.original_max_position_embeddings))
    return ModelConfig(
        **vars(shape),
        architecture=str(architectures[0]),
        vocab_size=read_size(values, "vocab_size"),
        max_position_embeddings=min(max_positions, MOST_POSITIONS),
        tie_word_embeddings=read_flag(values, "tie_word_embeddings"),
        rope=rope,
        layers=tuple(family.plan_layers(shape, values)),
        ends=family.read_ends(values),
        layer_inputs=family.plan_inputs(shape, values),
        checkpoint_dtype="float32",
        eos_token_ids=(),
        mask_token=_parse_mask_token(raw),
    )


def _parse_mask_token(values: Mapping[str, Any]) -> int | None:
    name = next((name for name in _MASK_TOKENS if values.get(name) is not None), None)
    if name is None:
        return None
    token, vocab_size = values[name], read_size(values, "vocab_size")
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise CheckpointError(f"'{name}' must be a token id below vocab_size, {vocab_size}, not {shorten(token)}")
    return token


def read_size(values: Mapping[str, Any], name: str) -> int:
    """A positive whole number of config.json, such as a size.

    Raises:
        CheckpointError: it is none, or more than any model has.
    """
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"'{name}' must be a positive whole number, not {shorten(value)}")
    if value > _MOST.get(name, value):
        raise CheckpointError(f"'{name}' is {shorten(value)}, more than any model has: at most {_MOST[name]} are taken")
    return value


def _parse_dtype(values: Mapping[str, Any]) -> str | None:
    name = values.get("dtype") or values.get("torch_dtype")
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise CheckpointError(f"dtype {shorten(name)} is not supported; known: {', '.join(ITEM_BYTES)}")
    return name


def _parse_eos(values: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    ids = values.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"'eos_token_id' must be a token id or a list of them, not {shorten(ids)}")
    return tuple(token for token in ids if 0 <= token < vocab_size)  # others, such as -1, can end nothing
