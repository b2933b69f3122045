"""Tensors of a head of decoder layers, such as EAGLE's, by one set of names, and what their shapes show.

    fc.weight, layers.0.…, norm.weight, lm_head.weight, embed_tokens.weight       the names here
    midlayer.… in the place of layers.0.…                                         EAGLE-3's reference, SpecForge
    fusion_fc.… and transformer.… in that of fc.… and layers.0.…                  speculators' EAGLE-1
    model. in front, once or twice                                                vLLM, other trainers

Shapes say how large a head is; of config.json counts what they do not show. EAGLE-3's first layer reads twice the
hidden size, that of EAGLE-1 and EAGLE-2 what fc leaves; DFlash and DSpark have a hidden_norm.weight beside fc. It does
without torch. It does not know how a head computes (heads/eagle_head.py, heads/dflash_head.py), or what each kind has
(eagle_layouts.py, dflash_layouts.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.heads.embedding_and_head import EmbeddingAndHeadPlan
from trtrun.heads.head_plan import JoiningPlan
from trtrun.heads.layer_settings import read_activation, read_window_of
from trtrun.layers.rope import RopeConfig
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import MOST_POSITIONS, SLIDING, ModelConfig, read_flag
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import ModelShape, NormPlan
from trtrun.models.rope_config import parse_rope, read_number
from trtrun.weights.checkpoint import Checkpoint

_LAYER = re.compile(
    r"layers\.(\d\d?)\.(self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)"
    r"|mlp\.(gate|up|down)_proj\.(weight|bias)|(input_layernorm|post_attention_layernorm|hidden_norm)\.weight)",
    re.ASCII,
)
_LEFT_BY_TRAINERS = re.compile(r"(verifier_\w+|.*rotary_emb)\.(weight|inv_freq)", re.ASCII)
"""Names of tensors that are the target's, or follow from config.json."""

_OTHER_NAMES = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
_NESTED = ("transformer_layer_config", "model")
"""Where speculators' config.json has the sizes of the layer, and where vLLM's."""

_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
"""Defaults of a Llama's config class."""

NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}
"""Names of the kinds of heads, by the methods that draft with them."""

TOLD = {"eagle": "EAGLE-1 or EAGLE-2", "eagle3": "EAGLE-3", "dflash": "DFlash or DSpark"}
"""What tensors tell apart, by one of the methods."""


def find_eagle_method(path: Path) -> str:
    """Name of the EAGLE method that a directory is for, by its tensors; `eagle3` where they do not say."""
    try:
        files = Checkpoint(path, what="head")
        return "eagle" if find_method(files, sort_names(files)) == "eagle" else "eagle3"
    except CheckpointError:
        return "eagle3"  # who reads it says what is wrong


def sort_names(files: Checkpoint) -> dict[str, str]:
    """Names in the files, by those of the module; those of the target's tensors are left out.

    Raises:
        CheckpointError: a tensor has two names.
    """
    names = dict[str, str]()
    for name in files.names():
        own = name.removeprefix("model.").removeprefix("model.")
        for other, usual in _OTHER_NAMES.items():
            if own.startswith(other):
                own = usual + own.removeprefix(other)
        if _LEFT_BY_TRAINERS.fullmatch(own):
            continue
        if own in names:
            raise CheckpointError(f"it has a tensor twice, as {names[own]} and as {name}")
        names[own] = name
    return names


def find_method(files: Checkpoint, names: Mapping[str, str]) -> str | None:
    """Name of the method that drafts with tensors of such names, as `TOLD` has it; None where they are no such
    head's."""
    queries, output = (names.get(f"layers.0.self_attn.{name}_proj.weight") for name in "qo")
    if "fc.weight" not in names or queries is None or output is None:
        return None
    if "hidden_norm.weight" in names:
        return "dflash"
    read, hidden = files.shape(queries)[1:], files.shape(output)[:1]
    reads_both = bool(hidden) and read == (2 * hidden[0],)
    return "eagle3" if reads_both or "layers.0.hidden_norm.weight" in names else "eagle"


