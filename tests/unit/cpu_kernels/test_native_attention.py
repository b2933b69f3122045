"""Paged attention on the CPU, in bfloat16 and float32: right, bit-equal in any company, writing new tokens alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from native import each_processor, leave_to_torch
from paged import straight

from trtrun.attention.backend import HostAttention
from trtrun.kernels.arguments import AttentionCall
from trtrun.kernels.cpu.attention import NativeAttention, whole_head
from trtrun.kernels.cpu.emitter import LANES, Emitter
from trtrun.kernels.cpu.machine import compile_kernels
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import like_layers
from trtrun.kvcache.store import KVStore

pytestmark = [each_processor, pytest.mark.usefixtures("each_number_of_threads", "processor")]

ROWS, LENGTH = 3, 90
# (head_dim, heads, kv_heads, block_size)
SHAPES = [(64, 8, 4, 16), (128, 7, 1, 32), (80, 3, 3, 48), (16, 16, 2, 16), (96, 5, 5, 16), (192, 2, 1, 16)]
CASES = [*((shape, torch.bfloat16) for shape in SHAPES), *((shape, torch.float32) for shape in SHAPES[1:4])]


@dataclass
class Case:
    """Rows of random queries, keys and values, and a store of their own to run them through."""

    head_dim: int
    heads: int
    kv_heads: int
    block_size: int
    window: int | None = None
    spare_blocks: int = 0
    dtype: torch.dtype = torch.bfloat16
    soft_cap: float | None = None
    has_sinks: bool = False
    store: KVStore = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.head_dim)
        blocks = -(-LENGTH // self.block_size)
        self.tables = torch.randperm(ROWS * blocks, generator=generator).view(ROWS, blocks) + 1
        self.tables = torch.nn.functional.pad(self.tables, (0, self.spare_blocks))
        self.store = KVStore(
            like_layers(1, self.kv_heads, self.head_dim),
            ROWS * blocks + 1,
            self.block_size,
            self.dtype,
            torch.device("cpu"),
        )
        self.query, self.key, self.value = (
            torch.randn(ROWS, LENGTH, heads, self.head_dim, generator=generator).to(self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        self.attention = NativeAttention(self.head_dim, self.dtype)
        self.scale = self.head_dim**-0.5
        self.sinks = torch.randn(self.heads, generator=generator) * 3 if self.has_sinks else None

    def run(self, *segments: tuple[list[int], torch.Tensor]) -> list[torch.Tensor]:
        """One forward of segments (rows, positions [rows, queries]); outputs [rows, queries, heads, head] each."""
        parts: list[AttentionSegment] = []
        picks = []
        for rows, positions in segments:
            start = parts[-1].stop if parts else 0
            parts.append(AttentionSegment(start, len(rows), positions.shape[1], self.tables[rows], positions))
            picks.append((torch.tensor(rows).unsqueeze(1), positions.clamp(min=0)))
        query, key, value = (
            torch.cat([tensor[pick].flatten(0, 1) for pick in picks]) for tensor in (self.query, self.key, self.value)
        )
        # As the model has them: side by side, so that a token's heads lie apart from the next token's.
        fused = torch.cat((query, key, value), dim=1)
        query_key, value = fused.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        batch, angles = AttentionBatch(parts, self.block_size), straight(value)
        found = self.attention.forward(
            AttentionCall(
                query_key,
                value,
                angles,
                self.store.layer(0),
                batch,
                self.scale,
                self.window,
                soft_cap=self.soft_cap,
                sinks=self.sinks,
            )
        )
        return [
            found[part.start : part.stop].view(part.rows, part.queries, self.heads, self.head_dim) for part in parts
        ]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [rows, length, heads, head] in float64, and the same of the values' sizes."""
        group = self.heads // self.kv_heads
        key = self.key.double().repeat_interleave(group, dim=2)
        value = self.value.double().repeat_interleave(group, dim=2)
        scores = torch.einsum("rqhd,rkhd->rhqk", self.query.double(), key) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        at = torch.arange(LENGTH)
        hidden = at > at.unsqueeze(1)
        if self.window is not None:
            hidden |= at <= at.unsqueeze(1) - self.window
        scores = scores.masked_fill(hidden, float("-inf"))
        sinks = torch.full((self.heads,), float("-inf")) if self.sinks is None else self.sinks
        with_sinks = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
        weights = with_sinks.softmax(-1)[..., :-1]
        return torch.einsum("rhqk,rkhd->rqhd", weights, value), torch.einsum("rhqk,rkhd->rqhd", weights, value.abs())


