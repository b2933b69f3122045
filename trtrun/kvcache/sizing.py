"""How many KV blocks a run gets, and places of blocks in layers with windows: one pure rule, used by the engines at
start and by `trtrun plan` without weights.

It knows bytes, blocks, places and tokens. It does not know models (the callers say how many bytes a shard, a block and
a place take) or ranks (the caller takes the smallest answer over all of them, so that one block table fits every
engine).
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from trtrun.errors import ConfigError

GPU_FRACTION = 0.9
HOST_FRACTION = 0.5
"""Shares of free memory that KV takes where the configuration names none. The host's is lower: it is not ours alone."""

NUM_NULL_BLOCKS = 1
"""Block 0 of every store: padding is written there and no row owns it. Place 0 of layers with windows is its place."""


@dataclass(frozen=True)
class SlotMemory:
    """What the engines of one slot need.

    Attributes:
        shard_bytes: weights of all engines in the slot.
        bytes_per_block: keys and values of one block, summed over the engines in the slot; without those in places.
        working_bytes: what their largest round needs besides: activations, logits, sampling, graphs.
        bytes_per_place: keys and values of one block in layers with windows, where these have places.
        snapshot_bytes: of working_bytes, those of snapshots of states.
    """

    shard_bytes: int
    bytes_per_block: int
    working_bytes: int = 0
    bytes_per_place: int = 0
    snapshot_bytes: int = 0


class StoreSize(NamedTuple):
    """Blocks of every KV store, and places of layers with windows, 0 where these have none; each with the null one."""

    blocks: int
    places: int = 0

    @classmethod
    def smallest(cls, sizes: Iterable[StoreSize]) -> StoreSize:
        """The size that all of the slots have room for that have these by themselves."""
        blocks, places = zip(*sizes, strict=True)
        return cls(min(blocks), min(places))

    def num_bytes(self, demand: SlotMemory) -> int:
        """Bytes of such stores in a slot."""
        return self.blocks * demand.bytes_per_block + self.places * demand.bytes_per_place


class PlaceDemand(NamedTuple):
    """How many rows need places in layers with windows, how many places one of them needs at most, and how many there
    are for each of the others (see WindowRule)."""

    max_rows: int
    blocks_per_row: int
    blocks_beside: int

    @property
    def least(self) -> StoreSize:
        """Places of one row."""
        return StoreSize(0, self.blocks_per_row + NUM_NULL_BLOCKS)

    @property
    def most(self) -> StoreSize:
        """Places of all rows."""
        return StoreSize(0, self.blocks_per_row + (self.max_rows - 1) * self.blocks_beside + NUM_NULL_BLOCKS)


def useful_blocks(max_batch_size: int, max_seq_len: int, block_size: int, draft_len: int, plans_ahead: int) -> int:
    """Blocks that the rows can fill at most: more would never be used by running requests.

    A row may reach over its last token by one round's draft and bonus, and by another for a plan sent ahead.
    """
    tokens = max_seq_len + (draft_len + 1) * (1 + plans_ahead)
    return max_batch_size * _ceil_divide(tokens, block_size)