class HeadTensors:
    """The tensors of one head, and what its config.json says.

    Attributes:
        files: where they are.
        names: in the files, by those of the module.
        values: of config.json.
        target: that the head drafts for.
        hidden: numbers of the head's states.
        taken: numbers that fc reads.
        left_out: names of tensors that are there, and that nothing is computed with.
    """

    def __init__(
        self,
        files: Checkpoint,
        values: Mapping[str, Any],
        target: ModelConfig,
        method: str,
        beside_layers: re.Pattern[str],
    ) -> None:
        """Sort the tensors of a directory.

        Args:
            files, values, target: see the class.
            method: by which.
            beside_layers: names of tensors that its heads may have beside those of layers.

        Raises:
            CheckpointError: they are no head's of that kind.
        """
        self.files = files
        self.values = values
        self.target = target
        nested = next((found for key in _NESTED if isinstance(found := values.get(key), Mapping)), values)
        self._of_layer: dict[str, Any] = {**_DEFAULTS, **nested}
        self.names = sort_names(self.files)
        found = find_method(self.files, self.names)
        if found is not None and found != ("dflash" if method == "dspark" else method):
            raise CheckpointError(f"it is a head of {TOLD[found]}: set speculation.method to {found}")
        for own, name in self.names.items():
            if not beside_layers.fullmatch(own) and not _LAYER.fullmatch(own):
                raise CheckpointError(f"tensor {shorten(name)} is none that heads of {NAMES[method]} have")
        if "fc.weight" not in self.names:
            raise CheckpointError(f"it has no head of {NAMES[method]}: there is no fc.weight among its tensors")
        self.hidden, self.taken = self.shape("fc.weight", 2)
        self.left_out = set[str]()

    def shape(self, name: str, dimensions: int = 1) -> tuple[int, ...]:
        """Shape of a tensor of so many dimensions.

        Raises:
            CheckpointError: it is not there, or has others.
        """
        if name not in self.names:
            raise CheckpointError(f"it has no {name}: the files are incomplete")
        shape = self.files.shape(self.names[name])
        if len(shape) != dimensions or not all(shape):
            raise CheckpointError(f"{name} has shape {list(shape)}, which fits no head")
        return shape

    def has(self, name: str, flag: str, values: Mapping[str, Any] | None = None) -> bool:
        """Whether there is a tensor that config.json may speak of, too, at key `flag` of `values` or of its own; a
        config.json that is silent of one that is there has lost it on its way.

        Raises:
            CheckpointError: they do not agree.
        """
        has, values = name in self.names, self.values if values is None else values
        if values.get(flag) is not None and read_flag(values, flag) != has:
            said, there = str(values[flag]).lower(), "a" if has else "no"
            raise CheckpointError(f"config.json says {flag} {said}, but there is {there} {name}")
        return has

    def _whole(self, name: str) -> int:
        value = self._of_layer.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: '{name}' must be a positive whole number, not {shorten(value)}")
        return value

    def layers(self) -> ModelShape:
        """Sizes as the tensors have them; config.json says how many heads attention has.

        Raises:
            CheckpointError: they do not go together, or it computes otherwise.
        """
        queries, keys = (self.shape(f"layers.0.self_attn.{name}_proj.weight", 2)[0] for name in "qk")
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
            hidden_size=self.hidden,
            intermediate_size=self.shape("layers.0.mlp.gate_proj.weight", 2)[0],
            num_layers=1 + max(int(found[1]) for name in self.names if (found := _LAYER.fullmatch(name))),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read_number(self._of_layer, "rms_norm_eps"),
        )

    @property
    def slides(self) -> bool:
        """Whether a layer sees a window."""
        kinds = self._of_layer.get("layer_types")
        return isinstance(kinds, list) and SLIDING in kinds

    def rope(self, shape: ModelShape) -> RopeConfig:
        """How the layers rotate."""
        return parse_rope(self._of_layer, min(self._whole("max_position_embeddings"), MOST_POSITIONS), shape.head_dim)

    def norm(self, name: str, shape: ModelShape) -> NormPlan:
        """Plan of a norm of the head's states."""
        self.shape(f"{name}.weight")
        return NormPlan(stem(self.names[f"{name}.weight"]), shape.hidden_size, shape.rms_norm_eps)

    def embedding_and_head(self, scales_embedding: bool = False) -> EmbeddingAndHeadPlan:
        """Its embedding, and its head with what it knows of the target's tokens; `scales_embedding` as in the plan.

        Raises:
            CheckpointError: they do not go together.
        """
        names, files, known = self.names, self.files, self.target.vocab_size
        if "lm_head.weight" not in names and self.hidden != self.target.hidden_size:
            raise CheckpointError(
                f"it has no lm_head.weight, and its hidden size of {self.hidden} does not go with the target's head, "
                f"which takes {self.target.hidden_size}"
            )
        lines = self.shape("lm_head.weight", 2)[0] if "lm_head.weight" in names else known
        d2t, t2d = names.get("d2t"), names.get("t2d")
        if lines > known:
            raise CheckpointError(f"lm_head.weight is for {lines} tokens, but the target has {known}")
        if d2t is None and lines < known:
            raise CheckpointError(
                f"lm_head.weight is for {lines} of the target's {known} tokens, and there is no d2t to say for which"
            )
        if d2t is not None:
            files.check_integers(d2t)
            if self.shape("d2t") != (lines,):
                raise CheckpointError(f"d2t has shape {list(files.shape(d2t))}, but the head is for {lines} tokens")
        if t2d is not None:
            files.check_flags(t2d)
            if self.shape("t2d") != (known,):
                raise CheckpointError(f"t2d has shape {list(files.shape(t2d))}, but the target has {known} tokens")
        head = names.get("lm_head.weight")
        own = self._embedding()
        return EmbeddingAndHeadPlan(files, known, self.hidden, own, head, lines, d2t, t2d, scales_embedding)

    def count_taps(self) -> int:
        """How many hidden states of the target fc takes.

        Raises:
            CheckpointError: they are of another size.
        """
        if self.taken % self.target.hidden_size:
            raise CheckpointError(
                f"fc.weight has shape {[self.hidden, self.taken]}, but the target's hidden size is "
                f"{self.target.hidden_size}: the head is for another target"
            )
        return self.taken // self.target.hidden_size

    def joining(self, inputs: int) -> JoiningPlan:
        """fc."""
        return JoiningPlan(self.names["fc.weight"], self.names.get("fc.bias"), inputs, self.hidden)

    def blocks(
        self, index: int, shape: ModelShape, input_size: int | None = None
    ) -> tuple[AttentionPlan, NormPlan, GatedMLPPlan]:
        """A layer but for the norms in front of its attention, which reads `input_size` numbers, or a state."""
        own, names = f"layers.{index}", self.names
        norm = self.norm(f"{own}.post_attention_layernorm", shape)
        prefix = norm.name.removesuffix(".post_attention_layernorm")
        attention = AttentionPlan(
            f"{prefix}.self_attn",
            shape,
            qkv_bias=f"{own}.self_attn.q_proj.bias" in names,
            output_bias=f"{own}.self_attn.o_proj.bias" in names,
            head_norm=f"{own}.self_attn.q_norm.weight" in names,
            input_size=input_size,
            window=read_window_of(self._of_layer, index),
        )
        has_bias = f"{own}.mlp.gate_proj.bias" in names
        return attention, norm, GatedMLPPlan(f"{prefix}.mlp", shape, has_bias, read_activation(self._of_layer))

    def ordinary_layers(self, shape: ModelShape) -> tuple[DecoderPlan, ...]:
        """All behind the first."""
        return tuple(
            DecoderPlan(self.norm(f"layers.{index}.input_layernorm", shape), *self.blocks(index, shape))
            for index in range(1, shape.num_layers)
        )

    def _embedding(self) -> str | None:
        """Name of the embedding; None where the target's serves."""
        if "embed_tokens.weight" in self.names:
            return self.names["embed_tokens.weight"]
        if self.hidden != self.target.hidden_size:
            raise CheckpointError(
                f"it has no embed_tokens.weight, and its hidden size of {self.hidden} is not the target's, "
                f"{self.target.hidden_size}"
            )
        return None


def stem(name: str) -> str:
    """Beginning of a weight's name, as plans of norms have it."""
    return name.removesuffix(".weight")
