"""EAGLE-3 heads as files have them, told by the names and shapes of their tensors (Li et al. 2025, arXiv:2503.01840).

    fc.weight, midlayer.…, norm.weight, lm_head.weight, d2t, t2d      the reference, SpecForge; sizes in config.json
    the same, layers.0.… in midlayer's place                          speculators; sizes in transformer_layer_config
    the same, with model. in front                                    other trainers

Beside them may be: embed_tokens.weight, else the target's embedding serves; layers.1.… and more, ordinary ones;
input_norm.weight or fc_norm.0.weight …, norms before fc; norms of queries and keys per head; biases. Shapes say how
large the head is: what a config.json says of vocabularies and of the number of layers is often another's. It does
without torch, and does not know how a head computes (layers/eagle3_head.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtrun.configuration.head_methods import Eagle3Section
from trtrun.configuration.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError, shorten
from trtrun.models.blocks import AttentionPlan, DecoderPlan, GatedMLPPlan, NormPlan
from trtrun.models.checkpoint import SINGLE_FILE, Checkpoint, read_json
from trtrun.models.config import MOST_POSITIONS, ModelConfig, read_flag
from trtrun.models.eagle3_boundaries import read_boundaries
from trtrun.models.eagle3_plan import Eagle3Plan, FusedLayerPlan
from trtrun.models.heads import HEADS
from trtrun.models.layer_plan import ModelShape
from trtrun.models.rope_config import parse_rope, read_number

_ENDS = re.compile(
    r"(fc\.(weight|bias)|fc_norm\.\d\.weight|(input_norm|norm|lm_head|embed_tokens)\.weight|d2t|t2d)", re.ASCII
)
_LAYER = re.compile(
    r"layers\.(\d\d?)\.(self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)"
    r"|mlp\.(gate|up|down)_proj\.(weight|bias)|(input_layernorm|post_attention_layernorm|hidden_norm)\.weight)",
    re.ASCII,
)
_LEFT_BY_TRAINERS = re.compile(r"(verifier_\w+|.*rotary_emb)\.(weight|inv_freq)", re.ASCII)
"""Of the target, and what follows from config.json."""

_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
"""Those of a Llama's config class."""


@HEADS.register("eagle3")
def read_eagle3(path: Path, target: ModelConfig, section: SpeculationSection) -> Eagle3Plan:
    """Plan the head of a directory.

    Raises:
        CheckpointError: see `heads.HEADS`.
    """
    assert isinstance(section, Eagle3Section)
    files, values = Checkpoint(path, (SINGLE_FILE,), "heads"), read_json(path, "config.json", required=True)
    try:
        head = _Head(files, values, target)
        plan = head.plan(section)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    for weight in plan.weights:
        for part in weight.parts:
            if part.name in files and files.shape(part.name) != part.shape:
                raise CheckpointError(
                    f"{files.file(part.name)}: tensor '{part.name}' has shape {list(files.shape(part.name))}, not "
                    f"{list(part.shape)}, which its other tensors, its config.json or the target call for"
                )
            files.check(part.name, part.shape)
    used = {part.name for weight in plan.weights for part in weight.parts} | {plan.d2t, plan.t2d}
    if unused := sorted(head.tensors - used):
        raise CheckpointError(
            f"{files.file(unused[0])}: tensor {shorten(unused[0])} goes with others that are not there: the files are "
            "incomplete, or the head computes otherwise than EAGLE-3"
        )
    return plan


