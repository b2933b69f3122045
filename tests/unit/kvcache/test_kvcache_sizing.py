"""How many KV blocks: one rule for `plan` and for the engines."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtrun.errors import ConfigError
from trtrun.kvcache.sizing import (
    PlaceDemand,
    SlotMemory,
    StoreSize,
    count_kv_blocks,
    format_bytes,
    free_bytes_of_slot,
    free_host_bytes,
    tokens_of_blocks,
    useful_blocks,
)

DEMAND = SlotMemory(shard_bytes=1000, bytes_per_block=10)


def count(free: int, fraction: float = 0.5, max_tokens: int | None = None, most_useful: int = 10**9) -> int:
    return count_kv_blocks(
        free,
        DEMAND,
        fraction=fraction,
        block_size=16,
        max_tokens=max_tokens,
        most_useful=most_useful,
        where="target rank 1 (cpu:0)",
    ).blocks


def test_the_fraction_is_of_what_is_free_beside_the_weights() -> None:
    assert count(1000 + 2000) == 100


def test_no_more_blocks_than_rows_can_use_and_the_null_block() -> None:
    assert count(10**9, most_useful=7) == 8


def test_max_tokens_gives_the_blocks_that_hold_them_and_the_null_block() -> None:
    assert tokens_of_blocks(count(10**6, max_tokens=33), 16) == 48


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"target rank 1 \(cpu:0\): the weights need 1000 B but 1000 B"):
        count(1000)
    with pytest.raises(ConfigError, match=r"max_tokens 160 needs 110 B but 100 B are free .* at most 144 tokens fit"):
        count(1100, max_tokens=160)
    with pytest.raises(ConfigError, match="does not hold a block of 16 tokens"):
        count(1030)


def test_blocks_that_are_asked_for_leave_places_for_all_rows_or_what_fits() -> None:
    """Places of 3 rows of 4 blocks each; those of one row at least. Slots without such layers take any number."""

    def sizes(free: int, per_place: int = 20, tokens: int = 16 * 50) -> StoreSize:
        return count_kv_blocks(
            free,
            replace(DEMAND, bytes_per_place=per_place),
            fraction=0.5,
            block_size=16,
            max_tokens=tokens,
            most_useful=10**9,
            where="rank 0",
            places=PlaceDemand(3, 4, 4),
        )

    assert sizes(10**6) == (51, 13) and sizes(10**6, tokens=16 * 8) == (9, 9)
    assert sizes(1000 + 510 + 20 * 7 + 3) == (51, 7)
    assert sizes(1000 + 510, per_place=0) == (51, 13)
    with pytest.raises(ConfigError, match=r"free beside the window of one row \(100 B\) and the weights: at most 784"):
        sizes(1000 + 510 + 20 * 5 - 1)
    assert StoreSize.smallest([StoreSize(9, 4), StoreSize(7, 6)]) == (7, 4)


def test_useful_blocks_leave_room_for_drafts_and_plans_ahead() -> None:
    assert useful_blocks(2, 32, 16, draft_len=0, plans_ahead=0) == 2 * 3
    assert useful_blocks(1, 16, 16, draft_len=15, plans_ahead=1) == 3


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", 8 * 1024),
        ({"memory.max": "max", "memory.current": "1", "memory.stat": ""}, "0::/\n", 8 * 1024),
        ({"memory.max": "5000", "memory.current": "3000", "memory.stat": "inactive_file 500"}, "0::/\n", 2500),
        (
            {
                "job/step/memory.max": "max",
                "job/memory.max": "4000",
                "job/memory.current": "3000",
                "job/memory.stat": "anon 1",
            },
            "0::/job/step\n",
            1000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "900",
                "memory/memory.usage_in_bytes": "1000",
                "memory/memory.stat": "total_inactive_file 50",
            },
            "4:memory:/not/in/this/container\n",
            0,
        ),
    ],
)
def test_the_limit_of_a_cgroup_counts(tmp_path: Path, files: dict[str, str], membership: str, expected: int) -> None:
    for name, content in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    (tmp_path / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable: 8 kB\n")
    (tmp_path / "self").write_text(membership)
    assert free_host_bytes(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "self") == expected


def test_slots_of_a_host_share_its_memory() -> None:
    whole, half = free_bytes_of_slot("cpu:0", 1), free_bytes_of_slot("cpu:0", 2)
    assert 0.4 < half / whole < 0.6


def test_a_limit_on_the_address_space_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + 100 * 1024 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, resource.RLIM_INFINITY))
    assert 0 < free_bytes_of_slot("cpu:0", 1) <= 200 * 1024 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, 1))
    assert free_bytes_of_slot("cpu:0", 1) == 0


def test_byte_counts_are_readable() -> None:
    assert [format_bytes(count) for count in (5, 2048, 3 * 2**20, 2**40)] == ["5 B", "2 KiB", "3 MiB", "1 TiB"]
    assert format_bytes(1000 * 2**20) == "1000 MiB"


def test_one_row_has_its_places_where_there_are_fewer_blocks() -> None:
    """Of a small store, and of a slot without such layers."""
    settings: dict[str, Any] = {
        "fraction": 1.0,
        "block_size": 16,
        "max_tokens": None,
        "most_useful": 1000,
        "where": "r",
    }
    size = count_kv_blocks(60_000, SlotMemory(0, 1000, 0, 10), places=PlaceDemand(4, 80, 80), **settings)
    assert size.places >= 81 and 40 < size.blocks < 81
    size = count_kv_blocks(18_000, SlotMemory(0, 1000), places=PlaceDemand(4, 40, 40), **settings)
    assert size == StoreSize(18, 41)


def test_snapshots_are_named_where_they_leave_no_room() -> None:
    with pytest.raises(
        ConfigError, match=r"1.95 KiB \(1.46 KiB for snapshots of states\).*: lower kv_cache.state_snapshots"
    ):
        count_kv_blocks(
            1500,
            SlotMemory(0, 10, 2000, 0, 1500),
            fraction=1.0,
            block_size=16,
            max_tokens=None,
            most_useful=9,
            where="r",
        )
