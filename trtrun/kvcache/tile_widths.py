"""How wide the tiles are that prompts are cut into on GPUs, and what fills them up.

Attention on a GPU computes a tile of queries at a time; engine/batch.py cuts prompts accordingly, and the
scheduler counts what that makes of a chunk. It knows numbers. It does not know prompts or rounds.
"""

from __future__ import annotations


def prompt_width(tile: int | None, heads: int, kv_heads: int) -> int | None:
    """Tokens of the rows that prompts are best cut into; None where each is best one row.

    Args:
        tile: queries that attention computes at a time, the heads of a KV head counted; see AttentionBackend.
        heads, kv_heads: of a rank.
    """
    return None if tile is None else max(1, tile * kv_heads // heads)


def padded_width(length: int, width: int) -> int:
    """Queries of a tile for `length` tokens, `width` at most."""
    return min(1 << (length - 1).bit_length(), width)


def padding(length: int, width: int) -> int:
    """What fills up a chunk of `length` tokens: tiles of `width`, and a narrower one for what is left."""
    left = length % width
    return padded_width(left, width) - left if left else 0


def most_padding(width: int) -> int:
    """Padding of a chunk, at most."""
    return max(padding(length, width) for length in range(width))
