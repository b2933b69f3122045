"""What is not the product's, on ranks: drafting methods (tests/own_drafters.py, tests/branching.py) on draft ranks with
devices of its own, and on target ranks that all have the same hidden states and go on with the same path of a tree. And
a model family (tests/own_family.py), shared out."""

from __future__ import annotations

from pathlib import Path

import pytest
from branching import Branching, branching_method
from jobs import COUNT, HERE, alone, job_configuration, prompts, run_job, sampling
from meeting import from_rank_0, meet
from mpi4py import MPI
from own_drafters import Recalling, check_watched, own_methods
from own_family import PlainReference, make_own_checkpoint, own_family
from pipelines import Reference, noisy_copy, tokens_of

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.mpi
SPLIT = [name for name, devices in HERE.items() if not devices[0] and len(devices[1]) > 1]
NAMES = [name for name in ("1+1", "2+1") if name in HERE]
"""A draft on one rank, and on two."""


@pytest.mark.parametrize("name", NAMES)
def test_a_method_of_ones_own_drafts_on_ranks_of_its_own(folder: Path, name: str) -> None:
    with own_methods():
        config = job_configuration(folder, HERE[name], speculation={"method": "remembering", "draft_len": 3})

        def use(llm: LLM) -> tuple[list[object], float]:
            return tokens_of(llm.generate(prompts(), sampling())), llm.statistics()["num_accepted_draft_tokens"]

        found = run_job(config, use)
    if found is not None:
        solo = job_configuration(folder, ((), ("cpu:0",)))
        assert found[0] == alone(solo, lambda llm: tokens_of(llm.generate(prompts(), sampling())))
        assert found[1] > 0


@pytest.mark.parametrize("name", SPLIT)
def test_hidden_states_are_transformers_on_every_rank_of_a_split_target(folder: Path, name: str) -> None:
    speculation = {"method": "recalling", "draft_len": 3}
    kv_cache = {"max_tokens": 1024, "block_size": 8, "enable_block_reuse": False}
    with own_methods():
        config = job_configuration(folder, HERE[name], speculation=speculation, kv_cache=kv_cache)
        found = run_job(config, lambda llm: tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT))))
        watched = MPI.COMM_WORLD.gather(Recalling.watched)
        if found is None or watched is None:
            return
        reference = Reference(folder / "target")
        tokens = {index: [*prompt, *text] for index, (prompt, (text,)) in enumerate(zip(prompts(), found, strict=True))}
        assert [bool(of_rank) for of_rank in watched] == [False, *[True] * (len(watched) - 1)]
        for of_rank in watched[1:]:
            Recalling.watched = of_rank
            assert check_watched(reference, tokens) == sum(len(text) - 1 for text in tokens.values())
        assert [text for (text,) in found] == [reference.greedy(prompt, COUNT) for prompt in prompts()]


@pytest.mark.parametrize("name", SPLIT)
def test_texts_are_plain_decodings_for_random_trees_on_a_split_target(folder: Path, name: str) -> None:
    solo = job_configuration(folder, ((), ("cpu:0",)))

    def use(llm: LLM) -> tuple[list[object], float]:
        return tokens_of(llm.generate(prompts(), sampling())), llm.statistics()["num_accepted_draft_tokens"]

    plain = from_rank_0(alone(solo, use)[0] if MPI.COMM_WORLD.rank == 0 else None)
    with branching_method():
        Branching.texts = [[*prompt, *text] for prompt, (text, *_) in zip(prompts(), plain, strict=True)]
        scheduler = {"max_num_tokens": 512, "max_batch_size": 3}
        config = job_configuration(folder, HERE[name], speculation={"method": "branching"}, scheduler=scheduler)
        found = run_job(config, use)
    if found is not None:
        assert found[0] == plain and found[1] > 20


@pytest.mark.parametrize("name", [name for name in ("one slot", "1+1", "ab+ba") if name in HERE])
def test_a_family_of_ones_own_runs_wherever_the_products_do(folder: Path, name: str) -> None:
    own = folder / "own"
    with own_family():
        if MPI.COMM_WORLD.rank == 0 and not own.exists():
            noisy_copy(own / "noisy", make_own_checkpoint(own / "target"), 0.05)
        meet()
        config = job_configuration(own, HERE[name])
        found = run_job(config, lambda llm: tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT))))
    if found is not None:
        reference = PlainReference(own / "target")
        assert [text for (text,) in found] == [reference.greedy(prompt, COUNT) for prompt in prompts()]
