"""What is left out of Python's garbage collections, and when."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from launch.batch import run
from launch.serve.engine import process
from trtrun import garbage
from trtrun.start.job_spec import JobSpec

ROOT = Path(__file__).resolve().parents[2]


class Node:
    """May be part of a ring."""

    def __init__(self) -> None:
        self.next = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    gc.unfreeze()
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()
    gc.freeze()  # as the tests begin


def test_what_is_garbage_goes_and_what_is_stays_unseen() -> None:
    ring, kept = weakref.ref(Node()), Node()
    garbage.leave_out_what_is()
    assert ring() is None
    assert not any(it is kept for it in gc.get_objects())
    later = Node()
    assert any(it is later for it in gc.get_objects())


@pytest.mark.parametrize(("before", "behind"), [(100_000, garbage.MOST_UNCOLLECTED), (700, 700), (0, 0)])
def test_later_collections_are_short(before: int, behind: int) -> None:
    """Where a start has put them off; who has them more often, or not at all, keeps that."""
    gc.set_threshold(before, 9, 8)
    garbage.leave_out_what_is()
    assert gc.get_threshold() == (behind, 9, 8)


def test_the_end_of_a_block_takes_it_back() -> None:
    kept = Node()
    gc.set_threshold(100_000, 9, 8)
    with pytest.raises(KeyError), garbage.leaving_out_what_is():
        assert gc.get_freeze_count() and gc.get_threshold()[0] == garbage.MOST_UNCOLLECTED
        raise KeyError
    assert gc.get_threshold() == (100_000, 9, 8)
    assert not gc.get_freeze_count() and any(it is kept for it in gc.get_objects())


@pytest.mark.parametrize(("loads", "expected"), [("triton", "collected"), ("json", "")])
def test_the_end_of_a_process_collects_all_where_somebody_counts(tmp_path: Path, loads: str, expected: str) -> None:
    """Triton says on standard error which of its objects are left over."""
    (tmp_path / "triton.py").touch()
    source = f"""
import os, {loads}
from trtrun.garbage import leave_out_what_is

class Node:
    def __init__(self): self.next, self.write = self, os.write
    def __del__(self): self.write(1, b"collected")

node = Node()
leave_out_what_is()
del node
"""
    places = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": places},
    )  # fmt: skip
    assert ended.stdout == expected and not ended.stderr


def test_what_was_left_out_before_a_block_still_is_behind_it() -> None:
    gc.freeze()
    with garbage.leaving_out_what_is():
        pass
    assert gc.get_freeze_count()


@pytest.mark.parametrize("is_here", [True, False], ids=["rank 0", "a worker"])
def test_engines_of_commands_are_left_out_once_they_are_ready(monkeypatch: pytest.MonkeyPatch, is_here: bool) -> None:
    made = Node()
    for module, name in ((run, "LLM"), (process, "AsyncLLM")):
        monkeypatch.setattr(getattr(module, name), "open", lambda config, update: made if is_here else None)
        monkeypatch.setattr(module, "losable_ranks", lambda config, topology: ())
    monkeypatch.setattr(run, "check_before_run", lambda config: None)
    spec = cast(JobSpec, SimpleNamespace(config=None, topology=None))
    for load in (run.load_llm, process.open_engine):
        if is_here:
            assert load(spec) is made  # type: ignore[comparison-overlap]
        elif load is run.load_llm:
            with pytest.raises(SystemExit):
                load(spec)
        else:
            assert load(spec) is None
        assert bool(gc.get_freeze_count()) is is_here
        gc.unfreeze()


def test_a_peer_gets_the_memory_that_the_engine_had(tmp_path: Path) -> None:
    """On one device both have the same process, in which the engine was left out of collections."""
    source = """
import gc, sys, torch
from launch import cli
from launch.bench import bench

def run_peer(job, options, results):
    gc.unfreeze()  # collects nothing
    left = [it.nbytes for it in gc.get_objects() if type(it) is torch.Tensor]
    print("of", len(results), "workloads", max(left, default=0), "bytes are left", file=sys.stderr)

bench.run_peer = run_peer
sys.argv[0] = "trtrun"
sys.exit(cli.main())
"""
    config = tmp_path / "config.yaml"
    model = ROOT / "trtrun" / "assets" / "draft"
    config.write_text(f"target: {{model: {model}, devices: ['cpu:0']}}\nspeculation: {{method: none}}\nthreads: 1\n")
    words = ["bench", "--rows", "1", "--max-tokens", "2", "--repeats", "1", "--peer", "transformers", "--config"]
    ended = subprocess.run(
        [sys.executable, "-c", source, *words, str(config)], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    found = re.search(r"of 1 workloads (\d+) bytes are left", ended.stderr)
    assert found and int(found[1]) < 10_000, ended.stderr