def span(start: int, stop: int, rows: int = 1) -> torch.Tensor:
    """Positions [rows, stop - start]."""
    return torch.arange(start, stop).expand(rows, -1)


@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"),
    [(None, None, False), (7, None, False), (40, None, False), (None, 0.7, False), (7, None, True)],
)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_outputs_are_right(
    shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None, soft_cap: float | None, has_sinks: bool
) -> None:
    case = Case(*shape, window=window, dtype=dtype, soft_cap=soft_cap, has_sinks=has_sinks)
    exact, sizes = case.exact()
    found = case.run(*(([row], span(0, 70)) for row in range(ROWS)))
    found.append(case.run((list(range(ROWS)), span(70, LENGTH, ROWS)))[0])
    outputs = torch.cat((torch.cat(found[:ROWS]), found[ROWS]), dim=1)
    # Weights are rounded to bfloat16 before they meet the values, and so is the output: 2**-9 each.
    most = 2**-8 if dtype is torch.bfloat16 else 2**-19
    assert bool(((outputs.double() - exact).abs() <= sizes * most + exact.abs() * most).all())


@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"),
    [(None, None, False), (7, None, False), (7, 0.7, False), (None, None, True)],
)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_a_query_does_not_depend_on_its_company(
    shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None, soft_cap: float | None, has_sinks: bool
) -> None:
    single, chunked = (
        Case(*shape, window=window, spare_blocks=spare, dtype=dtype, soft_cap=soft_cap, has_sinks=has_sinks)
        for spare in (0, 3)
    )
    alone = torch.cat([single.run(([0], span(at, at + 1)))[0] for at in range(LENGTH)], dim=1)
    sizes = [1, 2, 5, 13, 40, 6, 23]
    assert sum(sizes) == LENGTH
    found, at = [], 0
    for size in sizes:
        others = [([1, 2], span(at, at + size, 2))]
        first, _ = chunked.run(([0], span(at, at + size)), *others)
        found.append(first)
        at += size
    assert torch.equal(torch.cat(found, dim=1), alone)


