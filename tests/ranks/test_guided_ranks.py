"""Guided rows over real ranks: drafted ahead on a rank of its own, by groups that share devices, and from texts on all
target ranks alike; texts are plain guided decoding's of one process.

Each test runs a whole job as test_jobs.py does.
"""

from __future__ import annotations

import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from jobs import COUNT, HERE, alone, job_configuration, prompts, run_job
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import noisy_copy, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.core.guide import Guide
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.masks import RoundBudget

pytestmark = pytest.mark.mpi

METHODS: dict[str, dict[str, Any]] = {"1+1": {}, "ab+ba": {}, "no draft, 2": {"method": "ngram"}}
GUIDES: list[Any] = [
    {"json": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}},
    {"regex": "[0-9]{2}-[a-z]{3}(, [A-Z]{2})*"},
    {"choice": ["the first of them", "the second of them"]},
    None,
]
ONE_SLOT = ((), ("cpu:0",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same `target` and `noisy`, with a tokenizer, for all ranks."""
    path = None
    if MPI.COMM_WORLD.rank == 0:
        path = tmp_path_factory.mktemp("guided")
        target = make_checkpoint(path / "target", seed=1, num_hidden_layers=2, tokenizer=True, eos_token_id=0)
        noisy_copy(path / "noisy", target, 0.05)
    return from_rank_0(path)


def use(llm: LLM) -> dict[str, Any]:
    """Guided rows and others, greedy and sampled, and such whose thoughts have a budget."""
    sampling = [
        SamplingParams(max_tokens=COUNT, guided=guide, temperature=temperature, seed=7)
        for guide in GUIDES
        for temperature in (0.0, 1.0)
    ]
    bounds: dict[str, Any] = {"thinking_token_budget": 5, "thinking_marks": ("", "</think>"), "ignore_eos": True}
    sampling += [SamplingParams(max_tokens=COUNT, temperature=one, seed=7, **bounds) for one in (0.0, 1.0)]
    asked = [(prompts()[place % 6], one) for place, one in enumerate(sampling)]
    outputs = llm.generate([prompt for prompt, _ in asked], [one for _, one in asked])
    origins = [output.completions[0].token_origins for output in outputs]
    assert all("</think>" in output.completions[0].text for output in outputs[-2:])
    return {"texts": tokens_of(outputs), "choices": origins[4:6]}


@cache
def texts_alone(folder: Path) -> Any:
    """What one process says without a draft. Of rank 0."""
    return alone(job_configuration(folder, ONE_SLOT), use)["texts"]


@pytest.mark.parametrize("name", [name for name in METHODS if name in HERE])
def test_guided_texts_are_those_of_one_process(folder: Path, name: str) -> None:
    sections: dict[str, Any] = {"speculation": {"draft_len": 3, **METHODS[name]}}
    found = run_job(job_configuration(folder, HERE[name], **sections), use)
    if found is None:
        return
    assert found["texts"] == texts_alone(folder)
    # What must follow is drafted: only where the texts part may a draft be wrong.
    assert all(origins.count("r") <= 1 and origins.count("a") > 6 for origins in found["choices"]), found["choices"]


LARGE = {"regex": "[0-9]{3}-[a-z]{4}"}


@pytest.mark.parametrize("name", [name for name in METHODS if name in HERE])
def test_rows_go_on_while_ranks_build_a_guide(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On engine ranks it is not built before the orchestrator has seen the others' ends."""
    may_end = folder / f"{name} may end"
    build, has, large = Grammars.matcher, Grammars.has, SamplingParams(guided=LARGE).guided

    def matcher(grammars: Grammars, guide: Guide, *, anew: bool = False) -> Any:
        while MPI.COMM_WORLD.rank > 0 and guide == large and not may_end.exists():
            time.sleep(0.001)
        return build(grammars, guide, anew=anew)

    monkeypatch.setattr(Grammars, "has", lambda grammars, guide: guide != large and has(grammars, guide))
    monkeypatch.setattr(Grammars, "matcher", matcher)

    def use(llm: LLM) -> list[tuple[int, ...]]:
        engine, texts = llm.engine, dict[Any, tuple[int, ...]]()
        wanted = [(LARGE, 0.0), (LARGE, 1.0), (GUIDES[2], 0.0), (None, 0.0), (None, 1.0)]
        requests = [
            engine.add_request(prompts()[1], SamplingParams(max_tokens=COUNT, guided=guide, temperature=warmth, seed=7))
            for guide, warmth in wanted
        ]
        engine.abort_request(engine.add_request(prompts()[2], SamplingParams(guided=LARGE)))
        going_on = set(requests)
        while going_on:
            for delta in engine.step():
                texts[delta.request_id] = (*texts.get(delta.request_id, ()), *delta.token_ids)
                if delta.finish_reason is not None:
                    going_on.remove(delta.request_id)
            if going_on <= set(requests[:2]):
                assert may_end.exists() or not texts.keys() & set(requests[:2])
                may_end.touch()
        return [texts[request] for request in requests]

    found = run_job(job_configuration(folder, HERE[name], speculation={"draft_len": 3, **METHODS[name]}), use)
    if found is not None:
        assert found == alone(job_configuration(folder, ONE_SLOT), use)


@pytest.mark.parametrize("name", [name for name in ("ab+ba", "2+1") if name in HERE])
def test_rows_that_wait_for_their_guide_say_what_they_would(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's clock says something else: now and then nothing is left of a round for guides. Several ranks of the
    target have to agree, and several of the draft."""
    choose = random.Random(MPI.COMM_WORLD.rank)
    monkeypatch.setattr(RoundBudget, "is_spent", property(lambda budget: choose.random() < 0.05))

    def waiting(llm: LLM) -> dict[str, Any]:
        return use(llm) | {"waits": llm.engine.statistics()["num_guide_waits"]}

    sections: dict[str, Any] = {"speculation": {"draft_len": 3, **METHODS.get(name, {})}}
    found = run_job(job_configuration(folder, HERE[name], **sections), waiting)
    if found is None:
        return
    assert found["waits"] > 3
    assert found["texts"] == texts_alone(folder)
