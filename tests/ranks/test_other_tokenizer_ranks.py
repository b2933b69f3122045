"""A draft with another tokenizer over real ranks, apart, on devices that both share and on two ranks: texts are the
target's own.

Each test runs a whole job as test_jobs.py does.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_tokenizer
from jobs import COUNT, HERE, alone, job_configuration, prompts, run_job, sampling
from meeting import from_rank_0
from mpi4py import MPI
from permuted import permuted_copy
from pipelines import noisy_copy, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import RuntimeConfig

pytestmark = pytest.mark.mpi

NAMES = [name for name in ("1+1", "ab+ba", "2+1") if name in HERE]
"""Apart, sharing both devices, and with a draft on two ranks."""
WAYS = [(name, way, False) for name in NAMES for way in ("intersection", "text")]
WITH_PROBS = [(name, "intersection", True) for name in NAMES if name == "1+1"]
ONE_SLOT = (("cpu:0",), ("cpu:0",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same `target` and `permuted`, for all ranks."""
    path = None
    if MPI.COMM_WORLD.rank == 0:
        path = tmp_path_factory.mktemp("tokenizers")
        target = make_checkpoint(path / "target", seed=1, num_hidden_layers=2, tokenizer=True, vocab_size=283)
        make_tokenizer(target, merges=26)
        permuted_copy(path / "permuted", noisy_copy(path / "noisy", target, 0.05))
    return from_rank_0(path)


def settled(config: RuntimeConfig, way: str) -> RuntimeConfig:
    """The configuration with one way, whatever is common."""
    assert config.draft is not None
    return config.model_copy(update={"draft": config.draft.model_copy(update={"vocabulary": way})})


def use(llm: LLM) -> dict[str, Any]:
    """Greedy and sampled rows."""
    greedy = SamplingParams(max_tokens=COUNT)
    return {
        "texts": tokens_of(llm.generate(prompts(), greedy)),
        "sampled": tokens_of(llm.generate(prompts(), sampling())),
        "accepted": llm.statistics()["num_accepted_draft_tokens"],
    }


def sections_of(use_logits: bool) -> dict[str, Any]:
    return {"speculation": {"draft_len": 3, "ahead": "auto", "use_logits": use_logits}}


@cache
def in_one_process(folder: Path, use_logits: bool) -> dict[str, Any]:
    """The target's own rows; with draft_probs, those of the same draft in the target's ids."""
    same = job_configuration(folder, ONE_SLOT, "noisy", **sections_of(use_logits))
    return alone(same if use_logits else job_configuration(folder, ((), ("cpu:0",))), use)


@pytest.mark.parametrize(("name", "way", "use_logits"), [*WAYS, *WITH_PROBS])
def test_texts_are_the_targets_own(folder: Path, name: str, way: str, use_logits: bool) -> None:
    sections = sections_of(use_logits)
    found = run_job(settled(job_configuration(folder, HERE[name], "permuted", **sections), way), use)
    if found is None:
        return
    expected = in_one_process(folder, use_logits)
    assert (found["texts"], found["sampled"]) == (expected["texts"], expected["sampled"])
    assert found["accepted"] > 20
