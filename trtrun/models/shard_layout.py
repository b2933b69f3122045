"""Which slices of which checkpoint tensors make up each weight that a rank holds.

Pure arithmetic on names and shapes, so that `trtrun plan` can tell sizes without reading weights. The cut is that of
Megatron-LM (arXiv:1909.08053): queries, keys and values, gate and up by output features, the output projections by
input features, embedding and head by vocabulary. It does not read files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallel.errors import ShardingError
from parallel.sharding import (
    check_heads,
    column_range,
    kv_heads_for_rank,
    loaded_vocabulary_range,
    query_heads_for_rank,
    vocabulary_range,
)
from trtrun.errors import CheckpointError
from trtrun.models.config import ModelConfig


@dataclass(frozen=True)
class StoredSlice:
    """One slice of one tensor: `ranges` per dimension, of a tensor of `shape`."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[range, ...]

    @property
    def num_elements(self) -> int:
        """Numbers in the slice."""
        return math.prod(len(item) for item in self.ranges)


@dataclass(frozen=True)
class Weight:
    """What a rank holds: its parts one behind the other along the first dimension, then zeros up to `shape`."""

    shape: tuple[int, ...]
    parts: tuple[StoredSlice, ...]

    @property
    def num_elements(self) -> int:
        """Numbers that the rank holds."""
        return math.prod(self.shape)


def _joined(*parts: StoredSlice) -> Weight:
    rows = sum(len(part.ranges[0]) for part in parts)
    return Weight((rows, *(len(item) for item in parts[0].ranges[1:])), parts)


def _whole(name: str, size: int) -> Weight:
    return _joined(StoredSlice(name, (size,), (range(size),)))


class ShardLayout:
    """The weights of one rank of a tensor-parallel group.

    Attributes:
        heads: query heads of the rank.
        kv_heads: KV heads of the rank; neighbouring ranks hold the same one where there are fewer heads than ranks.
        vocabulary: rows of embedding and head that the rank stores, padding included.
    """

    def __init__(self, config: ModelConfig, rank: int, size: int) -> None:
        """Cut `config` for place `rank` of `size`.

        Raises:
            CheckpointError: heads or features cannot be shared out over `size` ranks.
        """
        try:
            check_heads(config.num_heads, config.num_kv_heads, size)
            self.heads = query_heads_for_rank(config.num_heads, rank, size)
            self.kv_heads = kv_heads_for_rank(config.num_kv_heads, rank, size)
            self._features = column_range(config.intermediate_size, rank, size)
        except ShardingError as error:
            raise CheckpointError(f"tensor parallelism over {size} devices: {error}") from None
        self.vocabulary = vocabulary_range(config.vocab_size, rank, size)
        self._loaded_vocabulary = loaded_vocabulary_range(config.vocab_size, rank, size)
        self._config = config

    def embedding(self) -> Weight:
        """[vocabulary share, hidden]."""
        return self._vocabulary_weight("model.embed_tokens.weight")

    def head(self) -> Weight:
        """[vocabulary share, hidden]; the embedding's own rows where embeddings are tied."""
        return self.embedding() if self._config.tie_word_embeddings else self._vocabulary_weight("lm_head.weight")

    def _vocabulary_weight(self, name: str) -> Weight:
        hidden = self._config.hidden_size
        part = StoredSlice(name, (self._config.vocab_size, hidden), (self._loaded_vocabulary, range(hidden)))
        return Weight((len(self.vocabulary), hidden), (part,))

    def final_norm(self) -> Weight:
        """[hidden]."""
        return _whole("model.norm.weight", self._config.hidden_size)

    def layer(self, index: int) -> dict[str, Weight]:
        """Weights of one layer, by short name; biases and q/k norms only where the architecture has them."""
        config, prefix = self._config, f"model.layers.{index}."
        hidden, head_dim = config.hidden_size, config.head_dim
        queries = range(self.heads.start * head_dim, self.heads.stop * head_dim)
        keys = range(self.kv_heads.start * head_dim, self.kv_heads.stop * head_dim)
        query_size, key_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention = (("q_proj", query_size, queries), ("k_proj", key_size, keys), ("v_proj", key_size, keys))
        gated = tuple((name, config.intermediate_size, self._features) for name in ("gate_proj", "up_proj"))

        def columns(module: str, projections: tuple[tuple[str, int, range], ...]) -> Weight:
            return _joined(
                *(
                    StoredSlice(f"{prefix}{module}.{name}.weight", (size, hidden), (rows, range(hidden)))
                    for name, size, rows in projections
                )
            )

        def biases(module: str, projections: tuple[tuple[str, int, range], ...]) -> Weight:
            return _joined(
                *(StoredSlice(f"{prefix}{module}.{name}.bias", (size,), (rows,)) for name, size, rows in projections)
            )

        def row_parallel(name: str, size: int, features: range) -> Weight:
            return _joined(StoredSlice(f"{prefix}{name}.weight", (hidden, size), (range(hidden), features)))

        weights = {
            "input_norm": _whole(f"{prefix}input_layernorm.weight", hidden),
            "qkv": columns("self_attn", attention),
            "o": row_parallel("self_attn.o_proj", query_size, queries),
            "post_attention_norm": _whole(f"{prefix}post_attention_layernorm.weight", hidden),
            "gate_up": columns("mlp", gated),
            "down": row_parallel("mlp.down_proj", config.intermediate_size, self._features),
        }
        if config.qkv_bias:
            weights["qkv_bias"] = biases("self_attn", attention)
        if config.o_bias:
            weights["o_bias"] = _whole(f"{prefix}self_attn.o_proj.bias", hidden)
        if config.mlp_bias:
            weights["gate_up_bias"] = biases("mlp", gated)
            weights["down_bias"] = _whole(f"{prefix}mlp.down_proj.bias", hidden)
        if config.qk_norm:
            weights["q_norm"] = _whole(f"{prefix}self_attn.q_norm.weight", head_dim)
            weights["k_norm"] = _whole(f"{prefix}self_attn.k_norm.weight", head_dim)
        return weights

    def layer_matrices(self) -> list[Weight]:
        """The matrices [out, in] of the rank's linear layers, all but the head."""
        layers = [self.layer(index) for index in range(self._config.num_layers)]
        return [weight for layer in layers for weight in layer.values() if len(weight.shape) == 2]

    def all_weights(self) -> list[Weight]:
        """Every weight that the rank holds."""
        weights = [self.embedding(), self.head(), self.final_norm()]
        for index in range(self._config.num_layers):
            weights.extend(self.layer(index).values())
        return weights
