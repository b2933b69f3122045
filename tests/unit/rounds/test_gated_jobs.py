"""Whole jobs whose target waits at a gate, in orders of messages, launches and device work that are drawn at random:
none hangs, all texts are plain decoding's, and the draft rank is never wrong about what was verified."""

from __future__ import annotations

from typing import Any

import pytest
from gated_jobs import GatedJob

KINDS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("found", "sat out", "foreseen")),
    ({"slowness": 0.3}, ("found", "given up")),
    ({"slowness": 0.1, "num_drafts": 2}, ("found",)),
    ({"slowness": 0.1, "given": True}, ("found", "foreseen")),
    ({"slowness": 0.05, "breaks": 0.05}, ("found", "error")),
    ({"loses_draft": True}, ("lost",)),
    ({"guided": True}, ("found", "foreseen")),
    ({"plans_ahead": 0}, ("found", "foreseen")),
]
NAMES = ["usual", "slow", "two drafts", "given", "broken", "lost", "guided", "no plans ahead"]


def test_no_table_is_written_while_the_device_reads_it() -> None:
    """It would wait for the rest until it gives up; here nothing else takes so long."""
    jobs = [GatedJob(seed, slowness=0.001) for seed in range(2)]
    for job in jobs:
        job.run()
    assert all(job.seen["found"] and not job.seen["given up"] for job in jobs)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("values", "seen"), KINDS, ids=NAMES)
def test_a_job_comes_to_its_end_with_plain_texts(values: dict[str, Any], seen: tuple[str, ...], seed: int) -> None:
    job = GatedJob(seed, **values)
    job.run()
    assert job.seen["length"] or job.seen["error"]
    assert all(job.seen[what] for what in seen), dict(job.seen)
