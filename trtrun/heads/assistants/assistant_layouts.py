"""Assistants of Gemma 4 (`gemma4_assistant`, `gemma4_unified_assistant`) as transformers writes them: what their
directories must have, and what a rank of the target holds of them.

    pre_projection.weight [D, 2 T], post_projection.weight [T, D]      T of the target, D of the assistant
    model.layers.0.…, model.norm.weight                                Gemma 4's layers, without keys and values
    model.embed_tokens.weight [V, D]                                   the vocabulary head, where that is tied
    lm_head.weight [V, D]                                              the vocabulary head, where it is not
    masked_embedding.centroids.weight [C, D], .token_ordering [V]      with `use_ordered_embeddings`

Each layer attends in the keys and values of the target's last layer of its type that has its own. Sizes are those of
config.json; heads of keys, windows and rotation must go with the target's, in whose cache they attend. It does without
torch, and does not know how an assistant computes (assistant_head.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError, shorten
from trtrun.heads.embedding_and_head import EmbeddingAndHeadPlan
from trtrun.heads.head_plan import JoiningPlan, count_layers
from trtrun.heads.heads import HEADS, HeadsTarget
from trtrun.kvcache.specs import LayerSpecs
from trtrun.linear.quantization import QUANTIZATIONS, Quantization
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import SLIDING, ModelConfig, read_flag, read_size
from trtrun.models.families.gemma4 import read_kinds
from trtrun.models.installed_families import find_family
from trtrun.models.layer_inputs_plan import ScaledLayerPlan
from trtrun.models.layer_plan import ModelShape, NormPlan
from trtrun.weights.checkpoint import SINGLE_FILE, Checkpoint, read_json
from trtrun.weights.quantization_config import find_section
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from parallel.communicator import Communicator
    from trtrun.heads.assistants.assistant_head import AssistantHead, ClusteredLogits
    from trtrun.layers.embedding import KnownLogits
    from trtrun.weights.weight_reader import WeightReader

MODEL_TYPES = {"gemma4_assistant": "Gemma4ForCausalLM", "gemma4_unified_assistant": "Gemma4UnifiedForCausalLM"}
"""By model_type of an assistant the architecture of its layers."""

_TARGETS = ("gemma4_text", "gemma4_unified_text")
_BEFORE, _BEHIND = "pre_projection.weight", "post_projection.weight"
_TIED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CENTROIDS, _ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
_ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
"""Keys of config.json that mean what no assistant has."""


@dataclass(frozen=True)
class ReadingShape(ModelShape):
    """Sizes of layers that attend in the target's keys and values: they keep nothing.

    Attributes:
        layers: plan of each.
    """

    layers: tuple[ScaledLayerPlan, ...]

    @override
    @property
    def attention_shapes(self) -> Collection[ModelShape]:
        return [layer.attention.shape for layer in self.layers]

    @override
    def keeps(self, share: Share) -> Sequence[LayerSpecs]:
        return [layer.keeps(share) for layer in self.layers]


@dataclass(frozen=True)
class ClustersPlan:
    """The vocabulary head of an assistant with ordered embeddings, which scores the tokens of those clusters whose
    centroids go best with its state. Each rank has all of it: it is small, and clusters lie anywhere in the vocabulary.

    Attributes:
        centroids: [C, D].
        head: [V, D].
        num_chosen: clusters whose tokens are scored.
    """

    centroids: Weight
    head: Weight
    num_chosen: int

    def build(self, reader: WeightReader, files: Checkpoint, communicator: Communicator) -> ClusteredLogits:
        """What computes it on this rank.

        Raises:
            CheckpointError: a token is in no cluster.
        """
        import torch

        from trtrun.heads.assistants.assistant_head import ClusteredLogits

        tokens, count = files.integers(_ORDERING), self.head.parts[0].shape[0]
        if not torch.equal(tokens.sort().values, torch.arange(count)):
            raise CheckpointError(
                f"{files.file(_ORDERING)}: {_ORDERING} must name each of the {count} tokens once: it was not saved, or "
                "is damaged"
            )
        tokens = tokens.to(reader.device)
        lines = reader.tensor(self.head).index_select(0, tokens)
        return ClusteredLogits(reader.linear(self.centroids), lines, tokens, self.num_chosen, communicator)


@dataclass(frozen=True)
class AssistantPlan:
    """The assistant of a directory (`HeadsPlan`).

    Attributes:
        embedding_and_head: the target's embedding, and its own vocabulary head; with `clusters` these are its head.
        target_hidden_size: of the target.
        stored: its layers, which read what the target keeps.
        read_layers: the target's layer in whose keys and values each attends.
        before: of the token's embedding and a hidden state of the target's size, in this order, to its own.
        behind: of its own state to one of the target's size.
        final_norm: behind the last layer.
        clusters: its vocabulary head, where it scores some tokens alone.
        taps: the normed end of the target.
    """

    embedding_and_head: EmbeddingAndHeadPlan
    target_hidden_size: int
    stored: ReadingShape
    read_layers: tuple[int, ...]
    before: JoiningPlan
    behind: JoiningPlan
    final_norm: NormPlan
    clusters: ClustersPlan | None
    taps: tuple[int, ...]

    @property
    def num_logits(self) -> int:
        """One, or another one in whose place lines of the head are gathered."""
        return 1 if self.clusters is None else 2

    @property
    def files(self) -> Checkpoint:
        """Where it is, with headers read."""
        assert self.embedding_and_head.files is not None
        return self.embedding_and_head.files

    def held(self, weight: Weight) -> Quantization:
        return QUANTIZATIONS.get("none")

    @cached_property
    def weights(self) -> Sequence[Weight]:
        layers = [weight for layer in self.stored.layers for weight in layer.weights()]
        clusters = self.clusters
        head = self.embedding_and_head.weights() if clusters is None else (clusters.head, clusters.centroids)
        return [*head, *self.before.weights(), *self.behind.weights(), self.final_norm.weight, *layers]

    def target_weights(self, target: ModelConfig) -> Sequence[Weight]:
        return self.embedding_and_head.of_target(target)

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        return 0  # it is fed rows alone, in less than the target needs for these

    def describe(self) -> str:
        read = " and ".join(str(layer) for layer in dict.fromkeys(self.read_layers))
        return (
            f"Gemma 4 assistant of {count_layers(len(self.read_layers))} and {self.embedding_and_head.describe()}, "
            f"reading keys and values of the target's layers {read}"
        )

    def build(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> AssistantHead:
        """Make the assistant on this rank, beside the target.

        Raises:
            CheckpointError: token_ordering does not name each token once.
        """
        from trtrun.heads.assistants.assistant_head import AssistantHead, ReadLayer
        from trtrun.layers.decoder_layer import Attention
        from trtrun.models.decoder import CausalLM

        assert isinstance(target, CausalLM), "it attends in the target's keys and values"
        if self.clusters is not None:
            logits: KnownLogits | ClusteredLogits = self.clusters.build(reader, self.files, communicator)
        else:
            logits = self.embedding_and_head.build(reader, target, communicator).logits
        layers = []
        for plan, read in zip(self.stored.layers, self.read_layers, strict=True):
            layer, of_target = plan.build(reader), target.attention_of(read)
            attention = layer.attention
            assert isinstance(attention, Attention)
            # As the target's own layer: its store has that backend's format and these scales.
            attention.backend, attention.kv_scales = of_target.backend, of_target.kv_scales
            layers.append(ReadLayer(layer, read, target.rotary_of(read)))
        return AssistantHead(
            embedding=target.embed,
            before=reader.linear(*self.before.both),
            layers=layers,
            final_norm=self.final_norm.build(reader),
            behind=reader.linear(*self.behind.both),
            logits=logits,
            hidden_size=self.stored.hidden_size,
            target_hidden_size=self.target_hidden_size,
            dtype=target.dtype,
        )


def is_assistant(names: Collection[str]) -> bool:
    """Whether tensors of these names are an assistant's."""
    return {_BEFORE, _BEHIND} <= set(names)


