"""`trtrun bench` and the demo through the real commands."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from commands import FOUR_RANKS, ONE_PROCESS, Configs, Run

from trtrun.kernels.cpu.machine import has_bfloat16_kernels
from trtrun.telemetry import ROUND_PARTS


def assert_parts_add_up(case: dict[str, Any]) -> None:
    """The parts of a round are its wall time, no more and no less; and all rounds are all of the timed runs."""
    parts = case["round_ms"]
    assert list(parts) == list(ROUND_PARTS)
    assert min(parts.values()) >= 0 and parts["verifying"] > 0
    assert sum(parts.values()) == pytest.approx(case["round_wall_ms"], abs=1e-4)


def test_bench_beside_transformers(config: Configs, trtrun: Run) -> None:
    done = trtrun(
        *("bench", "--config", config(ONE_PROCESS), "--rows", "1,2", "--repeats", 2, "--max-tokens", 8),
        *("--prompt-tokens", 5, "--peer", "transformers", "--seed", 7),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["seed"] == 7
    assert report["total_threads"] == 1
    assert report["identical_to_plain"] is True
    assert report["kernels"] == ["torch"]  # float32
    assert [entry["rows"] for entry in report["results"]] == [1, 2]
    one, two = report["results"]
    assert set(one["ratios"]) == {
        "speculative_over_plain", "plain_over_peer_plain", "speculative_over_peer_assisted"
    }  # fmt: skip
    assert set(two["ratios"]) == {"speculative_over_plain", "plain_over_peer_plain"}
    assert one["plain"]["num_draft_tokens"] == 0
    assert one["speculative"]["num_draft_tokens"] > 0
    assert 1 <= one["speculative"]["mean_acceptance_length"] <= 5
    assert len(one["speculative"]["tokens_per_s_runs"]) == 2
    for case in (one["plain"], one["speculative"], two["plain"], two["speculative"]):
        assert_parts_add_up(case)
    assert one["plain"]["round_ms"]["drafting"] < one["speculative"]["round_ms"]["drafting"]
    assert "milliseconds of a round" in done.stdout
    ratio = one["plain"]["tokens_per_s"] / one["transformers"]["plain_tokens_per_s"]
    assert one["ratios"]["plain_over_peer_plain"] == pytest.approx(ratio, rel=0.01)


def test_bench_of_prompt_lookup_compares_it_with_plain_decoding(config: Configs, trtrun: Run) -> None:
    options = ("--rows", "2", "--repeats", 1, "--max-tokens", 24, "--json", "--speculation", "ngram")
    file = config(ONE_PROCESS, speculation={"prompt_lookup_min": 1, "method": "ngram"})
    done = trtrun("bench", "--config", file, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["method"], report["draft"], report["draft_len"]) == ("ngram", None, 4)
    assert len(report["ranks"]) == 1 and report["identical_to_plain"] is True
    (entry,) = report["results"]
    assert entry["plain"]["num_draft_tokens"] == 0 and entry["speculative"]["num_rounds"] > 0
    assert "speculative_over_plain" in entry["ratios"]


def test_bench_over_ranks_draws_a_seed_and_prints_json_alone(config: Configs, trtrun: Run) -> None:
    done = trtrun("bench", "--config", config(FOUR_RANKS), "--rows", "2", "--repeats", 1, "--max-tokens", 4, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report["seed"], int)
    assert len(report["ranks"]) == 4
    assert_parts_add_up(report["results"][0]["speculative"])
    assert report["total_threads"] == 3
    assert report["identical_to_plain"] is True
    assert report["kernels"] == ["torch"]  # float32


def test_bench_says_what_bfloat16_was_computed_with(config: Configs, trtrun: Run) -> None:
    words = ("--set", "target.dtype=bfloat16", "--set", "draft.dtype=bfloat16", "--set", "draft.quantization=int8")
    done = trtrun(
        "bench", "--config", config(ONE_PROCESS), *words, "--rows", "1", "--repeats", 1, "--max-tokens", 4, "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kernels"] == ["avx512_bf16" if has_bfloat16_kernels() else "torch"]
    assert report["draft_quantization"] == "int8"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "1,x"), "write numbers with commas between"),
        (("--rows", "0"), "write numbers with commas between"),
        (("--max-tokens", "70000"), "but a request may have 65536"),
    ],
)
def test_bench_refuses_nonsense(config: Configs, trtrun: Run, arguments: tuple[str, ...], said: str) -> None:
    done = trtrun("bench", "--config", config(ONE_PROCESS), *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_demo_shows_text_ranks_and_figures(trtrun: Run) -> None:
    words = [sys.executable, "-m", "launch.demo"]
    done = trtrun("--prompts", 2, "--max-tokens", 24, words=words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["ranks"]) == 4
    assert report["identical"] is True
    assert report["speculative_rounds"] < report["plain_rounds"]
    assert report["mean_acceptance_length"] > 1.5
