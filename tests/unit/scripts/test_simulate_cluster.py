"""scripts/soak/simulate_cluster.py: requests of the trace's shape, and two servers that serve them all."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.soak.simulate_cluster import simulate
from scripts.soak.simulated_cluster.load import RATE, make_arrivals, route
from scripts.soak.simulated_cluster.server import COSTS, ServerSetup


def test_requests_have_the_shape_of_the_trace() -> None:
    """Its medians, its counts a minute, and conversations of two turns that each stay with a server and grow."""
    arrivals = make_arrivals(RATE, 3500, seed=1)
    times = np.array([one.time for one in arrivals])
    assert len(arrivals) / 3500 == pytest.approx(RATE, rel=0.05) and (np.diff(times) >= 0).all()
    assert np.median([one.num_prompt_tokens for one in arrivals]) == pytest.approx(1020, rel=0.03)
    assert np.median([one.num_output_tokens for one in arrivals]) == pytest.approx(129, rel=0.05)
    counts = np.bincount((times // 10).astype(int))
    assert 2 < counts.var() / counts.mean() < 6, "3.9 in the trace, 1 of a steady rate"
    assert 1.5 < len(arrivals) / len({one.session for one in arrivals}) < 2.1
    servers = [{one.session for one in of_server} for of_server in route(arrivals, 4)]
    assert sum(map(len, servers)) == len(set.union(*servers)), "a conversation has one server"
    contexts = Counter[int]()
    for one in arrivals:
        assert one.num_prompt_tokens > contexts[one.session]
        contexts[one.session] = one.num_prompt_tokens + one.num_output_tokens


def test_two_servers_serve_all_and_wait_where_more_comes_than_they_can() -> None:
    calm = simulate(2, 0.5, ServerSetup(seconds=20), seed=1, processes=1)
    again = simulate(2, 0.5, ServerSetup(seconds=20), seed=1, processes=1)
    own_clock = ("host_ms_a_round", "wall_s")
    assert {**calm, **dict.fromkeys(own_clock)} == {**again, **dict.fromkeys(own_clock)}
    assert calm["requests"] > 60 and calm["refused"] == 0 and calm["reused_share"] > 0.02
    assert 0.007 < calm["first_token_s"]["p50"] < 1 and calm["tokens_per_s"]["p50"] > 100
    busy = simulate(2, 2.5, ServerSetup(seconds=20, max_waiting=16), seed=1, processes=1)
    assert busy["first_token_s"]["p50"] > 3 * calm["first_token_s"]["p50"]
    assert busy["most_waiting"] == 16 and busy["refused"] > 0
    short = simulate(2, 1.0, ServerSetup(seconds=20, kv_tokens=20_000), seed=1, processes=1)
    assert short["rows_taken_back"] > 0 and short["most_blocks"] <= 20_000 // 16


def test_rounds_take_what_was_measured() -> None:
    """A plain row has 138 tokens a second and 32 drafted ones 3,528, five a round."""
    assert 1 / COSTS.estimate(1, 0) == pytest.approx(138)
    assert 32 * 5 / COSTS.estimate(32, 10) == pytest.approx(3528)