@HEADS.register("gemma4_mtp")
def read_assistant(path: Path, target: ModelConfig, section: SpeculationSection) -> AssistantPlan:
    """Plan the assistant of a directory.

    Raises:
        CheckpointError: see `heads.HEADS`.
    """
    values = read_json(path, "config.json", required=True)
    if values.get("model_type") not in MODEL_TYPES:
        raise CheckpointError(
            f"{path}: its model_type is {shorten(values.get('model_type'))}, but method gemma4_mtp drafts with "
            f"assistants of Gemma 4 ({' or '.join(MODEL_TYPES)}): name one as draft.model, or leave it out and set "
            "speculation.method to mtp for heads in the target's own files"
        )
    if find_family(target.architecture).model_type not in _TARGETS:
        raise CheckpointError(
            f"{path}: it is an assistant of Gemma 4, which attends in keys and values of that, but the target is a "
            f"{target.architecture}: name its own draft"
        )
    if find_section(path, values)[1] is not None:
        raise CheckpointError(f"{path}: quantized assistants are not supported: name the one in bfloat16")
    files = Checkpoint(path, (SINGLE_FILE,), "heads")
    try:
        return _plan(files, values, target)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def _plan(files: Checkpoint, values: Mapping[str, Any], target: ModelConfig) -> AssistantPlan:
    decoder, hidden = _read_decoder(values), target.hidden_size
    for what, found, wanted in (
        ("backbone_hidden_size", values.get("backbone_hidden_size"), hidden),
        ("vocab_size", decoder.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise CheckpointError(
                f"its {what} is {shorten(found)}, but the target's is {wanted}: the assistant is for another target"
            )
    layers, read_layers = _place_layers(decoder, target)
    sizes: dict[str, Any] = {field.name: getattr(decoder, field.name) for field in fields(ModelShape)}
    shape = ReadingShape(**sizes, layers=layers)
    is_tied = read_flag({"tie_word_embeddings": True, **values}, "tie_word_embeddings")
    ends = EmbeddingAndHeadPlan(
        files=files,
        target_vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        embedding=None,
        head=_TIED if is_tied and _TIED in files else _HEAD,
        num_lines=target.vocab_size,
        scales_embedding=True,
    )
    plan = AssistantPlan(
        embedding_and_head=ends,
        target_hidden_size=hidden,
        stored=shape,
        read_layers=read_layers,
        before=JoiningPlan(_BEFORE, None, 2 * hidden, shape.hidden_size),
        behind=JoiningPlan(_BEHIND, None, shape.hidden_size, hidden),
        final_norm=decoder.final_norm_plan,
        clusters=_plan_clusters(files, values, shape.hidden_size, ends),
        taps=(target.num_layers + 1,),
    )
    _check_names(files, plan)
    return plan


def _read_decoder(values: Mapping[str, Any]) -> ModelConfig:
    """Its layers, as those of a Gemma 4 of its own sizes."""
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"'text_config' must describe its layers, not {shorten(text)}")
    architecture = MODEL_TYPES[values["model_type"]]
    filled = {**find_family(architecture).defaults, **text}
    strange = next((key for key in _ABSENT if filled.get(key)), None)
    if strange is not None:
        raise CheckpointError(f"'{strange}' is {shorten(filled[strange])}, which no assistant has")
    own = {**text, "architectures": [architecture], "num_kv_shared_layers": 0}
    told = {"values": own, "checkpoint_dtype": "bfloat16", "eos_token_ids": (), "kv_scheme": None}
    return ModelConfig.from_values(told)


def _place_layers(decoder: ModelConfig, target: ModelConfig) -> tuple[tuple[ScaledLayerPlan, ...], tuple[int, ...]]:
    """Its layers, and the target's layer in whose keys and values each attends.

    Raises:
        CheckpointError: these are not what its layers were made for.
    """
    (own_kinds, own), (kinds, others) = _attentions(decoder), _attentions(target)
    last = {
        kind: index for index, (kind, plan) in enumerate(zip(kinds, others, strict=True)) if plan.shared_layer is None
    }
    layers, read_layers = [], []
    for index, (kind, attention) in enumerate(zip(own_kinds, own, strict=True)):
        if kind not in last:
            raise CheckpointError(f"its layer {index} is a {kind} one, of which the target has none")
        of_target, layer = others[last[kind]], decoder.layers[index]
        assert isinstance(layer, ScaledLayerPlan)
        told = ("num_kv_heads", "head_dim")
        for name, found, wanted in (
            *((name, getattr(attention.shape, name), getattr(of_target.shape, name)) for name in told),
            ("rotation", attention.rope, of_target.rope),
        ):
            if found != wanted:
                raise CheckpointError(
                    f"its layer {index} attends in the target's layer {last[kind]} with a {name} of {found}, but that "
                    f"has {wanted}: the assistant is for another target"
                )
        window = None
        if kind == SLIDING:
            seen = [plan.window for plan in (attention, of_target) if plan.window is not None]
            # The token that is fed stands one behind the last key, and takes a place of the window itself.
            window = max(1, min(seen) - 1) if seen else None
        attention = replace(attention, window=window, shared_layer=last[kind])
        layers.append(replace(layer, attention=attention))
        read_layers.append(last[kind])
    return tuple(layers), tuple(read_layers)


def _attentions(model: ModelConfig) -> tuple[Sequence[str], Sequence[AttentionPlan]]:
    """Type and attention of each layer of a Gemma 4."""
    kinds = read_kinds(model.num_layers, {**find_family(model.architecture).defaults, **model.values})
    found = [getattr(layer, "attention", None) for layer in model.layers]
    return kinds, [plan for plan in found if isinstance(plan, AttentionPlan)]


def _plan_clusters(
    files: Checkpoint, values: Mapping[str, Any], hidden_size: int, ends: EmbeddingAndHeadPlan
) -> ClustersPlan | None:
    if not read_flag(values, "use_ordered_embeddings"):
        return None
    filled, vocab_size = {"num_centroids": 2048, "centroid_intermediate_top_k": 32, **values}, ends.num_lines
    count, chosen = read_size(filled, "num_centroids"), read_size(filled, "centroid_intermediate_top_k")
    if vocab_size % count or chosen > count:
        raise CheckpointError(
            f"'num_centroids' is {count}, which must divide the {vocab_size} tokens and be no less than "
            f"'centroid_intermediate_top_k', {chosen}"
        )
    if _ORDERING not in files:
        raise CheckpointError(f"use_ordered_embeddings is true, but there is no {_ORDERING}: the files are incomplete")
    files.check_integers(_ORDERING)
    if files.shape(_ORDERING) != (vocab_size,):
        raise CheckpointError(f"{_ORDERING} has shape {list(files.shape(_ORDERING))}, not [{vocab_size}]")
    size = Axis(hidden_size)
    centroids = Weight((StoredTensor(_CENTROIDS, (Axis(count), size)),), "linear")
    assert ends.head is not None
    return ClustersPlan(centroids, Weight((StoredTensor(ends.head, (Axis(vocab_size), size)),)), chosen)


def _check_names(files: Checkpoint, plan: AssistantPlan) -> None:
    """Hold the files to the plan.

    Raises:
        CheckpointError: a tensor is not there or of another shape, or is none that assistants have.
    """
    used = {part.name for weight in plan.weights for part in weight.parts} | {_TIED, _HEAD}
    for weight in plan.weights:
        for part in weight.parts:
            files.check(part.name, part.shape)
    if plan.clusters is not None:
        used.add(_ORDERING)
    if unused := sorted(set(files.names()) - used):
        raise CheckpointError(
            f"{files.file(unused[0])}: tensor {shorten(unused[0])} goes with nothing in its config.json"
        )
