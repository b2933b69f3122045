"""What is kept of a request with a cache_salt is nobody else's: by cached tokens and by how many rounds others take."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fronts import TOKENIZER, NoEngine, make_frontend
from pipelines import make_llm, prompt_of

from launch.serve.admission.control import OWNER
from launch.serve.parsing.parsers import UnencodedRequest
from trtrun import LLM, SamplingParams
from trtrun.core.request_statistics import RequestStatistics
from trtrun.errors import InvalidRequestError

COUNT = 40
PAST_ANSWERS = {"method": "suffix", "suffix_decoding_max_cached_requests": 4, "draft_len": 4}
RECYCLING = {"method": "token_recycling", "draft_len": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("salts") / "target", seed=1)


def run(llm: LLM, texts: set[tuple[int, ...]], **others: Any) -> RequestStatistics:
    """What one request takes."""
    (output,) = llm.generate([prompt_of(40)], SamplingParams(max_tokens=COUNT, **others))
    texts.add(output.completions[0].token_ids)
    return output.completions[0].statistics


def test_blocks_are_found_by_those_with_the_same_salt_alone(target: Path) -> None:
    texts: set[tuple[int, ...]] = set()
    with make_llm(target) as llm:
        found = [
            run(llm, texts, cache_salt=salt).num_cached_prompt_tokens > 0
            for salt in ("a", "a", "b", None, None, "b", "a")
        ]
    assert found == [False, True, False, False, True, True, True] and len(texts) == 1
    for wrong in ("", 5, "x" * 1025):
        with pytest.raises(InvalidRequestError, match="cache_salt must be a text of 1 to 1024 characters"):
            SamplingParams(cache_salt=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("speculation", [PAST_ANSWERS, RECYCLING], ids=lambda section: section["method"])
def test_what_others_draft_from_keeps_nothing_of_it(target: Path, speculation: dict[str, Any]) -> None:
    texts: set[tuple[int, ...]] = set()
    with make_llm(target, speculation={**speculation, "pacing": "fixed"}) as llm:
        first, second = (run(llm, texts, cache_salt=salt).num_accepted_draft_tokens for salt in ("a", "b"))
        assert first == second, "as if nothing had been before it"
        assert run(llm, texts).num_accepted_draft_tokens == first
        assert run(llm, texts).num_accepted_draft_tokens > first
    assert len(texts) == 1


def test_a_server_may_salt_the_requests_of_each_client() -> None:
    engine = NoEngine()
    frontend = make_frontend(TOKENIZER, engine)

    async def begin(owner: str, salt: str | None) -> str | None:
        OWNER.set(owner)
        (await frontend.begin(UnencodedRequest.of(["x"], SamplingParams(cache_salt=salt)), 0.0)).close()
        return engine.requests[-1].sampling.cache_salt

    asked = [("key 0", None), ("key 1", None), ("key 0", "a"), ("key 0", None)]
    assert [asyncio.run(begin(*one)) for one in asked] == [None, None, "a", None]
    frontend._cache_by_client = True
    salts = [asyncio.run(begin(*one)) for one in asked]
    assert None not in salts and salts[0] == salts[3] and len(set(salts)) == 3