@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (7, False), (7, True)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (10, 5)])
def test_gathered_contexts_have_the_bits_of_those_in_place(
    head_dim: int, block_size: int, window: int | None, has_sinks: bool
) -> None:
    """In float32, of any head and block, and a query alone and in company too."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, LENGTH, 4, head_dim, generator=generator)
    context = torch.randn(2, 2, 2, -(-LENGTH // block_size) * block_size, head_dim, generator=generator)
    attention = NativeAttention(whole_head(head_dim), torch.float32)
    case = Case(whole_head(head_dim), 4, 2, block_size, window, dtype=torch.float32, has_sinks=has_sinks)
    batch, nothing = AttentionBatch([], block_size), torch.empty(0)
    call = AttentionCall(nothing, nothing, (nothing, nothing), nothing, batch, 0.3, window, sinks=case.sinks)

    def attend(start: int, stop: int, tokens: int = context.shape[3]) -> torch.Tensor:
        positions, of_rows = span(start, stop, 2), query[:, start:stop]
        return attention.attend_gathered(of_rows, context[:, :, :, :tokens], positions, call)

    whole = attend(0, LENGTH)
    for at in (0, 1, 16, 37, LENGTH - 1):
        assert torch.equal(attend(at, at + 1)[:, 0], whole[:, at])
        assert torch.equal(attend(at, at + 1, at + 1)[:, 0], whole[:, at]), "fewer tokens that nobody sees"
    if head_dim % LANES:
        return
    case.scale, case.query[:2] = 0.3, query
    case.key[:2], case.value[:2] = (part[:, :, :LENGTH].transpose(1, 2) for part in context)
    assert torch.equal(case.run(([0, 1], span(0, LENGTH, 2)))[0], whole)


def test_rows_at_different_places_and_padding() -> None:
    """Rows under verification: fewer drafts than others, and a row that takes no part."""
    shape = SHAPES[0]
    expected = torch.cat([Case(*shape).run(([row], span(0, LENGTH)))[0] for row in range(ROWS)])
    case = Case(*shape)
    case.run(([0], span(0, 33)), ([1], span(0, 80)))
    positions = torch.tensor([[33, 34, 35, 36], [80, 81, -1, -1], [-1, -1, -1, -1]])
    (found,) = case.run(([0, 1, 2], positions))
    assert torch.equal(found[0], expected[0, 33:37])
    assert torch.equal(found[1, :2], expected[1, 80:82])
    assert bool(found.isfinite().all())


def test_numbers_are_rounded_as_torch_does_where_processors_have_no_instruction_for_it() -> None:
    """Ties to even, what is too large, and what is no number."""
    code = Emitter("rounding", multiplies_bfloat16=False)
    builder, (pointer,) = code.define("rounding", code.pointer)
    builder.store(code.round(builder, builder.load(pointer, typ=code.floats, align=4)), pointer, align=2)
    builder.ret_void()
    kernel = compile_kernels(code.module, "rounding")["rounding"]
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096, LANES), generator=generator).to(torch.int32)
    bits[::2] = bits[::2] & ~0xFFFF | 0x8000  # half way between two
    numbers = bits.view(torch.float32)
    numbers[-1, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38])
    expected = numbers.bfloat16()
    for line, wanted in zip(numbers.clone(), expected, strict=True):
        kernel(line.data_ptr(), 1)
        found = line.view(torch.bfloat16)[:LANES]
        assert torch.equal(found.nan_to_num(nan=1.5), wanted.nan_to_num(nan=1.5))
        assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_a_copied_token_is_that_token_and_no_other(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """The first tokens of row 0's first block go to row 1's, which then is as if row 1 had written them."""
    copied, written, count = Case(*shape, dtype=dtype), Case(*shape, dtype=dtype), 11
    copied.run(*(([row], span(0, LENGTH)) for row in range(ROWS)))
    source, target = (copied.tables[row, :1].expand(count) for row in range(2))
    ((data,),) = copied.store.parts()
    copied.attention.copy_tokens(data, source, target, torch.randperm(count))
    for tensor in (written.key, written.value):
        tensor[1, :count] = tensor[0, :count]
    written.run(*(([row], span(0, LENGTH)) for row in range(ROWS)))
    assert torch.equal(copied.store.layer(0), written.store.layer(0))


def test_nothing_is_written_but_new_tokens() -> None:
    case = Case(*SHAPES[0])
    untouched = 1000.0
    case.store.layer(0).fill_(untouched)
    case.run(([1, 2], torch.tensor([[-1, 20, 21], [5, -1, -1]])))
    changed = case.store.layer(0) != untouched
    assert int(changed.sum()) == 3 * 2 * case.kv_heads * case.head_dim
    blocks = changed.flatten(2).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    assert sorted(blocks) == sorted([int(case.tables[1, 1]), int(case.tables[2, 0])])


def test_large_scores_stay_numbers() -> None:
    """Scores far apart and far from zero: the weights of all but the highest vanish, and nothing overflows."""
    case = Case(*SHAPES[0])
    case.query, case.key = case.query * 300, case.key * 300
    exact, sizes = case.exact()
    (found,) = case.run(([0], span(0, LENGTH)))
    assert bool(((found[0].double() - exact[0]).abs() <= sizes[0] * 2**-8 + exact[0].abs() * 2**-8).all())


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "own"),
    [
        (torch.bfloat16, 64, 16, True),
        (torch.bfloat16, 64, 8, False),
        (torch.bfloat16, 40, 16, False),
        (torch.float32, 64, 16, True),
        (torch.float32, 64, 8, False),
        (torch.float32, 10, 5, False),
        (torch.float16, 64, 16, False),
    ],
)
def test_every_store_meets_one_kernel(dtype: torch.dtype, head_dim: int, block_size: int, own: bool) -> None:
    """What the kernel does not take is gathered, and all give the same attention."""
    generator = torch.Generator().manual_seed(0)
    query_key, value = torch.randn(20, 6, head_dim, generator=generator).to(dtype).split((4, 2), dim=1)
    tables = torch.arange(1, 1 + -(-20 // block_size)).unsqueeze(0)
    stores = [KVStore(like_layers(1, 2, head_dim), 5, block_size, dtype, torch.device("cpu")) for _ in range(2)]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for store in stores:
            batch = AttentionBatch([AttentionSegment(0, 1, 20, tables, span(0, 20))], block_size)
            attention = HostAttention(dtype, head_dim)
            found.append(
                attention.forward(
                    AttentionCall(query_key, value, straight(value), store.layer(0), batch, 0.2, None)
                ).float()
            )
            leave_to_torch(patch)
    assert torch.allclose(*found, rtol=2**-6, atol=2**-6)
    assert (
        torch.equal(stores[0].layer(0), stores[1].layer(0)) is not own
    )  # the kernel lays its tiles out in its own way
