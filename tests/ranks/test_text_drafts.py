"""Texts beside a model over real ranks, apart and on devices that both share: texts are the target's own.

Each test runs a whole job as test_jobs.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNT, HERE, alone, job_configuration, prompts, run_job, sampling
from pipelines import tokens_of

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.mpi
NAMES = [name for name in ("one slot", "1+1", "ab+ba", "2+1") if name in HERE]
WAYS = [*((name, "on", 9) for name in NAMES), *((name, "off", 0) for name in NAMES if name == "1+1")]
APART = [name for name in NAMES if not {*HERE[name][0]} & {*HERE[name][1]}]


def use(llm: LLM) -> dict[str, Any]:
    """Rows that like to repeat themselves, twice, and others; of these some are preempted."""
    repeating = SamplingParams(max_tokens=COUNT, frequency_penalty=-2.0)
    texts = [tokens_of(llm.generate(prompts(), repeating)) for _ in range(2)]
    outputs = llm.generate(prompts(), sampling())
    return {
        "texts": [*texts, tokens_of(outputs)],
        "statistics": llm.statistics(),
        "preempted": sum(one.statistics.num_preemptions for output in outputs for one in output.completions),
    }


@pytest.fixture(scope="module")
def plain_texts(folder: Path) -> Callable[[], Any]:
    """Return ask() -> what the target alone writes in one process; the one who asks waits for it once."""

    @cache
    def ask() -> Any:
        return alone(job_configuration(folder, ((), ("cpu:0",))), use)["texts"]

    return ask


@pytest.mark.parametrize(("name", "ahead", "cached"), WAYS)
def test_texts_are_the_targets_own(
    folder: Path, plain_texts: Callable[[], Any], name: str, ahead: str, cached: int
) -> None:
    speculation: dict[str, Any] = {
        "draft_len": 3,
        "enable_suffix_decoding": True,
        "suffix_decoding_min_match_len": 2,
        "suffix_decoding_max_cached_requests": cached,
        **({"ahead": ahead} if name in APART else {}),
    }
    sections: dict[str, Any] = {"speculation": speculation, "kv_cache": {"max_tokens": 128, "block_size": 8}}
    found = run_job(job_configuration(folder, HERE[name], **sections), use)
    if found is None:
        return
    assert found["texts"] == plain_texts()
    statistics = found["statistics"]
    kept, looked_up = statistics["num_accepted_suffix_draft_tokens"], statistics["num_suffix_draft_tokens"]
    assert 0 < kept <= looked_up < statistics["num_draft_tokens"]
    assert kept < statistics["num_accepted_draft_tokens"]
    # An answer that is kept is drafted as soon as it has begun.
    assert not cached or kept > len(prompts()) * COUNT // 2
    assert found["preempted"] > 0
