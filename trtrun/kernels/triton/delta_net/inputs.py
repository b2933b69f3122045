"""What the tokens of a forward bring to a gated delta net, and what is remembered of them: the short convolution in
front of the recurrence, and the inputs that later forwards go through again.

A row's tokens are those since the state that is kept of it: some that were fed before, whose inputs are remembered, and
those of the forward. It knows rows by their numbers (`SegmentStates`). It does not know matrices of states.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import begin, launch_next, wait_for_all

SLOT, KEPT, FIRST, END = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SETTLED, SAVED_AT, SNAPSHOT, PLACE = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
LEADER, OWN_FIRST, OWN_END = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
"""Lines of `SegmentStates.numbers`."""

TOKENS, FEW_TOKENS, CHANNELS = 8, 2, 128
"""That a program of `convolve_kernel` takes together, where rows bring one token, and one of `remember_kernel`. Many
rows are bound by instructions, which tokens that are not there take, too."""


@triton.jit
def _turn(position, capacity):
    """Where the input of a token is remembered: a remainder of 32 bits, as one of 64 takes a hundred instructions."""
    return position.to(tl.int32) % capacity


@triton.jit
def _input_at(
    made, ring, window, position, channel, mask, slot, kept, first, place, capacity, stride, channels,
    KERNEL: tl.constexpr,
):  # fmt: skip
    """What tokens at positions brought to channels, which are of one shape, in float32: it lies among the forward's
    tokens, is remembered since the state that is kept, or stands in that state's window."""
    fed = tl.load(made + (place + position) * stride + channel, mask=mask & (position >= first), other=0.0)
    remembered = mask & (position < first) & (position >= kept)
    turn = slot * capacity + _turn(tl.maximum(position, 0), capacity)
    before = tl.load(ring + turn * channels + channel, mask=remembered, other=0.0)
    seen = slot * (KERNEL - 1) + position - kept + (KERNEL - 1)
    long_before = tl.load(window + seen * channels + channel, mask=mask & (position < kept), other=0.0)
    return fed.to(tl.float32) + before + long_before


