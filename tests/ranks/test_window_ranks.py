"""Layers with windows over real ranks: each has the places that plans name, whoever drafts and whenever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from jobs import COUNT, HERE, job_configuration, prompts, run_job, sampling
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import Reference, noisy_copy, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.memory.spaces import layers_in_places
from trtrun.start.job_spec import JobSpec

pytestmark = pytest.mark.mpi(min_size=3)

NAMES = [name for name in ("1+1", "ab+ba") if name in HERE]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a window of 6 tokens in some layers, and a draft that has it too; on all ranks."""
    path = tmp_path_factory.mktemp("windowed")
    if MPI.COMM_WORLD.rank == 0:
        more: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        noisy_copy(path / "noisy", make_checkpoint(path / "target", "Qwen2ForCausalLM", seed=1, **more), 0.02)
    return from_rank_0(path)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_transformers_and_prefixes_are_found_again(windowed: Path, name: str) -> None:
    """Two rounds of prompts, some of which begin as others that decode."""
    config = job_configuration(windowed, HERE[name])
    assert layers_in_places(config, JobSpec(config).models, "draft") is not None

    def use(llm: LLM) -> None:
        reference = Reference(windowed / "target")
        expected = [reference.greedy(prompt, COUNT) for prompt in prompts()]
        for _ in range(2):
            outputs = llm.generate(prompts(), SamplingParams(max_tokens=COUNT))
            assert [texts[0] for texts in tokens_of(outputs)] == expected
        assert outputs[2].completions[0].statistics.num_cached_prompt_tokens == 64
        assert tokens_of(llm.generate(prompts(), sampling())) == tokens_of(llm.generate(prompts(), sampling()))

    run_job(config, use)
