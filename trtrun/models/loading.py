"""From a Hugging Face directory to a model on this rank: each rank reads only its own slices, one weight at a time.

No rank ever holds the whole model: a weight is filled from the mapped file piece by piece, packed for its kernel, and
the plain copy freed before the next. This module does not know what else the process holds, or where the devices are.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel.communicator import Communicator
from trtrun.attention.attention import AttentionBackend, attention_backend
from trtrun.errors import CheckpointError
from trtrun.layers.embedding import VocabularyEmbedding, VocabularyHead
from trtrun.layers.mlp import GatedMLP, RowParallelLinear
from trtrun.layers.norm import RMSNorm
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.linear.linear import Linear, can_pack, make_linear
from trtrun.models.checkpoint import Checkpoint
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.models.decoder import CausalLM, DecoderLayer
from trtrun.models.parts import ShardLayout, Weight
from trtrun.quantization import QUANTIZATIONS, Quantization

Progress = Callable[[int, int], None]


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
        ConfigError: the quantization is unknown, or does not go with the dtype on the device.
    """
    device, held = device or torch.device("cpu"), QUANTIZATIONS.get(quantization)
    held.check(dtype, device)
    layout = ShardLayout(config, tp_rank, tp_size)
    linear = layout.linear_weights()
    elements = sum(weight.num_elements for weight in layout.all_weights())
    elements -= sum(weight.num_elements for weight in linear)
    size = elements * dtype.itemsize + sum(held.num_bytes(weight.shape, dtype) for weight in linear)
    if _shares_tied_embedding(config, device, dtype, held):
        size -= layout.embedding().num_elements * dtype.itemsize
    return size


def load_model(
    path: Path,
    communicator: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    batch_invariant: bool = True,
    quantization: str = "none",
    logits_reader: int | None = None,
) -> tuple[CausalLM, LoadReport]:
    """Load this rank's share of the model in `path`.

    Args:
        path: Hugging Face directory.
        communicator: of the tensor-parallel group; its rank and size say which share.
        device: where the weights go.
        dtype: float32, float16 or bfloat16; weights in another dtype are converted.
        progress: called with (bytes read, bytes to read) of this rank.
        batch_invariant: whether a token's result must not depend on what else is in the batch, in bfloat16 on the CPU.
            Losslessness needs it of a target; a draft is faster without.
        quantization: how the weights of linear layers are held, by name; each is quantized as it is read.
        logits_reader: the only rank of the group that needs logits; None where all do.

    Raises:
        CheckpointError: anything wrong with the directory, in one line.
        ConfigError: the quantization is unknown, or does not go with the dtype on the device.
    """
    config = read_model_config(path)
    held = QUANTIZATIONS.get(quantization)
    size = shard_bytes(config, communicator.rank, communicator.size, dtype, device, quantization)
    layout = ShardLayout(config, communicator.rank, communicator.size)
    loader = _Loader(Checkpoint(path), layout, device, dtype, held, progress, batch_invariant)
    # The order keeps the peak low: first the head, the largest weight that is packed out of a buffer, while little else
    # is resident; last the embedding, which needs no buffer.
    shared = _shares_tied_embedding(config, device, dtype, held)
    head = None if shared else loader.linear(layout.head())
    loader.release_buffer()
    rotary = RotaryEmbedding(config.rope, config.head_dim, dtype, device)
    attention = attention_backend(device, dtype, config.head_dim)
    layers = [
        _load_layer(loader, config, layout, index, rotary, attention, communicator)
        for index in range(config.num_layers)
    ]
    loader.release_buffer()
    final_norm = RMSNorm(loader.tensor(layout.final_norm()), config.rms_norm_eps)
    embedding = loader.tensor(layout.embedding())
    loader.close()
    model = CausalLM(
        config,
        VocabularyEmbedding(embedding, layout.vocabulary.start, communicator),
        layers,
        final_norm,
        VocabularyHead(
            loader.wrap(embedding) if head is None else head, config.vocab_size, communicator, logits_reader
        ),
        rotary,
    )
    return model, LoadReport(loader.bytes_read, size)


def _shares_tied_embedding(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, quantization: Quantization
) -> bool:
    """Whether head and embedding are one tensor: tied, and multiplied without a copy of another form."""
    return config.tie_word_embeddings and not _converts(device, dtype, quantization)


def _converts(device: torch.device, dtype: torch.dtype, quantization: Quantization) -> bool:
    """Whether a linear layer keeps a packed or quantized copy of its weight instead of the weight."""
    return not quantization.keeps_weight or (device.type == "cpu" and can_pack(torch.empty(0, dtype=dtype)))