@triton.jit
def _window_at(
    made, ring, window, position, channel, mask, slot, kept, first, place, capacity, stride, channels,
    KERNEL: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """What the tokens that the convolution sees from a position brought to channels, [TAPS, channels]: of KERNEL - 1
    tokens."""
    tap = tl.arange(0, TAPS)
    at = (position - (KERNEL - 1) + tap)[:, None]
    return _input_at(
        made, ring, window, at, channel[None, :], mask[None, :] & (tap < KERNEL - 1)[:, None], slot, kept, first, place,
        capacity, stride, channels, KERNEL,
    )  # fmt: skip


@triton.jit
def _store_window(
    windows, number, numbers, channel, mask, channels, KERNEL: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    tap = tl.arange(0, TAPS)
    place = (number * (KERNEL - 1) + tap)[:, None] * channels + channel[None, :]
    tl.store(windows + place, numbers, mask=mask[None, :] & (tap < KERNEL - 1)[:, None])


@triton.jit
def _move_windows(
    made, ring, window, window_snapshots, numbers, rows, row, channel, mask, slot, kept, first, end, place, capacity,
    stride, channels, KERNEL: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Put what the convolution sees from the state that is kept on, and from a snapshot that is taken, into their
    windows, for channels of a row that this program alone reads and writes."""
    settled, saved_at = tl.load(numbers + SETTLED * rows + row), tl.load(numbers + SAVED_AT * rows + row)
    saves = (saved_at >= kept) & (saved_at <= end)
    new = _window_at(
        made, ring, window, settled, channel, mask, slot, kept, first, place, capacity, stride, channels, KERNEL, TAPS
    )
    saved = _window_at(
        made, ring, window, tl.where(saves, saved_at, settled), channel, mask, slot, kept, first, place, capacity,
        stride, channels, KERNEL, TAPS,
    )  # fmt: skip
    tl.debug_barrier()  # all has been read that is overwritten
    _store_window(window, slot, new, channel, mask, channels, KERNEL, TAPS)
    if saves:
        snapshot = tl.load(numbers + SNAPSHOT * rows + row)
        _store_window(window_snapshots, snapshot, saved, channel, mask, channels, KERNEL, TAPS)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to all digits where that is small, too."""
    small = tl.exp(-tl.abs(x))
    series = small * (1 - small * (0.5 - small * 0.33333334))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-3, series, tl.log(1 + small))


@triton.jit(do_not_specialize=["rows", "tokens", "capacity"], do_not_specialize_on_alignment=["numbers"])
def convolve_kernel(
    made, rates, ring, ring_corrects, ring_kept, window, window_snapshots, weights, fading, fading_bias, numbers,
    query_key, value, factors, rows, tokens, capacity, stride, rates_stride, scale, epsilon,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SIZE: tl.constexpr,
    KERNEL: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, REMEMBERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Make queries, keys and values of one head for TOKENS tokens of a row, in the order in which they go through its
    state; and with values, what the head keeps as each comes, and how much it corrects. Where rows have few tokens, a
    program makes all of a row, and REMEMBERS what its channels need, as `remember_kernel` does.

    A token's numbers lie in one warp whatever the number of tokens, so that sums have one order.
    """
    wait_for_all(EARLY)  # first: the next kernel reads states, and where they are
    launch_next(EARLY)
    row, unit = tl.program_id(2).to(tl.int64), tl.program_id(1)
    slot, kept = tl.load(numbers + SLOT * rows + row), tl.load(numbers + KEPT * rows + row)
    first, end = tl.load(numbers + FIRST * rows + row), tl.load(numbers + OWN_END * rows + row)
    place, leader = tl.load(numbers + PLACE * rows + row), tl.load(numbers + LEADER * rows + row)
    # The first row of a run has what was fed before, too; what others have stands behind it.
    begins = tl.where(leader == row, kept, tl.load(numbers + OWN_FIRST * rows + row))
    number = tl.arange(0, SIZE)
    is_value = unit >= 2 * KEYS
    size = tl.where(is_value, VALUE_DIM, KEY_DIM)
    start = tl.where(is_value, 2 * KEYS * KEY_DIM + (unit - 2 * KEYS) * VALUE_DIM, unit * KEY_DIM)
    channels = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    channel = start + number
    part = begins + tl.program_id(0) * TOKENS
    last = end if REMEMBERS else part + 1
    for from_token in range(part, last, TOKENS):
        position = from_token + tl.arange(0, TOKENS)
        lives = position < end
        inside = lives[:, None] & (number < size)[None, :]
        mixed = tl.zeros((TOKENS, SIZE), tl.float32)
        # All that the convolution sees is among the forward's tokens: so it is with most of a prompt.
        are_fed = not REMEMBERS and from_token - (KERNEL - 1) >= first
        for tap in tl.static_range(KERNEL):
            at = (position - (KERNEL - 1) + tap)[:, None]
            if are_fed:
                brought = tl.load(made + (place + at) * stride + channel[None, :], mask=inside, other=0.0).to(
                    tl.float32
                )
            else:
                brought = _input_at(
                    made, ring, window, at, channel[None, :], inside, slot, kept, first, place, capacity, stride,
                    channels, KERNEL,
                )  # fmt: skip
            weight = tl.load(weights + tap * channels + channel, mask=number < size, other=0.0)
            mixed += weight[None, :] * brought
        # As one by one: rounded behind the convolution, and behind what it goes through.
        mixed = mixed.to(made.dtype.element_ty).to(tl.float32)
        mixed = (mixed / (1 + tl.exp(-mixed))).to(made.dtype.element_ty).to(tl.float32)
        line = leader * tokens + position - kept
        if is_value:
            head = unit - 2 * KEYS
            where = (line * VALUES + head)[:, None] * VALUE_DIM + number[None, :]
            tl.store(value + where, mixed.to(value.dtype.element_ty), mask=inside)
            is_fed = lives & (position >= first)
            given = rates + (place + position) * rates_stride + head
            corrects = tl.load(given, mask=is_fed, other=0.0).to(tl.float32)
            fades = tl.load(given + VALUES, mask=is_fed, other=0.0).to(tl.float32)
            corrects = 1 / (1 + tl.exp(-corrects))
            keeps = tl.exp(-tl.load(fading + head) * _softplus(fades + tl.load(fading_bias + head)))
            remembered = (slot * capacity + _turn(position, capacity)) * VALUES + head
            is_old = lives & (position < first)
            corrects = tl.where(is_fed, corrects, tl.load(ring_corrects + remembered, mask=is_old, other=0.0))
            keeps = tl.where(is_fed, keeps, tl.load(ring_kept + remembered, mask=is_old, other=0.0))
            both = factors + (line * VALUES + head) * 2
            tl.store(both, keeps, mask=lives)
            tl.store(both + 1, corrects, mask=lives)
            if REMEMBERS:
                tl.debug_barrier()  # old tokens stand in front of new ones, so that none is read behind here
                is_kept = is_fed & (position >= end - capacity)
                tl.store(ring_kept + remembered, keeps, mask=is_kept)
                tl.store(ring_corrects + remembered, corrects, mask=is_kept)
        else:
            length = tl.sqrt(tl.sum(mixed * mixed, axis=1) + epsilon)
            mixed = mixed / length[:, None]
            mixed = tl.where(unit < KEYS, mixed * scale, mixed)
            where = (line * (2 * KEYS) + unit)[:, None] * KEY_DIM + number[None, :]
            tl.store(query_key + where, mixed, mask=inside)
    if REMEMBERS:
        _move_windows(
            made, ring, window, window_snapshots, numbers, rows, row, channel, number < size, slot, kept, first, end,
            place, capacity, stride, channels, KERNEL, TAPS,
        )  # fmt: skip
        for from_token in range(tl.maximum(tl.maximum(begins, first), end - capacity), end, TOKENS):
            position = from_token + tl.arange(0, TOKENS)
            inside = (position < end)[:, None] & (number < size)[None, :]
            at = (place + position)[:, None] * stride + channel[None, :]
            turn = (slot * capacity + _turn(position, capacity))[:, None] * channels
            tl.store(
                ring + turn + channel[None, :], tl.load(made + at, mask=inside, other=0.0).to(tl.float32), mask=inside
            )


@triton.jit(do_not_specialize=["rows", "tokens", "capacity"], do_not_specialize_on_alignment=["numbers"])
def remember_kernel(
    made, ring, ring_corrects, ring_kept, window, window_snapshots, factors, numbers, rows, tokens, capacity, stride,
    VALUES: tl.constexpr, SIZE: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Keep what a row's newest tokens brought to BLOCK channels, and what the convolution sees from the state that is
    kept on; with the first channels what heads keep and correct, too. One program reads and writes a channel of a
    row."""
    begin(EARLY)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, kept = tl.load(numbers + SLOT * rows + row), tl.load(numbers + KEPT * rows + row)
    first, end = tl.load(numbers + FIRST * rows + row), tl.load(numbers + END * rows + row)
    place = tl.load(numbers + PLACE * rows + row)
    if tl.load(numbers + LEADER * rows + row) != row:
        return
    channel = part * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    _move_windows(
        made, ring, window, window_snapshots, numbers, rows, row, channel, inside, slot, kept, first, end, place,
        capacity, stride, SIZE, KERNEL, TAPS,
    )  # fmt: skip
    newest = tl.maximum(first, end - capacity)
    for position in range(newest, end):
        brought = tl.load(made + (place + position) * stride + channel, mask=inside, other=0.0)
        turn = slot * capacity + position % capacity
        tl.store(ring + turn * SIZE + channel, brought.to(tl.float32), mask=inside)
        is_head = channel < VALUES
        both = factors + ((row * tokens + position - kept) * VALUES + channel) * 2
        tl.store(ring_kept + turn * VALUES + channel, tl.load(both, mask=is_head, other=0.0), mask=is_head)
        tl.store(ring_corrects + turn * VALUES + channel, tl.load(both + 1, mask=is_head, other=0.0), mask=is_head)
