"""OLMo 2 and 3: norms of what attention and feed-forward layers add, and none in front of them; queries and keys are
normalised over all heads as one. OLMo 3 has windows in three of four layers, which its scaling of the rotation leaves
as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trtrun.layers.ends import ModelEnds
from trtrun.layers.rope import RopeConfig
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import FULL, MOST_POSITIONS, SLIDING, ModelFamily, read_flag, read_layer_types, read_window
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape, NormPlan
from trtrun.models.rope_config import parse_rope
from trtrun.registry import MODEL_FAMILIES
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from trtrun.layers.decoder_layer import HeadNorm
    from trtrun.weights.weight_reader import WeightReader

_FULL_PERIOD = 4
"""Of so many layers of OLMo 3 the last one sees all, where config.json names no layers' types."""


@dataclass(frozen=True)
class WholeNormAttentionPlan(AttentionPlan):
    """Self-attention whose queries are RMS-normalised over all heads as one before the rotation, and so are keys:
    q_norm and k_norm are cut as the heads are.

    Attributes:
        rounds_before_weighing: whether what is normalised is rounded before it is multiplied with their weights, too.
    """

    rounds_before_weighing: bool = False

    @property
    def whole_norms(self) -> tuple[Weight, Weight]:
        """[queries] and [keys] of all heads."""

        def norm(name: str, heads: Axis) -> Weight:
            return Weight((StoredTensor(f"{self.name}.{name}.weight", (heads,)),))

        return norm("q_norm", self.shape.queries), norm("k_norm", self.shape.keys)

    @override
    def weights(self) -> Sequence[Weight]:
        return (*super().weights(), *self.whole_norms)

    @override
    def build_head_norm(self, reader: WeightReader) -> HeadNorm:
        from trtrun.layers.whole_norm import WholeNorm

        shape, (rank, size) = self.shape, reader.share
        order = [number for part in self._order or [range(shape.head_dim)] for number in part]
        queries, keys = (reader.tensor(norm).float().view(-1, shape.head_dim)[:, order] for norm in self.whole_norms)
        is_first = rank == 0 or shape.keys.units(Share(rank - 1, size)) != shape.keys.units(reader.share)
        sizes = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return WholeNorm(
            queries, keys, sizes, is_first, shape.rms_norm_eps, reader.communicator, self.rounds_before_weighing
        )


def _plan(
    shape: ModelShape, values: Mapping[str, Any], windows: Sequence[int | None], ropes: Sequence[RopeConfig | None]
) -> Sequence[LayerPlan]:
    has_bias = read_flag(values, "attention_bias")

    def norm(index: int, name: str) -> NormPlan:
        return NormPlan(f"model.layers.{index}.{name}", shape.hidden_size, shape.rms_norm_eps, in_float32=True)

    return [
        DecoderPlan(
            None,
            WholeNormAttentionPlan(
                f"model.layers.{index}.self_attn", shape, windows[index], has_bias, has_bias, rope=ropes[index]
            ),
            None,
            GatedMLPPlan(f"model.layers.{index}.mlp", shape),
            norm(index, "post_attention_layernorm"),
            norm(index, "post_feedforward_layernorm"),
        )
        for index in range(shape.num_layers)
    ]


def _plan_olmo2(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    return _plan(shape, values, [None] * shape.num_layers, [None] * shape.num_layers)


def _plan_olmo3(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    window = read_window(values)
    usual = [FULL if (index + 1) % _FULL_PERIOD == 0 else SLIDING for index in range(shape.num_layers)]
    kinds = read_layer_types(values, usual)
    ropes = {kind: _read_rope(shape, values, kind) for kind in (FULL, SLIDING)}
    return _plan(
        shape, values, [window if kind == SLIDING else None for kind in kinds], [ropes[kind] for kind in kinds]
    )


def _read_rope(shape: ModelShape, values: Mapping[str, Any], kind: str) -> RopeConfig:
    """The rotation of layers of a kind: its entry of `rope_parameters`, plain where there is none; `rope_scaling` is of
    layers that see all."""
    parameters, scaling = values.get("rope_parameters"), values.get("rope_scaling")
    entry = parameters.get(kind) if isinstance(parameters, dict) else None
    own = {**(entry if isinstance(entry, dict) else {})}
    if kind == FULL and isinstance(scaling, dict):
        own.update(scaling)
    of_kind = {**values, "rope_scaling": None, "rope_parameters": own}
    return parse_rope(of_kind, min(values["max_position_embeddings"], MOST_POSITIONS), shape.head_dim)


def _read_ends(values: Mapping[str, Any]) -> ModelEnds:
    return ModelEnds(norm_in_float32=True)


_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}

OLMO2 = MODEL_FAMILIES.register("Olmo2ForCausalLM")(
    ModelFamily(defaults=_DEFAULTS, plan_layers=_plan_olmo2, model_type="olmo2", read_ends=_read_ends)
)
OLMO3 = MODEL_FAMILIES.register("Olmo3ForCausalLM")(
    ModelFamily(
        defaults={**_DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096},
        plan_layers=_plan_olmo3,
        model_type="olmo3",
        read_ends=_read_ends,
        rope_type_of=FULL,
    )
)
