"""A draft model that drafts all tokens in one forward, over real ranks in every placement: texts are the target's own.

Each test runs a whole job as test_jobs.py does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from jobs import COUNT, HERE, alone, job_configuration, prompts, run_job, sampling
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import Reference, noisy_copy, tokens_of

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.mpi

NAMES = [name for name in ("1+1", "ab+ba", "2+1") if name in HERE]
"""Apart, sharing both devices, and with a draft on two ranks."""
ONE_SLOT = (("cpu:0",), ("cpu:0",))
WITH_PROBS: dict[str, Any] = {"speculation": {"draft_len": 3, "use_logits": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same `target` and `parallel`, for all ranks."""
    path = None
    if MPI.COMM_WORLD.rank == 0:
        path = tmp_path_factory.mktemp("parallel")
        draft = noisy_copy(path / "parallel", make_checkpoint(path / "target", seed=1, num_hidden_layers=2), 0.05)
        config = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(config | {"pard_token": 198}))
    return from_rank_0(path)


def use(llm: LLM) -> dict[str, Any]:
    """Greedy and sampled rows."""
    texts = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
    return {
        "texts": [tokens for (tokens,) in texts],
        "sampled": tokens_of(llm.generate(prompts(), sampling())),
        "accepted": llm.statistics()["num_accepted_draft_tokens"],
    }


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[tuple[int, ...]]:
    """transformers' greedy texts, at rank 0."""
    if MPI.COMM_WORLD.rank != 0:
        return []
    reference = Reference(folder / "target")
    return [reference.greedy(prompt, COUNT) for prompt in prompts()]


@pytest.fixture(scope="module")
def in_one_process(folder: Path) -> Callable[[bool], Any]:
    """Return ask(has_probs) -> one process's sampled rows; the one who asks waits for it once."""

    @cache
    def ask(has_probs: bool) -> Any:
        sections = WITH_PROBS if has_probs else {}
        return alone(job_configuration(folder, ONE_SLOT, "parallel", **sections), use)["sampled"]

    return ask


@pytest.mark.parametrize(
    ("name", "sections"), [*((name, {}) for name in NAMES), *((name, WITH_PROBS) for name in NAMES if name == "1+1")]
)
def test_texts_are_the_targets_own(
    folder: Path,
    greedy: list[tuple[int, ...]],
    in_one_process: Callable[[bool], Any],
    name: str,
    sections: dict[str, Any],
) -> None:
    """With draft_probs, those of one process: the tokens of a seed depend on the draft there."""
    found = run_job(job_configuration(folder, HERE[name], "parallel", **sections), use)
    if found is None:
        return
    assert found["texts"] == greedy
    assert found["sampled"] == in_one_process(bool(sections))
    assert found["accepted"] > 20