def count_kv_blocks(
    free_bytes: int,
    demand: SlotMemory,
    *,
    fraction: float,
    block_size: int,
    max_tokens: int | None,
    most_useful: int,
    where: str,
    places: PlaceDemand | None = None,
) -> StoreSize:
    """Size of the stores of one slot.

    With `max_tokens` there are the blocks that hold them, else blocks and places share the fraction of what is free
    beside the weights and the memory of a round. Never more than `most_useful` blocks (and the null block).

    Args:
        free_bytes: free memory of the slot before the weights are loaded.
        demand: bytes of weights, of a round, of a block and of a place.
        fraction: share of (free - weights - working memory) for KV, in (0, 1].
        block_size: tokens a block.
        max_tokens: tokens to hold, or None.
        most_useful: see `useful_blocks`.
        where: names the slot in messages, such as "target rank 1 (cpu:0)".
        places: that rows need; None where no layer has places.

    Raises:
        ConfigError: the weights, a round, the tokens asked for, a single block, or the places of one row do not fit,
            with the numbers.
    """
    beside = free_bytes - demand.shard_bytes
    if beside <= 0:
        raise ConfigError(
            f"{where}: the weights need {format_bytes(demand.shard_bytes)} but {format_bytes(free_bytes)} of memory "
            "are free: use more devices or a smaller dtype"
        )
    left = beside - demand.working_bytes
    if left <= 0:
        snapshots, instead = "", ""
        if demand.snapshot_bytes:
            snapshots = f" ({format_bytes(demand.snapshot_bytes)} for snapshots of states)"
            instead = "kv_cache.state_snapshots, "
        raise ConfigError(
            f"{where}: the largest round needs {format_bytes(demand.working_bytes)}{snapshots} but "
            f"{format_bytes(beside)} of {format_bytes(free_bytes)} are free beside the weights "
            f"({format_bytes(demand.shard_bytes)}): lower {instead}scheduler.max_batch_size, scheduler.max_seq_len, "
            "scheduler.max_num_tokens or speculation.draft_len"
        )
    weights, rounds = format_bytes(demand.shard_bytes), format_bytes(demand.working_bytes)
    taken = f"the weights ({weights}) and the largest round ({rounds})" if demand.working_bytes else "the weights"
    most = most_useful + NUM_NULL_BLOCKS
    of_row = ""
    if places is not None and demand.bytes_per_place:
        of_row = f"the window of one row ({format_bytes(places.least.num_bytes(demand))}) and "
    if max_tokens is not None:
        wanted = min(blocks_of_tokens(max_tokens, block_size), most)
        size = _with_blocks(wanted, left, demand, places)
        if size is not None:
            return size
        for_blocks = left - (0 if places is None else places.least.num_bytes(demand))
        fitting = max(0, for_blocks // max(1, demand.bytes_per_block) - NUM_NULL_BLOCKS) * block_size
        used = most_useful * block_size
        limit = f" (of which {used} can be in use at a time)" if used < max_tokens else ""
        needed = format_bytes(wanted * demand.bytes_per_block)
        raise ConfigError(
            f"{where}: kv_cache.max_tokens {max_tokens}{limit} needs {needed} but {format_bytes(left)} are free "
            f"beside {of_row}{taken}: at most {fitting} tokens fit"
        )
    size = _share_out(int(left * fraction), demand, most, places)
    if size.blocks <= NUM_NULL_BLOCKS or (places is not None and size.places < places.least.places):
        raise ConfigError(
            f"{where}: kv_cache.free_memory_fraction {fraction:g} of the {format_bytes(left)} beside {taken} does not "
            f"hold {of_row}a block of {block_size} tokens "
            f"({format_bytes(demand.bytes_per_block)} each): raise the fraction"
        )
    return size


def _with_blocks(blocks: int, budget: int, demand: SlotMemory, places: PlaceDemand | None) -> StoreSize | None:
    """So many blocks, and places for all rows or as many as fit beside; None where one row's do not."""
    left = budget - blocks * demand.bytes_per_block
    if places is None:
        return StoreSize(blocks) if left >= 0 else None
    if left < places.least.num_bytes(demand):
        return None
    held = min(blocks, places.most.places)
    return StoreSize(blocks, min(held, left // demand.bytes_per_place) if demand.bytes_per_place else held)


def _share_out(budget: int, demand: SlotMemory, most: int, places: PlaceDemand | None) -> StoreSize:
    """Blocks, `most` at most, and places in `budget` bytes. Places get what all rows need, but at most half of it, and
    what one row needs at least; blocks the rest; and places what blocks have no use for, as old places may be reused:
    no more of them than blocks, or than one row needs."""
    of_block, of_place = demand.bytes_per_block, demand.bytes_per_place
    if places is None or not of_place:
        blocks = min(most, budget // of_block) if of_block else most
        return StoreSize(blocks, 0 if places is None else max(blocks, places.least.places))
    held = min(places.most.places, max(places.least.places, budget // 2 // of_place))
    blocks = min(most, max(0, budget - held * of_place) // of_block) if of_block else most
    return StoreSize(blocks, min(max(blocks, places.least.places), max(0, budget - blocks * of_block) // of_place))


def tokens_of_blocks(num_blocks: int, block_size: int) -> int:
    """Tokens that rows can keep in a store of `num_blocks` blocks, the null block included."""
    return (num_blocks - NUM_NULL_BLOCKS) * block_size


def blocks_of_tokens(num_tokens: int, block_size: int) -> int:
    """Leading blocks of a store that hold `num_tokens` tokens, the null block included."""
    return _ceil_divide(num_tokens, block_size) + NUM_NULL_BLOCKS


def default_fraction(device: str) -> float:
    """Share of free memory for KV where the configuration names none."""
    return GPU_FRACTION if device.startswith("cuda") else HOST_FRACTION


def check_device(device: str) -> None:
    """Raise ConfigError for a GPU that is not on this host; "cuda:N" or "cpu:N"."""
    if not device.startswith("cuda"):
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2]) >= count:
        raise ConfigError(f'{device} is not on this host, which has {count} GPUs: use CPU slots such as "cpu:0"')


def free_bytes_of_slot(device: str, host_slots: int) -> int:
    """Memory that one slot may count on: a GPU's free memory, or an equal share of the host's.

    Args:
        device: "cuda:N" or "cpu:N".
        host_slots: CPU slots on this host, which share its memory.

    Raises:
        ConfigError: the GPU is not there.
    """
    if device.startswith("cuda"):
        check_device(device)
        free, _ = torch.cuda.mem_get_info(int(device.partition(":")[2]))
        return int(free)
    share, left = free_host_bytes() // max(1, host_slots), _address_space_left()
    return share if left is None else min(share, left)


def free_host_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes that this host can still give: MemAvailable, and what the cgroup's limit leaves where it has one."""
    values = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in meminfo.read_text(encoding="ascii").splitlines())
        if rest.split()
    }
    free = values.get("MemAvailable", values.get("MemFree", 0))
    left = _cgroup_bytes_left(cgroup, membership)
    return free if left is None else min(free, left)


def format_bytes(count: int) -> str:
    """A byte count for people: 3 significant digits with a binary unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.{3 if size < 999.5 else 4}g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _address_space_left() -> int | None:
    """What `ulimit -v` leaves this process, None without such a limit: the store is one mapping, and would fail."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return max(0, limit - pages * resource.getpagesize())


def _cgroup_bytes_left(root: Path, membership: Path) -> int | None:
    """What the memory limits of this process's cgroup and of those above it leave, page cache counted as free.

    Args:
        root: where the cgroup file systems are mounted.
        membership: the process's list of cgroups, lines of `number:controllers:path`.

    Returns:
        Bytes, or None without a limit.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    lines += ["0::/", "0:memory:/"]  # in a container the path is the host's, but the mount shows the own limit on top
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version_2 = controllers == ""
        if not version_2 and "memory" not in controllers.split(","):
            continue
        top = root if version_2 else root / "memory"
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            found.append(_bytes_left_in(place, version_2))
            if place == top:
                break
    limits = [left for left in found if left is not None]
    return min(limits) if limits else None


def _bytes_left_in(folder: Path, version_2: bool) -> int | None:
    """What the limit of one cgroup leaves; None where it has none."""
    names = ("memory.max", "memory.current") if version_2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, usage = (int((folder / name).read_text(encoding="ascii")) for name in names)
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # not there, or "max": no limit
        return None
    cache_name = "inactive_file" if version_2 else "total_inactive_file"
    cache = next((int(line.split()[1]) for line in statistics if line.split()[:1] == [cache_name]), 0)
    return max(0, limit - usage + cache)


def _ceil_divide(count: int, size: int) -> int:
    return -(-count // size)
