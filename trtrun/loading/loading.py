"""Loads a model, draft heads, or a target's embedding and head alone, on this rank.

Each rank reads only its own slices of the checkpoint, one weight at a time: a weight is filled from the mapped file
piece by piece, packed for its kernel, and the plain copy freed before the next, so that no rank ever holds the whole
model. The plans of the layers say which weights there are, and the quantization which tensors each has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from parallel.communicator import Communicator
from parallel.sharding import vocabulary_range
from trtrun.attention.backend import AttentionBackend
from trtrun.attention.latents import LatentBackend
from trtrun.configuration.engine_directory import read_engine
from trtrun.configuration.engine_sections import LoadFormat, ModelSection
from trtrun.errors import CheckpointError
from trtrun.heads.heads import HeadsPlan, HeadsTarget
from trtrun.kvcache.formats import PLAIN, choose_format
from trtrun.kvcache.specs import latent_of
from trtrun.layers.embedding import VocabularyEmbedding, VocabularyHead
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.linear.layer import AdaptedLayers
from trtrun.linear.quantization import QUANTIZATIONS, Quantization
from trtrun.linear.quantization.base import count_bytes
from trtrun.loading.dummy_weights import DummyWeights
from trtrun.loading.engine_loader import EngineLoader
from trtrun.loading.engine_shards import EngineEmbeddingAndHead
from trtrun.loading.surplus_tensors import check_tied_head, tell_of_unread
from trtrun.loading.weight_check import (
    check_forms,
    check_held,
    check_split,
    check_weights,
    held_heads,
    open_for_heads,
)
from trtrun.models.config import ModelConfig
from trtrun.models.decoder import CausalLM
from trtrun.tensors import DTYPES, dtype_name, inference
from trtrun.weights.checkpoint import Checkpoint
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import HeldWeight, Share, Weight, WeightFiles
from trtrun.weights.weight_loader import CheckpointLoader, Progress, WeightLoader
from trtrun.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class LoadReport:
    """What loading cost.

    Attributes:
        bytes_read: bytes of the slices that this rank read from the files, in the files' dtype.
        shard_bytes: bytes that its weights take on the device.
    """

    bytes_read: int
    shard_bytes: int


def shard_bytes(
    config: ModelConfig,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
    quantization: str = "none",
) -> int:
    """Bytes that the weights of one rank take on its device (None: the CPU), told from shapes alone.

    Tied embeddings are held once on a GPU and twice on the CPU, where the head is packed for its kernel, and where the
    head is quantized.

    Raises:
        CheckpointError: the model cannot be shared out over `tp_size` ranks.
        ConfigError: the quantization is unknown; or it, or one of the checkpoint's, does not go with the dtype on the
            device.
    """
    device, default = device or torch.device("cpu"), QUANTIZATIONS.get(quantization)
    share = Share(tp_rank, tp_size)
    weights = check_split(config, share, dtype_name(dtype), device.type, default)
    size = sum(count_bytes(held.create(weight, dtype, device.type)) for weight, held in weights)
    if shares_tied_embedding(config, device, dtype, default):
        size -= config.embedding.cut(share).num_elements * dtype.itemsize
    return size


def load_model(
    path: Path,
    config: ModelConfig,
    communicator: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    batch_invariant: bool = True,
    quantization: str = "none",
    logits_reader: int | None = None,
    load_format: LoadFormat = "auto",
    kv_format: str = "auto",
    adapted: AdaptedLayers | None = None,
) -> tuple[CausalLM, LoadReport]:
    """Load this rank's share of the model in `path`.

    Args:
        path: Hugging Face directory.
        config: what its config.json says.
        communicator: of the tensor-parallel group; its rank and size say which share.
        device: where the weights go.
        dtype: float32, float16 or bfloat16; weights in another dtype are converted.
        progress: called with (bytes read, bytes to read) of this rank.
        batch_invariant: whether a token's result must not depend on what else is in the batch: see
            `Quantization.apply`. Losslessness needs it of a target; on CPUs a draft is faster without.
        quantization: how the weights of linear layers are held, by name; each is quantized as it is read.
        logits_reader: the only rank of the group that needs logits; None where all do.
        load_format: `dummy` makes weights up, from config.json alone.
        kv_format: how the store that the model will meet keeps keys and values, by name; see `choose_format`.
        adapted: collects the layers that may have adapters; None where none may.

    Raises:
        CheckpointError: anything wrong with the directory, in one line.
        ConfigError: the quantization is unknown, or does not go with the dtype on the device.
    """
    default = QUANTIZATIONS.get(quantization)
    share = Share(communicator.rank, communicator.size)
    size = shard_bytes(config, *share, dtype, device, quantization)
    loader = _open_loader(path, config, share, device, dtype, default, load_format, progress)
    reader = WeightReader(loader, communicator, batch_invariant, choose_format(kv_format, config.kv_scheme), adapted)
    # The order keeps the peak low: first the head, the largest weight that is packed out of a buffer, while little else
    # is resident; last the embedding, which needs no buffer.
    head = None if shares_tied_embedding(config, device, dtype, default) else reader.linear(config.head)
    reader.release_buffer()
    if config.layer_inputs is not None:
        reader.layer_inputs = config.layer_inputs.build(reader)
    layers = [layer.build(reader) for layer in config.layers]
    reader.release_buffer()
    final_norm = config.final_norm_plan.build(reader)
    embedding = reader.tensor(config.embedding)
    if head is None:
        head = reader.linear(config.head, present=embedding)
    reader.close()
    rotary = {rotation: RotaryEmbedding(*rotation, dtype, device) for rotation in config.rotations}
    model = CausalLM(
        config,
        VocabularyEmbedding(
            embedding,
            vocabulary_range(config.vocab_size, *share).start,
            communicator,
            config.ends.embedding_factor,
        ),
        layers,
        final_norm,
        VocabularyHead(head, config.vocab_size, communicator, logits_reader, config.ends),
        [rotary[rotation] for rotation in config.rotations],
        _backends(reader, config, share),
        share,
        adapted,
        reader.layer_inputs,
        reader.padding,
    )
    return model, LoadReport(reader.bytes_read, size)


def _backends(
    reader: WeightReader, config: ModelConfig, share: Share
) -> Mapping[int, AttentionBackend | LatentBackend]:
    """What attends, by sizes of heads, and by that of latents."""
    latent = latent_of(config.keeps(share))
    if latent is not None:
        return dict.fromkeys((config.head_dim, latent.head_dim), reader.latent_attention(latent.head_dim))
    return {size: reader.attention(size) for size in {config.head_dim, *(size for _, size in config.rotations)}}


def _open_loader(
    path: Path,
    config: ModelConfig,
    share: Share,
    device: torch.device,
    dtype: torch.dtype,
    default: Quantization,
    load_format: LoadFormat,
    progress: Progress | None,
) -> WeightLoader:
    """Open the loader of an engine's shard, of a checkpoint's files, or of dummy weights. Every name, shape and dtype
    is checked before the first byte of a weight is read."""
    quantization_of = partial(config.quantization_of, default=default)
    is_dummy, stored = load_format == "dummy", DTYPES[config.checkpoint_dtype]
    engine = None if is_dummy else read_engine(path)
    if engine is not None:
        return EngineLoader(path, engine, config, share, device, dtype, quantization_of, progress)
    files: WeightFiles = DummyWeights(path, stored, device, config) if is_dummy else open_checkpoint(path)
    total = check_weights(files, config, share, default)
    if isinstance(files, Checkpoint):
        check_tied_head(files, config)
        if share.rank == 0:
            tell_of_unread(path, files, config, default)
    return CheckpointLoader(files, share, device, dtype, quantization_of, total, progress)


def heads_bytes(plan: HeadsPlan, tp_rank: int, tp_size: int, dtype: torch.dtype, device_type: str) -> int:
    """Bytes that heads take on one of the ranks that share them, told from shapes alone.

    Raises:
        CheckpointError: they cannot be shared out over so many ranks.
        ConfigError: how the files have stored them does not go with the dtype on the type of device.
    """
    share = Share(tp_rank, tp_size)
    weights = check_forms(held_heads(plan, share), dtype_name(dtype), device_type)
    return sum(count_bytes(held.create(weight, dtype, device_type)) for weight, held in weights)


def load_heads(
    plan: HeadsPlan,
    target: HeadsTarget,
    communicator: Communicator,
    files: WeightFiles,
    progress: Progress | None = None,
    kv_format: str = "auto",
) -> tuple[object, LoadReport]:
    """Load this rank's share of heads.

    Args:
        plan: of the heads, with every tensor checked.
        target: this rank's share of the model whose hidden states they read, or its embedding and head.
        communicator: of the target's tensor-parallel group; of one rank where they have a rank of their own.
        files: where the heads are; see `open_heads`.
        progress: called with (bytes read, bytes to read) of this rank.
        kv_format: how the store that they will meet keeps keys and values, by name, where they keep any.

    Raises:
        CheckpointError: a tensor holds what it must not.
    """
    share, device, dtype = Share(communicator.rank, communicator.size), target.device, target.dtype
    total = check_held(files, held_heads(plan, share))
    loader = CheckpointLoader(files, share, device, dtype, plan.held, total, progress)
    # What is proposed changes no text: a product may depend on how many rows there are.
    reader = WeightReader(loader, communicator, batch_invariant=False, kv_format=choose_format(kv_format))
    try:
        heads = plan.build(reader, target, communicator)
    except CheckpointError as error:
        raise CheckpointError(f"heads: {error}") from None
    reader.release_buffer()
    reader.close()
    return heads, LoadReport(reader.bytes_read, heads_bytes(plan, *share, dtype, device.type))


def open_heads(plan: HeadsPlan, section: ModelSection, config: ModelConfig, device: torch.device) -> WeightFiles:
    """The files of heads: their own, or those of the target of that section and configuration, or what stands for them.

    Raises:
        CheckpointError: the target's cannot be read, or hold none.
    """
    if plan.files is not None:
        return plan.files
    if section.load_format == "dummy":
        return DummyWeights(section.model, DTYPES[config.checkpoint_dtype], device, config)
    return open_for_heads(section)


def shares_tied_embedding(config: ModelConfig, device: torch.device, dtype: torch.dtype, default: Quantization) -> bool:
    """Whether head and embedding are one tensor: tied, and multiplied without a copy of another form."""
    return config.tie_word_embeddings and config.quantization_of(config.head, default).keeps_dense(dtype, device)


_WHOLE = Share(0, 1)


@dataclass(frozen=True)
class TargetEmbeddingAndHead:
    """A `heads.HeadsTarget` without layers; what was not asked for is not there.

    Attributes:
        dtype, device: of the target's activations, and of the weights.
        bytes_read: from files.
    """

    dtype: torch.dtype
    device: torch.device
    embedding: VocabularyEmbedding | None
    head: VocabularyHead | None
    bytes_read: int

    @inference
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] int64 → [n, hidden]."""
        assert self.embedding is not None, "heads say which weights they compute with"
        return self.embedding(tokens)

    @inference
    def stored_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] int64 → [n, hidden], without the target's factor."""
        assert self.embedding is not None, "heads say which weights they compute with"
        return self.embedding.stored_rows(tokens)

    @inference
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of the end → [n, vocab_size] float32."""
        assert self.head is not None, "heads say which weights they compute with"
        return self.head(hidden)


def embedding_and_head_bytes(
    config: ModelConfig, weights: Sequence[Weight], dtype: torch.dtype, device: torch.device, quantization: str
) -> int:
    """Bytes that `weights` of a target take on a device, told from shapes alone."""
    size = sum(
        count_bytes(held.create(weight, dtype, device.type)) for weight, held in _held(config, weights, quantization)
    )
    if len(weights) > 1 and shares_tied_embedding(config, device, dtype, QUANTIZATIONS.get(quantization)):
        size -= config.embedding.cut(_WHOLE).num_elements * dtype.itemsize
    return size


def check_embedding_and_head(section: ModelSection, config: ModelConfig, weights: Sequence[Weight]) -> None:
    """Look at the headers of the target's files for `weights`.

    Raises:
        NoWeightsError: the directory has no weights.
        CheckpointError: they are not there, or not of their shapes.
    """
    if section.load_format != "dummy" and weights:
        check_held(_open(section), _held(config, weights, section.quantization))


def load_embedding_and_head(
    section: ModelSection,
    config: ModelConfig,
    weights: Sequence[Weight],
    communicator: Communicator,
    device: torch.device,
    dtype: torch.dtype,
) -> TargetEmbeddingAndHead:
    """Read `weights` of a target.

    Args:
        section: of the target.
        config: of the target.
        weights: its embedding, its head, both or none.
        communicator: of one rank.
        device: where they go.
        dtype: of the target's activations.

    Raises:
        CheckpointError: anything wrong with the files, in one line.
    """
    default = QUANTIZATIONS.get(section.quantization)
    is_dummy, stored = section.load_format == "dummy", DTYPES[config.checkpoint_dtype]
    if not weights:
        return TargetEmbeddingAndHead(dtype, device, None, None, 0)
    files: WeightFiles = DummyWeights(section.model, stored, device, config) if is_dummy else _open(section)
    total = check_held(files, _held(config, weights, section.quantization))
    quantization_of = partial(config.quantization_of, default=default)
    loader = CheckpointLoader(files, _WHOLE, device, dtype, quantization_of, total, None)
    # As the target's own are multiplied with.
    reader = WeightReader(loader, communicator, batch_invariant=True, kv_format=PLAIN)
    embedding = reader.tensor(config.embedding) if config.embedding in weights else None
    head = None
    if config.head in weights:
        is_shared = embedding is not None and shares_tied_embedding(config, device, dtype, default)
        head = VocabularyHead(
            reader.linear(config.head, present=embedding if is_shared else None),
            config.vocab_size,
            communicator,
            ends=config.ends,
        )
    reader.release_buffer()
    reader.close()
    factor = config.ends.embedding_factor
    looked_up = None if embedding is None else VocabularyEmbedding(embedding, 0, communicator, factor)
    return TargetEmbeddingAndHead(dtype, device, looked_up, head, reader.bytes_read)


def _open(section: ModelSection) -> WeightFiles:
    engine = read_engine(section.model)
    return open_checkpoint(section.model) if engine is None else EngineEmbeddingAndHead(section.model, engine)


def _held(config: ModelConfig, weights: Sequence[Weight], quantization: str) -> list[tuple[HeldWeight, Quantization]]:
    """Both, whole, and how they are held: as the target's own."""
    default = QUANTIZATIONS.get(quantization)
    return [(weight.cut(_WHOLE), config.quantization_of(weight, default)) for weight in weights]
