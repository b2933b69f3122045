"""Words of experts' codes of 4 bits, and what stands beside them, on their way to the matrix units: where they lie,
copies to shared memory that run ahead, and E2M1 numbers of them.

Copies are of one thread each, and waited for by their number, so many are on their way while others are multiplied.
Reads to registers are not: the assembler has six counters for all that a warp waits for, and puts reads of the next
step behind all products of this one.

It knows a tile and its layout. It does not know products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from trtrun.kernels.torch.integers import GROUP, TILE
from trtrun.kernels.triton.coded_experts.four_bits_features import feature_of
from trtrun.kernels.triton.gluon_names import load_to_shared
from trtrun.kernels.triton.int4_stream.words import LINE, as_operand, split_words

_TILE, _GROUP, _WORDS = gl.constexpr(TILE), gl.constexpr(GROUP), gl.constexpr(TILE * GROUP // 8)


@gluon.constexpr_function
def _layout_of_words(tiles):
    """Layout of [32 * tiles, 32] words, each tile's of four warps: each word has the thread that has its weights."""
    lanes, warps = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0], [32, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0]], lanes, warps[: tiles + 1], [], [LINE.value * tiles, LINE.value]
    )


@gluon.constexpr_function
def _layout_of_features(tiles):
    """Layout of [64 * tiles] features, as the matrix units take them."""
    warps = [[16], [32], [64]]
    return gl.DistributedLinearLayout([[8]], [[0], [0], [1], [2], [4]], warps[: tiles + 1], [], [_TILE.value * tiles])


@gluon.constexpr_function
def _take_code(place):
    """Code of each half of a word, the `place`-th of four, as a bfloat16 times another: its sign is the highest bit,
    the others are the lowest of the exponent and the highest of the mantissa (fp4.spread_bits)."""
    if place < 3:
        take = f"shl.b32 s, $1, {3 * place}; and.b32 s, s, 0x81C081C0;"
    else:
        take = (
            "shl.b32 s, $1, 1; and.b32 s, s, 0x80008000; shr.u32 r, $1, 3; and.b32 r, r, 0x01800180; or.b32 s, s, r; "
            "shr.u32 r, $1, 7; and.b32 r, r, 0x00400040; or.b32 s, s, r;"
        )
    return f"{{.reg .b32 s, r, m; {take} mov.b32 m, 0x80008000; fma.rn.bf16x2 $0, s, $2, m;}}"


@gluon.constexpr_function
def _take_scale(place, shift, offset):
    """Byte of a word as two equal numbers of bfloat16."""
    return (
        f"{{.reg .b32 t; prmt.b32 t, $1, 0, {0x4040 + 0x101 * place}; shl.b32 t, t, {shift}; "
        f"add.u32 $0, t, {offset * 0x10001};}}"
    )


