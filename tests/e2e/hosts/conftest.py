"""Fixtures of the tests on two hosts: the hosts, and a site on them. They are skipped where no hosts can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_draft
from network import missing_parts, start_network
from two_hosts import RunningJob, Site


@pytest.fixture(scope="session")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two hosts, for all tests together."""
    missing = missing_parts()
    if missing:
        pytest.skip(missing)
    pair = tmp_path_factory.mktemp("pair")
    make_checkpoint(pair / "target", tokenizer=True, num_hidden_layers=2, max_position_embeddings=65536)
    make_draft(pair / "draft", pair / "target", num_layers=1)
    with start_network(tmp_path_factory.mktemp("hosts")) as network:
        yield Site(network, pair, tmp_path_factory.mktemp("configs"))


@pytest.fixture
def two_hosts(shared_site: Site) -> Iterator[Site]:
    """Two hosts on which nothing runs, joined by a link; and so they are left to the next test."""
    shared_site.environment.clear()
    shared_site.expect_nothing_left()
    yield shared_site
    shared_site.expect_nothing_left()


@pytest.fixture
def start_job(two_hosts: Site) -> Iterator[Callable[..., RunningJob]]:
    """Return start(devices, **sections): a job on both hosts that would run for a long time; ended with the test."""
    started: list[RunningJob] = []

    def start(*devices: dict[str, Any], **sections: Any) -> RunningJob:
        job = RunningJob.start(two_hosts, *devices, **sections)
        started.append(job)
        return job

    yield start
    for job in started:
        job.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that both hosts see."""
    return tmp_path
