"""scripts/bench/gpu_bench: whose each moment of a device is, and what a server's line of its way back says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))
from launch.serve.engine.messages import Ready
from launch.serve.engine.restarted_engine import describe_return
from scripts.bench.gpu_bench.kernel_sweep import Kernel, Share, is_product, sweep
from scripts.bench.gpu_bench.kernel_times import describe
from scripts.bench.gpu_bench.served_loss import read_pieces

PRODUCT, SUM, NORM = "_product_kernel", "two_shot_bf16", "_add_and_normalise_kernel"


def test_each_moment_is_that_of_who_began_first_or_nobodys() -> None:
    kernels = [
        Kernel(PRODUCT, 0, 10),
        Kernel(SUM, 8, 20),  # begins while the product ends
        Kernel(NORM, 18, 25),  # waits for the sum
        Kernel(PRODUCT, 30, 40),
        Kernel(NORM, 32, 36),
        Kernel(SUM, 60, 70),
        Kernel(PRODUCT, 65, 75),  # begins early, and waits
    ]
    shares = sweep(kernels, 0, 80)
    assert shares == {
        PRODUCT: Share(calls=3, own=25, running=30, idle_behind=25),
        SUM: Share(calls=2, own=20, running=22),
        NORM: Share(calls=2, own=5, running=11, idle_behind=5),
    }
    assert sum(share.own + share.idle_behind for share in shares.values()) == 80


def test_kernels_are_cut_to_the_span_of_time() -> None:
    kernels = [Kernel(PRODUCT, 0, 10), Kernel(NORM, 15, 30), Kernel(SUM, 40, 50)]
    assert sweep(reversed(kernels), 5, 20) == {
        PRODUCT: Share(calls=1, own=5, running=5, idle_behind=5),
        NORM: Share(calls=1, own=5, running=5),
    }
    assert sweep(kernels, 100, 200) == {}


@pytest.mark.parametrize(
    "name", [PRODUCT, "nvjet_tst_128x64", "_heads_kernel", "sm90_xmma_gemm_bf16", "_gate_up_kernel"]
)
def test_products_are_known_by_their_names(name: str) -> None:
    assert is_product(name) and not is_product(SUM) and not is_product(NORM) and not is_product("attend_kernel")


@pytest.mark.parametrize("offset", [0, 10**15])
def test_a_token_is_told_in_microseconds(offset: int) -> None:
    """Where clocks of device and host are far apart, too: then of as much time as ends with the last kernel."""
    kernels = [Kernel(PRODUCT, offset + start, offset + start + 3000) for start in range(0, 20_000, 5000)]
    told = describe(kernels, {"start": 8000, "end": 18_000, "tokens": 2})
    assert (told["token_us"], told["products_us"], told["idle_us"]) == (5.0, 3.0, 2.0)
    assert told["window_has_moved"] == bool(offset) and told["tokens"] == 2
    (line,) = told["kernels"]
    assert (line["name"], line["is_product"], line["us"], line["idle_behind_us"]) == (PRODUCT, True, 3.0, 1.0)


def test_seconds_of_a_way_back_are_read_from_the_servers_line() -> None:
    phases = {"weights": 3.0, "all kernels once, graphs": 1.5}
    ready = Ready(version="1", config_hash="h", limits={}, start_seconds=7.5, start_phases=phases)
    assert read_pieces("trtrun: " + describe_return(13.0, ready)) == {
        "until its ranks ran": 5.5, "imports and meeting": 3.0, **phases
    }  # fmt: skip
    assert read_pieces("trtrun: the job goes on without draft rank 1 (cpu:0)") == {}