@gluon.jit
def _scale_of(words, block, PLACE: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr):
    """Scales of a block, of the words of a group, for pairs of numbers [features, 8]."""
    word = gl.convert_layout(words[block // 4], gl.SliceLayout(1, PLACE))
    pairs = gl.inline_asm_elementwise(
        _take_scale(block % 4, SHIFT, OFFSET), "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )
    return pairs.expand_dims(1).broadcast_to([pairs.shape[0], 8])


@gluon.jit
def _two(words, scales, FIRST: gl.constexpr, SLICE: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr):
    """Pairs of numbers for the SLICE-th 16 inputs of a group and those behind, which are the FIRST-th codes and the
    next of words: [features, 8, 2]."""
    place: gl.constexpr = words.type.layout
    blocks: gl.constexpr = len(scales) * 4
    of_one = _scale_of(scales, SLICE * blocks // 8, place, SHIFT, OFFSET)
    of_other = _scale_of(scales, (SLICE + 1) * blocks // 8, place, SHIFT, OFFSET)
    one = gl.inline_asm_elementwise(_take_code(FIRST), "=r,r,r", [words, of_one], dtype=gl.int32, is_pure=True, pack=1)
    other = gl.inline_asm_elementwise(
        _take_code(FIRST + 1), "=r,r,r", [words, of_other], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.join(one, other)


@gluon.jit
def widen_fp4(words, scales, OPERAND: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr):
    """Words of a group and the words of its scales → numbers times scales [features, 128], as the matrix units take
    them."""
    low, high = split_words(words)
    first, second = _two(low, scales, 0, 0, SHIFT, OFFSET), _two(low, scales, 2, 2, SHIFT, OFFSET)
    third, fourth = _two(high, scales, 0, 4, SHIFT, OFFSET), _two(high, scales, 2, 6, SHIFT, OFFSET)
    pairs = gl.join(gl.join(first, second), gl.join(third, fourth)).permute((0, 4, 3, 2, 1))
    return as_operand(pairs.reshape([low.shape[0], 64]), OPERAND, gl.bfloat16)


@gluon.jit
def _source_of(index, part, features, tiles, GATED: gl.constexpr, TILES: gl.constexpr):
    """The tile of the weight in which features are read, and which of its 64 they are."""
    _, feature = feature_of(index, part, features, GATED, TILES)
    # Behind the last tile there is nothing, and nobody asks for what comes of it.
    return gl.where(feature < tiles * _TILE, feature // _TILE, 0), feature % _TILE


@gluon.jit
def point_at_words(words, part, features, tiles, groups, GATED: gl.constexpr, TILES: gl.constexpr):
    """Where the first group's words that a thread copies are, [32 * TILES, 32], of an expert's: see
    integers.words_shape."""
    layout: gl.constexpr = _layout_of_words(TILES)
    line = gl.arange(0, LINE * TILES, layout=gl.SliceLayout(1, layout))
    within = gl.arange(0, LINE, layout=gl.SliceLayout(0, layout))
    index = line // 32 * _TILE + line // 4 % 4 * 16 + line // 16 % 2 * 8 + line % 4 * 2
    tile, feature = _source_of(index, part, features, tiles, GATED, TILES)
    own_line = feature // 8 % 2 * 16 + feature // 16 * 4 + feature % 8 // 2
    return words + (tile * groups * _WORDS + own_line * LINE)[:, None] + within[None, :]


@gluon.jit
def point_at_scales(
    scales, part, features, tiles, groups, GATED: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """Where the first group's scales that a thread copies are, [64 * TILES], of an expert's."""
    index = gl.arange(0, _TILE * TILES, layout=gl.BlockedLayout([1], [32], [4 * TILES], [0]))
    tile, feature = _source_of(index, part, features, tiles, GATED, TILES)
    stride: gl.constexpr = 1 if SHIFT == 0 else PARTS
    return scales + tile * groups * PARTS * _TILE + feature * stride


@gluon.jit
def ask(held, sources, is_pair, left, slot, STEP: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr):
    """Ask for STEP groups, to the places from `slot` on: words, scales and activations from their `sources`, of so many
    groups and inputs as are `left`, and zeros behind them."""
    held_words, held_scales, held_rows = held
    words, scales, x = sources
    groups, inputs = left
    for group in gl.static_range(STEP):
        place = slot + group
        known = gl.full(words.shape, groups > group, gl.int1, layout=words.type.layout)
        load_to_shared(held_words.index(place), words + group * _WORDS, mask=known)
        known = gl.full(scales.shape, groups > group, gl.int1, layout=scales.type.layout)
        for part in gl.static_range(PARTS):
            # Of whole numbers they lie part by part.
            at = group * PARTS * _TILE + (part * _TILE if SHIFT == 0 else part)
            load_to_shared(held_scales.index(place * PARTS + part), scales + at, mask=known)
        number = gl.arange(0, _GROUP, layout=gl.SliceLayout(0, x.type.layout))
        known = is_pair[:, None] & (number < inputs - group * _GROUP)[None, :]
        load_to_shared(held_rows.index(place), x + group * _GROUP, mask=known)
    async_copy.commit_group()


@gluon.jit
def take_words(held, place):
    """Words of a group, each by the thread that has its weights."""
    return held[0].index(place).load(_layout_of_words(held[0].shape[1] // LINE))


@gluon.jit
def take_scales(held, first, COUNT: gl.constexpr):
    """COUNT parts of scales from the `first` on, [features] each."""
    if COUNT > 1:
        half: gl.constexpr = COUNT // 2
        return take_scales(held, first, half) + take_scales(held, first + half, half)
    else:
        return (held[1].index(first).load(_layout_of_features(held[1].shape[1] // _TILE)),)