class _Head:
    """The tensors of one head, by the names that speculators has for them, and what its config.json says."""

    def __init__(self, files: Checkpoint, values: Mapping[str, Any], target: ModelConfig) -> None:
        """Sort them.

        Raises:
            CheckpointError: they are no EAGLE-3 head's.
        """
        self._files = files
        self._values = values
        self._target = target
        nested = values.get("transformer_layer_config")
        self._of_layer: dict[str, Any] = {**_DEFAULTS, **(nested if isinstance(nested, Mapping) else values)}
        self._names = _sort_names(files)
        self._check_kind()

    @property
    def tensors(self) -> set[str]:
        """By the files' names."""
        return set(self._names.values())

    def _check_kind(self) -> None:
        hidden = self._target.hidden_size
        if "fc.weight" not in self._names:
            raise CheckpointError("it has no EAGLE-3 head: there is no fc.weight among its tensors")
        self._hidden, taken = self._shape("fc.weight", 2)
        if "layers.0.hidden_norm.weight" not in self._names:
            raise CheckpointError(
                "it has no layers.0.hidden_norm.weight: heads of EAGLE-1 and EAGLE-2 are not supported, only EAGLE-3"
            )
        if taken % hidden:
            raise CheckpointError(
                f"fc.weight has shape {[self._hidden, taken]}, but the target's hidden size is {hidden}: the head is "
                "for another target"
            )
        self._num_taps = taken // hidden

    def _shape(self, name: str, dimensions: int = 1) -> tuple[int, ...]:
        if name not in self._names:
            raise CheckpointError(f"it has no {name}: the files are incomplete")
        shape = self._files.shape(self._names[name])
        if len(shape) != dimensions or not all(shape):
            raise CheckpointError(f"{name} has shape {list(shape)}, which fits no head")
        return shape

    def plan(self, section: Eagle3Section) -> Eagle3Plan:
        """See `read_eagle3`."""
        files, names, target = self._files, self._names, self._target
        shape = self._layer_shape()
        positions = self._whole("max_position_embeddings")
        has_joint = self._has_norm("norm_before_fc", "input_norm.weight")
        has_own = self._has_norm("fc_norm", "fc_norm.0.weight")
        if has_joint and has_own:
            raise CheckpointError("it has norms of two kinds before fc, input_norm.weight and fc_norm.0.weight")
        num_lines, d2t, t2d = self._vocabulary()
        taken, eps = self._num_taps * target.hidden_size, shape.rms_norm_eps
        joint = NormPlan(_stem(names["input_norm.weight"]), taken, eps) if has_joint else None
        apart = [f"fc_norm.{tap}.weight" for tap in range(self._num_taps if has_own else 0)]
        return Eagle3Plan(
            files=files,
            target_vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            taps=read_boundaries(self._values, target.num_layers, self._num_taps, section.eagle3_layers_to_capture),
            stored=shape,
            fc=(names["fc.weight"], names.get("fc.bias")),
            tap_norms=tuple(NormPlan(_stem(names.get(name, name)), target.hidden_size, eps) for name in apart),
            joint_norm=joint,
            first=self._first_layer(shape),
            layers=tuple(self._layer(index, shape) for index in range(1, shape.num_layers)),
            final_norm=self._norm("norm", shape),
            norm_output=read_flag(self._values, "norm_output"),
            rope=parse_rope(self._of_layer, min(positions, MOST_POSITIONS), shape.head_dim),
            embedding=self._embedding(),
            head=names.get("lm_head.weight"),
            num_lines=num_lines,
            d2t=d2t,
            t2d=t2d,
        )

    def _layer_shape(self) -> ModelShape:
        """Sizes as the tensors have them; config.json says how many heads there are."""
        activation = self._of_layer["hidden_act"]
        if activation != "silu":
            raise CheckpointError(f"hidden_act {shorten(activation)} is not supported; known: silu")
        kinds = self._of_layer.get("layer_types")
        if isinstance(kinds, list) and "sliding_attention" in kinds:
            raise CheckpointError("heads with sliding attention are not supported")
        queries, keys = (self._shape(f"layers.0.self_attn.{name}_proj.weight", 2)[0] for name in "qk")
        num_heads = self._whole("num_attention_heads")
        given = self._of_layer.get("head_dim")
        head_dim = queries // num_heads if given is None else self._whole("head_dim")
        if num_heads * head_dim != queries or keys % head_dim or head_dim % 2:
            raise CheckpointError(
                f"its queries have {queries} numbers and its keys {keys}, which config.json's {num_heads} heads"
                f"{'' if given is None else f' of {head_dim}'} do not make"
            )
        num_kv_heads = keys // head_dim
        if num_heads % num_kv_heads:
            raise CheckpointError(f"{num_heads} heads must be a multiple of the {num_kv_heads} heads of its keys")
        return ModelShape(
            hidden_size=self._hidden,
            intermediate_size=self._shape("layers.0.mlp.gate_proj.weight", 2)[0],
            num_layers=1 + max(int(found[1]) for name in self._names if (found := _LAYER.fullmatch(name))),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read_number(self._of_layer, "rms_norm_eps"),
        )

    def _whole(self, name: str) -> int:
        value = self._of_layer.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: '{name}' must be a positive whole number, not {shorten(value)}")
        return value

    def _has_norm(self, flag: str, name: str) -> bool:
        """Whether it has a norm that its tensors and config.json may both speak of; a config.json that is silent of one
        that is there has lost it on its way."""
        has, said = name in self._names, self._values.get(flag)
        if said is not None and read_flag(self._values, flag) != has:
            there = "a" if has else "no"
            raise CheckpointError(f"config.json says {flag} {str(said).lower()}, but there is {there} {name}")
        return has

    def _vocabulary(self) -> tuple[int, str | None, str | None]:
        """Tokens of the head, and the names of d2t and t2d."""
        names, files, known = self._names, self._files, self._target.vocab_size
        if "lm_head.weight" not in names and self._hidden != self._target.hidden_size:
            raise CheckpointError(
                f"it has no lm_head.weight, and its hidden size of {self._hidden} does not go with the target's head, "
                f"which takes {self._target.hidden_size}"
            )
        lines = self._shape("lm_head.weight", 2)[0] if "lm_head.weight" in names else known
        d2t, t2d = names.get("d2t"), names.get("t2d")
        if lines > known:
            raise CheckpointError(f"lm_head.weight is for {lines} tokens, but the target has {known}")
        if d2t is None and lines < known:
            raise CheckpointError(
                f"lm_head.weight is for {lines} of the target's {known} tokens, and there is no d2t to say for which"
            )
        if d2t is not None:
            files.check_integers(d2t)
            if self._shape("d2t") != (lines,):
                raise CheckpointError(f"d2t has shape {list(files.shape(d2t))}, but the head is for {lines} tokens")
        if t2d is not None:
            files.check_flags(t2d)
            if self._shape("t2d") != (known,):
                raise CheckpointError(f"t2d has shape {list(files.shape(t2d))}, but the target has {known} tokens")
        return lines, d2t, t2d

    def _embedding(self) -> str | None:
        if "embed_tokens.weight" in self._names:
            return self._names["embed_tokens.weight"]
        if self._hidden != self._target.hidden_size:
            raise CheckpointError(
                f"it has no embed_tokens.weight, and its hidden size of {self._hidden} is not the target's, "
                f"{self._target.hidden_size}"
            )
        return None

    def _norm(self, name: str, shape: ModelShape) -> NormPlan:
        self._shape(f"{name}.weight")
        return NormPlan(_stem(self._names[f"{name}.weight"]), shape.hidden_size, shape.rms_norm_eps)

    def _blocks(self, index: int, shape: ModelShape) -> tuple[AttentionPlan, NormPlan, GatedMLPPlan]:
        own, names = f"layers.{index}", self._names
        norm = self._norm(f"{own}.post_attention_layernorm", shape)
        prefix = norm.name.removesuffix(".post_attention_layernorm")
        attention = AttentionPlan(
            f"{prefix}.self_attn",
            shape,
            qkv_bias=f"{own}.self_attn.q_proj.bias" in names,
            output_bias=f"{own}.self_attn.o_proj.bias" in names,
            head_norm=f"{own}.self_attn.q_norm.weight" in names,
            input_size=None if index else 2 * shape.hidden_size,
        )
        return attention, norm, GatedMLPPlan(f"{prefix}.mlp", shape, has_bias=f"{own}.mlp.gate_proj.bias" in names)

    def _first_layer(self, shape: ModelShape) -> FusedLayerPlan:
        attention, norm, mlp = self._blocks(0, shape)
        return FusedLayerPlan(
            self._norm("layers.0.input_layernorm", shape),
            self._norm("layers.0.hidden_norm", shape),
            attention,
            norm,
            mlp,
            read_flag(self._values, "norm_before_residual"),
        )

    def _layer(self, index: int, shape: ModelShape) -> DecoderPlan:
        attention, norm, mlp = self._blocks(index, shape)
        return DecoderPlan(self._norm(f"layers.{index}.input_layernorm", shape), attention, norm, mlp)


def _sort_names(files: Checkpoint) -> dict[str, str]:
    """Names in the files, by those that speculators has for them.

    Raises:
        CheckpointError: a tensor is none that a head has, or has two names.
    """
    names = dict[str, str]()
    for name in files.names():
        own = name.removeprefix("model.")
        if own.startswith("midlayer."):
            own = f"layers.0.{own.removeprefix('midlayer.')}"
        if _LEFT_BY_TRAINERS.fullmatch(own):
            continue
        if not _ENDS.fullmatch(own) and not _LAYER.fullmatch(own):
            raise CheckpointError(f"tensor {shorten(name)} is none that an EAGLE-3 head has")
        if own in names:
            raise CheckpointError(f"it has a tensor twice, as {names[own]} and as {name}")
        names[own] = name
    return names


def _stem(name: str) -> str:
    return name.removesuffix(".weight")
