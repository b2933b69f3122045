"""Shard arithmetic of tensor parallelism: which rows, columns, heads and vocabulary entries a rank holds.

Pure: integers in, ranges out. It knows no tensor, no file and no model. The cut is that of Megatron-LM
(arXiv:1909.08053): column-parallel, then row-parallel, one all_reduce behind the pair.
"""

from __future__ import annotations

from parallel.errors import ShardingError


def column_range(size: int, rank: int, world: int) -> range:
    """Return the output features of a column-parallel weight that a rank holds.

    Args:
        size: output features of the whole weight.
        rank: place in the tensor-parallel group, in [0, world).
        world: ranks of the group.

    Raises:
        ShardingError: `size` is not a multiple of `world`, or `rank` is outside the group.
    """
    return _even_range(size, rank, world, "output features")


def expert_range(size: int, rank: int, world: int) -> range:
    """Return the experts that a rank holds, of `size`: as many as every other rank, or one more.

    Raises:
        ShardingError: there are fewer experts than ranks, or `rank` is outside the group.
    """
    _check_group(rank, world)
    if size < world:
        raise ShardingError(f"{size} experts cannot be shared out over {world} ranks: use {size} devices at most")
    return range(rank * size // world, (rank + 1) * size // world)


def vocabulary_range(size: int, rank: int, world: int) -> range:
    """Return the entries of the vocabulary that a rank stores: of `size` padded so that every rank's share is equal.
    Entries from `size` on are padding."""
    _check_group(rank, world)
    share = -(-size // world)
    return range(rank * share, (rank + 1) * share)


def loaded_vocabulary_range(size: int, rank: int, world: int) -> range:
    """Return the entries of vocabulary_range that the checkpoint has: what a rank reads. May be empty."""
    stored = vocabulary_range(size, rank, world)
    return range(min(stored.start, size), min(stored.stop, size))


def query_heads_for_rank(num_heads: int, rank: int, world: int) -> range:
    """Return the query heads that a rank computes.

    Raises:
        ShardingError: the heads are not a multiple of the ranks.
    """
    return _even_range(num_heads, rank, world, "attention heads")


def kv_heads_for_rank(num_kv_heads: int, rank: int, world: int) -> range:
    """Return the key/value heads that a rank holds: at least one.

    Where there are fewer KV heads than ranks, each head is held by world / num_kv_heads neighbouring ranks, those whose
    query heads read it.

    Raises:
        ShardingError: the KV heads neither divide nor are divided by the ranks.
    """
    _check_group(rank, world)
    if num_kv_heads % world == 0:
        return _even_range(num_kv_heads, rank, world, "KV heads")
    if num_kv_heads > 0 and world % num_kv_heads == 0:
        head = rank * num_kv_heads // world
        return range(head, head + 1)
    raise ShardingError(
        f"{num_kv_heads} KV heads cannot be shared out over {world} ranks: "
        f"use a number of devices that divides {num_kv_heads} or is a multiple of it"
    )


def _even_range(size: int, rank: int, world: int, what: str) -> range:
    """Return the rank-th of `world` equal parts of range(size)."""
    _check_group(rank, world)
    if size < 1 or size % world:
        raise ShardingError(
            f"{size} {what} cannot be divided over {world} ranks: use a number of devices that divides it"
        )
    share = size // world
    return range(rank * share, (rank + 1) * share)


def _check_group(rank: int, world: int) -> None:
    if world < 1 or not 0 <= rank < world:
        raise ShardingError(f"there is no rank {rank} in a tensor-parallel group of {world}")
