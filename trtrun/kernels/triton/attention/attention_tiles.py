"""How the queries and keys of an attention are dealt out to programs: decided by shapes, as a graph needs it.

A tile is some queries of one KV head, heads counted. One program has a tile and goes through all keys that it sees, or
each share of the keys has programs of its own, whose results are combined (Flash-Decoding, Dao et al., October 2023).
Each way gives the same bits, so that only time decides. It knows numbers; it does not know tensors.
"""

from __future__ import annotations

from typing import NamedTuple

SHARE = 256
"""Keys of a share. Each is summed by itself, and the shares one after the other, whoever computes them: so a query has
the same bits in a round, in a prompt and in any company."""

LARGEST_TILE = 128
"""Queries of the largest tile of any program, and of all tiles in the kernel for prompts."""

MOST_SPLIT = 64
"""The largest tile of which each share has a program of its own."""

_MOST_PLACES_SPLIT = 256
"""Queries of a row and KV head, heads counted, of which shares are computed apart: results of shares take memory, and
more queries have tiles enough."""

MOST_PARTIAL_BYTES = 64 << 20
"""Bytes of results of shares that exist at once: 64 rows of 6 queries, 32 heads and 16k tokens have 400 MB."""

MOST_LATENT_BYTES = 256 << 20
"""The same of attention over latents, whose results are four times as long: one row of 5 queries, 16 heads and 160k
tokens has 210 MB."""

_LEAST_TILE = 16
"""Fewer rows than that a matrix unit does not multiply."""


class Tiling(NamedTuple):
    """One way.

    Attributes:
        tile: queries of a program, heads counted, at most; None for the kernel for prompts.
        is_split: whether each share has programs of its own.
    """

    tile: int | None
    is_split: bool = False


def choose_tiling(places: int, lines: int, shares: int, multiprocessors: int, has_prompt_kernel: bool) -> Tiling:
    """The way that takes the least time, by measurements on an H200 (docs/performance.md).

    Args:
        places: queries of a row and KV head, heads counted.
        lines: rows times KV heads.
        shares: of the keys that a row may have.
        multiprocessors: of the device.
        has_prompt_kernel: whether the kernel for prompts may be used.
    """
    padded = max(_LEAST_TILE, 1 << (places - 1).bit_length())
    most = lines * -(-places // LARGEST_TILE)  # programs, with the largest tiles
    if shares == 1:
        # A program takes as long as its tile is large: small ones, as long as the device has room for all of them.
        tile = _LEAST_TILE
        while tile < min(padded, LARGEST_TILE) and lines * -(-places // tile) > 2 * multiprocessors:
            tile *= 2
        return Tiling(None) if tile == LARGEST_TILE and has_prompt_kernel else Tiling(tile)
    are_few = places <= _MOST_PLACES_SPLIT and most < multiprocessors // 8
    if are_few or (places <= MOST_SPLIT and most <= multiprocessors // 2):
        return Tiling(min(padded, MOST_SPLIT), is_split=True)
    if padded > _LEAST_TILE and has_prompt_kernel:
        return Tiling(None)
    return Tiling(min(padded, LARGEST_TILE))


def tiling_of_codes(places: int, lines: int, shares: int, multiprocessors: int) -> Tiling:
    """Choose the tiling for keys and values that are widened on the way, which takes multiprocessors more than memory
    does: shares are dealt out until each of those has four programs. A larger tile than 64 has no registers for it.

    Args:
        places, lines, shares, multiprocessors: see `choose_tiling`.
    """
    if shares == 1:
        tile = choose_tiling(places, lines, shares, multiprocessors, has_prompt_kernel=False).tile
        return Tiling(min(tile or MOST_SPLIT, MOST_SPLIT))
    tile = _LEAST_TILE if places <= 2 * _LEAST_TILE else MOST_SPLIT
    programs = lines * -(-places // tile)
    return Tiling(tile, is_split=places <= _MOST_PLACES_SPLIT and programs < 4 * multiprocessors)
