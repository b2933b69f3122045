"""From a Hugging Face directory to a model on this rank: each rank reads only its own slices, one weight at a time.

No rank ever holds the whole model: a weight is filled from the mapped file piece by piece, packed for its kernel, and
the plain copy freed before the next. Which tensors a linear layer has, its quantization says: sizes and loading ask it.
This module does not know what else the process holds, or where the devices are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from parallel.communicator import Communicator
from trtrun.attention.backend import AttentionBackend, attention_backend
from trtrun.configuration.config import LoadFormat
from trtrun.kvcache.formats import KV_FORMATS
from trtrun.layers.embedding import VocabularyEmbedding, VocabularyHead
from trtrun.layers.mlp import GatedMLP, RowParallelLinear
from trtrun.layers.norm import RMSNorm
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.linear.quantization import QUANTIZATIONS, Quantization, of_head
from trtrun.linear.quantization.base import count_bytes
from trtrun.models.checkpoint import Checkpoint
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.models.decoder import CausalLM, DecoderLayer
from trtrun.models.dummy_weights import DummyWeights
from trtrun.models.shard_layout import ShardLayout
from trtrun.models.weight_check import plain_weights, quantized_weights
from trtrun.models.weight_reader import Progress, WeightReader
from trtrun.tensors import DTYPES, dtype_name


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
    held.check(dtype_name(dtype), device.type)
    layout = ShardLayout(config, tp_rank, tp_size)
    size = sum(weight.num_elements for weight in plain_weights(layout)) * dtype.itemsize
    size += sum(count_bytes(own.create(weight, dtype)) for weight, own in quantized_weights(layout, held))
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
    load_format: LoadFormat = "auto",
    kv_format: str = "auto",
) -> tuple[CausalLM, LoadReport]:
    """Load this rank's share of the model in `path`.

    Args:
        path: Hugging Face directory.
        communicator: of the tensor-parallel group; its rank and size say which share.
        device: where the weights go.
        dtype: float32, float16 or bfloat16; weights in another dtype are converted.
        progress: called with (bytes read, bytes to read) of this rank.
        batch_invariant: whether a token's result must not depend on what else is in the batch: see
            `Quantization.apply`. Losslessness needs it of a target; on CPUs a draft is faster without.
        quantization: how the weights of linear layers are held, by name; each is quantized as it is read.
        logits_reader: the only rank of the group that needs logits; None where all do.
        load_format: `dummy` makes weights up, from config.json alone.
        kv_format: how the store that the model will meet keeps keys and values, by name.

    Raises:
        CheckpointError: anything wrong with the directory, in one line.
        ConfigError: the quantization is unknown, or does not go with the dtype on the device.
    """
    config = read_model_config(path)
    held = QUANTIZATIONS.get(quantization)
    size = shard_bytes(config, communicator.rank, communicator.size, dtype, device, quantization)
    layout = ShardLayout(config, communicator.rank, communicator.size)
    files = DummyWeights(path, DTYPES[config.checkpoint_dtype], device) if load_format == "dummy" else Checkpoint(path)
    reader = WeightReader(files, layout, device, dtype, held, progress, batch_invariant)
    # The order keeps the peak low: first the head, the largest weight that is packed out of a buffer, while little else
    # is resident; last the embedding, which needs no buffer.
    shared = _shares_tied_embedding(config, device, dtype, held)
    head = None if shared else reader.linear(layout.head(), quantization=of_head(held))
    reader.release_buffer()
    rotary = RotaryEmbedding(config.rope, config.head_dim, dtype, device)
    attention = attention_backend(device, dtype, config.head_dim, KV_FORMATS.get(kv_format))
    layers = [_load_layer(reader, config, layout, index, attention, communicator) for index in range(config.num_layers)]
    reader.release_buffer()
    final_norm = RMSNorm(reader.tensor(layout.final_norm()), config.rms_norm_eps)
    embedding = reader.tensor(layout.embedding())
    if head is None:
        head = reader.linear(layout.head(), present=embedding, quantization=of_head(held))
    reader.close()
    model = CausalLM(
        config,
        VocabularyEmbedding(embedding, layout.vocabulary.start, communicator),
        layers,
        final_norm,
        VocabularyHead(head, config.vocab_size, communicator, logits_reader),
        rotary,
    )
    return model, LoadReport(reader.bytes_read, size)


def _shares_tied_embedding(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, quantization: Quantization
) -> bool:
    """Whether head and embedding are one tensor: tied, and multiplied without a copy of another form."""
    return config.tie_word_embeddings and of_head(quantization).keeps_dense(dtype, device)


def _load_layer(
    reader: WeightReader,
    config: ModelConfig,
    layout: ShardLayout,
    index: int,
    attention: AttentionBackend,
    communicator: Communicator,
) -> DecoderLayer:
    weights = layout.layer(index)
    heads, kv_heads = len(layout.heads), len(layout.kv_heads)
    qk_norm = None
    if config.qk_norm:
        query_norm, key_norm = reader.tensor(weights["q_norm"]), reader.tensor(weights["k_norm"])
        per_head = torch.cat((query_norm.expand(heads, -1), key_norm.expand(kv_heads, -1)))
        qk_norm = RMSNorm(per_head, config.rms_norm_eps)
    return DecoderLayer(
        input_norm=RMSNorm(reader.tensor(weights["input_norm"]), config.rms_norm_eps),
        qkv=reader.linear(weights["qkv"], weights.get("qkv_bias")),
        qk_norm=qk_norm,
        output=RowParallelLinear(reader.linear(weights["o"]), reader.optional(weights.get("o_bias")), communicator),
        post_attention_norm=RMSNorm(reader.tensor(weights["post_attention_norm"]), config.rms_norm_eps),
        mlp=GatedMLP(
            reader.linear(weights["gate_up"], weights.get("gate_up_bias")),
            RowParallelLinear(reader.linear(weights["down"]), reader.optional(weights.get("down_bias")), communicator),
        ),
        attention=attention,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.head_dim,
        window=config.sliding_windows[index],
    )
