"""What is added without touching a file of the product: start here when you add something of the kind.

A drafting method of each placement is in tests/own_drafters.py, one of them with a store that it fills from the
target's hidden states (tests/unit/engine/test_taps.py compares these). One that has draft ranks of its own needs real
ranks and is tested in tests/ranks/test_own_drafters.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from own_drafters import own_methods
from pipelines import make_llm, noisy_copy, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.errors import ConfigError


@pytest.fixture(autouse=True)
def methods() -> Iterator[None]:
    with own_methods():
        yield


@pytest.mark.parametrize(("method", "fewest"), [("repeating", 1), ("recalling", 1), ("stepping", 60)])
def test_a_drafting_method_is_a_class_and_two_table_entries(tmp_path: Path, method: str, fewest: int) -> None:
    """On target ranks, and on draft ranks that share their devices: texts are plain decoding's, drafts are accepted."""
    target = make_checkpoint(tmp_path / "target", seed=1)
    draft = noisy_copy(tmp_path / "draft", target, 0.02) if method == "stepping" else None
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 33, 8, 5, 40)]
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=index, temperature=0.8 * (index % 2)) for index in range(6)
    ]
    sections = {
        "speculation": {"method": method, "draft_len": 3},
        "scheduler": {"max_batch_size": 3, "max_num_tokens": 40},
        "kv_cache": {"max_tokens": 160, "block_size": 8},
    }
    with make_llm(target, draft, **sections) as llm:
        found = tokens_of(llm.generate(prompts, sampling))
        accepted = llm.statistics()["num_accepted_draft_tokens"]
        llm.check_idle()
        llm.set_speculation(False)
        assert found == tokens_of(llm.generate(prompts, sampling))
    assert accepted >= fewest


def test_what_a_method_says_of_itself_is_held_to(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1)
    with pytest.raises(ConfigError, match=r"draft: missing, though speculation\.method is stepping"):
        make_llm(target, None, speculation={"method": "stepping"})
    with pytest.raises(ConfigError, match="use_logits does not go with method repeating"):
        make_llm(target, None, speculation={"method": "repeating", "use_logits": True})
