"""Whole jobs over real ranks for tests: where they sit, the rows that they are given, and a way to run them.

The fixture `folder` of conftest.py has their models. It does not know what a job is tried for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import pytest
from meeting import meet
from mpi4py import MPI
from pipelines import configuration, prompt_of

import trtrun.api.llm_engine
from trtrun import LLM, SamplingParams, open_llm
from trtrun.configuration.config import RuntimeConfig
from trtrun.start import job

T = TypeVar("T")
Devices = tuple[tuple[str, ...], tuple[str, ...]]
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
"""Ranks of the running job; mpirun says it before MPI starts."""


def place(draft: str, target: str) -> Devices:
    """`place("a", "bc")`: the draft on slot a, the target on slots b and c."""
    draft_slots, target_slots = (tuple(f"cpu:{'abcd'.index(name)}" for name in names) for names in (draft, target))
    return draft_slots, target_slots


BY_WORLD_SIZE: dict[int, dict[str, Devices]] = {
    1: {"one slot": place("a", "a"), "one slot, no draft": place("", "a")},
    3: {"1+1": place("a", "b"), "a+ab": place("a", "ab"), "ab+ba": place("ab", "ba"), "no draft, 2": place("", "ab")},
    4: {"1+2": place("a", "bc"), "2+1": place("ab", "c"), "ab+bc": place("ab", "bc")},
    5: {"2+2": place("ab", "cd")},
}
HERE = BY_WORLD_SIZE.get(SIZE, {})
"""The placements of the running job, by name."""
LENGTHS = (1, 9, 70, 24, 3, 41)
"""Tokens of each prompt."""
COUNT = 24
"""Tokens that each completion is given, at most."""


def sampling(drafts: Sequence[int | None] = ()) -> list[SamplingParams]:
    """Greedy and sampled rows by turns, each with a draft_len of its own where `drafts` has one for it."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.9},
        {"repetition_penalty": 1.2, "logprobs": 2, "prompt_logprobs": 2, "return_context_logits": True},
        {"temperature": 1.2, "top_k": 20, "presence_penalty": 0.5, "return_generation_logits": True},
        {"stop_token_ids": (7, 8, 9)},
        {"temperature": 0.8, "min_p": 0.05, "frequency_penalty": 0.3, "n": 2},
    ]
    return [
        SamplingParams(max_tokens=COUNT, seed=index, draft_len=most, **kind)
        for index, (kind, most) in enumerate(zip_longest(kinds, drafts))
    ]


def prompts() -> list[list[int]]:
    """Random token ids of these lengths."""
    return [prompt_of(length, seed=length) for length in LENGTHS]


def alone(config: RuntimeConfig, use: Callable[[LLM], T]) -> T:
    """What `use` gives when this process is the whole job, whatever world it runs in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trtrun.api.llm_engine, "open_job", lambda spec, _: job._open_solo(spec, None))
        with LLM(config=config) as llm:
            return use(llm)


def run_job(config: RuntimeConfig, use: Callable[[LLM], T]) -> T | None:
    """Run `use` at rank 0 of a job over all ranks; returns what it returns there, None elsewhere.

    What tests begin with is left out of garbage collections already, and to count it takes as long as a small job's
    start (test_garbage_ranks.py has workers that do so).
    """
    meet()  # rank 0 may have been at something else
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "leaving_out_what_is", nullcontext)
        with open_llm(config) as llm:
            assert (llm is not None) == (MPI.COMM_WORLD.rank == 0)
            if llm is None:
                return None
            result = use(llm)
            llm.check_idle()
            return result


def job_configuration(folder: Path, devices: Devices, draft: str = "noisy", **sections: Any) -> RuntimeConfig:
    """`configuration` for the models of `folder`, with few rows, blocks and tokens a round."""
    sections = {
        "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": 1},
        "kv_cache": {"max_tokens": 1024, "block_size": 8},
        "speculation": {"draft_len": 3},
    } | sections
    return configuration(folder / "target", folder / draft if devices[0] else None, devices=devices, **sections)