def _load_layer(
    loader: _Loader,
    config: ModelConfig,
    layout: ShardLayout,
    index: int,
    rotary: RotaryEmbedding,
    attention: AttentionBackend,
    communicator: Communicator,
) -> DecoderLayer:
    weights = layout.layer(index)
    heads, kv_heads = len(layout.heads), len(layout.kv_heads)
    qk_norm = None
    if config.qk_norm:
        query_norm, key_norm = loader.tensor(weights["q_norm"]), loader.tensor(weights["k_norm"])
        per_head = torch.cat((query_norm.expand(heads, -1), key_norm.expand(kv_heads, -1)))
        qk_norm = RMSNorm(per_head, config.rms_norm_eps)
    return DecoderLayer(
        input_norm=RMSNorm(loader.tensor(weights["input_norm"]), config.rms_norm_eps),
        qkv=loader.linear(weights["qkv"], weights.get("qkv_bias")),
        qk_norm=qk_norm,
        output=RowParallelLinear(loader.linear(weights["o"]), loader.optional(weights.get("o_bias")), communicator),
        post_attention_norm=RMSNorm(loader.tensor(weights["post_attention_norm"]), config.rms_norm_eps),
        mlp=GatedMLP(
            loader.linear(weights["gate_up"], weights.get("gate_up_bias")),
            RowParallelLinear(loader.linear(weights["down"]), loader.optional(weights.get("down_bias")), communicator),
        ),
        rotary=rotary,
        attention=attention,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.head_dim,
        window=config.sliding_windows[index],
    )


class _Loader:
    """Fills weights from a checkpoint and checks them on the way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: ShardLayout,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization,
        progress: Progress | None,
        batch_invariant: bool,
    ) -> None:
        self.device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._quantization = quantization
        self._progress = progress
        self._batch_invariant = batch_invariant
        self._buffer = torch.empty(0, dtype=dtype)
        # Every name, shape and dtype is checked before the first byte of a weight is read.
        self._total = sum(
            part.num_elements * checkpoint.check(part.name, part.shape)
            for weight in layout.all_weights()
            for part in weight.parts
        )

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._checkpoint.bytes_read

    def close(self) -> None:
        """Unmap the files and report completion."""
        self._checkpoint.close()
        if self._progress is not None:
            self._progress(self._total, self._total)

    def linear(self, weight: Weight, bias: Weight | None = None) -> Linear:
        """A linear layer of `weight` [out, in] and `bias` [out]."""
        if self.device.type != "cpu" or not _converts(self.device, self._dtype, self._quantization):
            return self.wrap(self.tensor(weight), self.optional(bias))
        if self._buffer.numel() < weight.num_elements:
            # Weights are packed out of one buffer mapped from the system: the allocator would keep what is freed, and a
            # fresh one for each weight would leave holes between the packed copies.
            self._buffer = _map_buffer(weight.num_elements, self._dtype)
        plain = self._buffer[: weight.num_elements].view(weight.shape)
        return self.wrap(self._fill(plain, weight), self.optional(bias))

    def wrap(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A linear layer of tensors that are there already."""
        return make_linear(self._quantization.quantize(weight), bias, batch_invariant=self._batch_invariant)

    def release_buffer(self) -> None:
        """Give the packing buffer back; the next packed weight maps another."""
        self._buffer = self._buffer.new_empty(0)

    def optional(self, weight: Weight | None) -> torch.Tensor | None:
        """The tensor, or None for a weight that the architecture does not have."""
        return None if weight is None else self.tensor(weight)

    def tensor(self, weight: Weight) -> torch.Tensor:
        """Read `weight` on to the device in the model's dtype.

        Raises:
            CheckpointError: it holds NaN or infinite values, or values that overflow the dtype.
        """
        return self._fill(torch.empty(weight.shape, dtype=self._dtype, device=self.device), weight)

    def _fill(self, result: torch.Tensor, weight: Weight) -> torch.Tensor:
        row = 0
        for part in weight.parts:
            for offset, piece in self._checkpoint.pieces(part.name, part.ranges):
                filled = result[row + offset : row + offset + piece.shape[0]].copy_(piece)
                if not _is_finite(filled):
                    raise CheckpointError(
                        f"{self._checkpoint.path}: tensor '{part.name}' holds NaN or infinite values in "
                        f"{str(self._dtype).removeprefix('torch.')}; the file is damaged or needs another dtype"
                    )
                if self._progress is not None:
                    self._progress(self._checkpoint.bytes_read, self._total)
            row += len(part.ranges[0])
        result[row:].zero_()  # vocabulary padding
        return result


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is finite: a NaN or infinity survives a sum, which costs one pass and no memory."""
    # A sum that is not finite may still come from large finite values, hence the exact second look.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _map_buffer(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[elements] of zeros in memory of its own, which the system takes back as soon as the tensor is freed."""
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)
