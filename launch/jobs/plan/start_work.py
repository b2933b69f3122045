"""In words, what of a start's work follows from files and from this host's caches, and what would make it less.

It does not know seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from launch.jobs.placement.memory import JobMemory
from launch.jobs.plan.start_ranks import Disk, Kernels, ModelFiles, RankStart, RankStarts
from trtrun.kernels.cpu.machine import processor_kind
from trtrun.kernels.cpu.object_cache import cache_folder
from trtrun.kvcache.sizing import format_bytes

_FEWER_ROWS = 4
"""Rows to suggest, of those that there are: a quarter."""

_FEWEST_ROWS = 8
_WORTH_SAYING = 0.9
"""Graphs that are left, of those that there are, at most."""

_SHORT_CONTEXT = 16000
"""Contexts that are longer by some hundred tokens have graphs of one more width (engine/graphs/graph_shapes.py)."""


def describe_weights(
    memory: JobMemory, files: Mapping[str, ModelFiles], ranks: Collection[RankStart], here: Collection[str]
) -> str:
    """What each rank reads, from where."""
    made_up = all(of_role.is_made_up for of_role in files.values())
    told = [_describe_ranks(ranks, "makes up" if made_up else "reads")]
    for role, of_role in files.items():
        if made_up or of_role.is_made_up:
            continue
        if not of_role.are_here:
            told.append(f"the {role}'s files are not here: bytes by its config.json")
            continue
        told.append(f"the {role}'s files have {format_bytes(of_role.file_bytes)}, {_in_page_cache(of_role)}")
    told += _describe_disks(memory, files, here)
    return "; ".join(told)


def _describe_ranks(ranks: Collection[RankStart], does: str) -> str:
    by_size: dict[int, list[str]] = {}
    for rank in ranks:
        by_size.setdefault(rank.read_bytes, []).append(str(rank.rank))
    return ", ".join(
        f"rank {numbers[0]} {does} {format_bytes(size)}"
        if len(numbers) == 1
        else f"ranks {', '.join(numbers)} {does.replace('reads', 'read').replace('makes', 'make')} "
        f"{format_bytes(size)} each"
        for size, numbers in by_size.items()
    )


def _in_page_cache(of_role: ModelFiles) -> str:
    if of_role.cached_bytes is None:
        return "the system does not say how much of them in the page cache"
    if of_role.cached_bytes == of_role.file_bytes:
        return "all of them in this host's page cache"
    return f"{format_bytes(of_role.cached_bytes) if of_role.cached_bytes else 'none'} of them in this host's page cache"


def _describe_disks(memory: JobMemory, files: Mapping[str, ModelFiles], here: Collection[str]) -> Iterator[str]:
    """File systems, and how many ranks of this host read from each."""
    readers: dict[Disk, set[int]] = {}
    for slot in memory.topology.slots:
        for role, index in (("draft", slot.draft_index), ("target", slot.target_index)):
            disk = files[role].disk if role in files and index is not None else None
            if disk is not None and slot.host in here:
                readers.setdefault(disk, set()).add(slot.rank)
    for disk, ranks in readers.items():
        who = "1 rank reads" if len(ranks) == 1 else f"{len(ranks)} ranks read"
        yield f"{who} from {disk.type} at {disk.mounted_at}"


def describe_cpu_kernels(*, has_own: bool) -> str:
    """Whether kernels for this processor are compiled, where there are some for the models' dtypes."""
    if not has_own or processor_kind() is None:
        return "torch's run: nothing is compiled"
    folder = cache_folder()
    if folder is None:
        return "compiled by each process, as no folder keeps them"
    count = len(list(folder.glob("*.o"))) if folder.is_dir() else 0
    return f"each is compiled at its first use unless {folder} has it, which holds {count or 'none'}"


def shorten_start(
    memory: JobMemory,
    starts: RankStarts,
    files: Mapping[str, ModelFiles],
    kernels: Kernels,
    *,
    measures_rounds: bool,
) -> Iterator[str]:
    """What would make the start shorter, a line each."""
    config = memory.config
    if kernels == "missing":
        yield "trtrun warm-up, with the same --config and --set, compiles the kernels beforehand; it needs no weights"
    if kernels == "unknown":
        yield "trtrun warm-up on the GPUs' hosts, with the same --config and --set, compiles what their caches lack"
    for role, of_role in files.items():
        if of_role.disk is not None and of_role.disk.is_network and of_role.cached_bytes != of_role.file_bytes:
            section = config.draft if role == "draft" else config.target
            assert section is not None
            yield f"a copy of {section.model} on a local disk: it is on {of_role.disk.type}"
    yield from _fewer_graphs(memory, starts)
    if measures_rounds:
        yield "speculation.pacing: fixed measures no rounds; draft_len then does not follow from what rounds cost"


def _fewer_graphs(memory: JobMemory, starts: RankStarts) -> Iterator[str]:
    config, count = memory.config, starts.count_graphs()
    most = _WORTH_SAYING * count
    rows, context = config.scheduler.max_batch_size // _FEWER_ROWS, min(memory.context, _SHORT_CONTEXT)
    with_fewer_rows = config.scheduler.model_copy(update={"max_batch_size": rows})
    if rows >= _FEWEST_ROWS:
        fewer = starts.count_graphs(config.model_copy(update={"scheduler": with_fewer_rows}))
        if fewer < most:
            now = config.scheduler.max_batch_size
            yield f"scheduler.max_batch_size: {rows} in place of {now} makes {fewer} graphs of {count}"
    fewer = starts.count_graphs(config, context)
    if fewer < most:
        yield f"scheduler.max_seq_len: {context} in place of {memory.context} makes {fewer} graphs of {count}"
