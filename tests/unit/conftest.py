"""What tests of the Python API share: one tiny checkpoint with a draft, and an LLM on it for each test file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_tokenizer
from interpreted import remember_builtins
from native import compute_as
from pipelines import LLM_VOCABULARY, make_llm, noisy_copy

from trtrun import LLM
from trtrun.kernels.cpu import machine

if not torch.cuda.is_available():
    # Read when triton is imported, by whichever test file is the first: its interpreter runs the kernels of GPUs.
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        remember_builtins()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `draft`, whose tokenizer has all bytes and 26 pairs of letters; token 0 ends a text."""
    folder = tmp_path_factory.mktemp("llm")
    make_checkpoint(folder / "target", seed=1, vocab_size=LLM_VOCABULARY, num_hidden_layers=3, eos_token_id=0)
    make_tokenizer(folder / "target", merges=26)
    noisy_copy(folder / "draft", folder / "target", 0.05)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """A speculating LLM that sends plans ahead."""
    settings: dict[str, Any] = {
        "scheduler": {"max_batch_size": 8, "max_num_tokens": 128, "plans_ahead": 1},
        "speculation": {"draft_len": 4},
        "kv_cache": {"max_tokens": 2048, "block_size": 8},
    }
    with make_llm(folder / "target", folder / "draft", **settings) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _idle_is_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test all blocks of the shared LLM are free or cached."""
    yield
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm").check_idle()


@pytest.fixture(params=[1, 5])
def each_number_of_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch's threads, also more of them than a small machine has cores; all take part in the least of work."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "WORTH_A_TEAM_NS", 0)
        yield
    torch.set_num_threads(before)


@pytest.fixture
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of processor as which models compute; see native.py."""
    kind: str = request.param
    compute_as(kind, monkeypatch)
    return kind


@pytest.fixture
def sampling_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling takes its kernels in the interpreter, too; and pieces are small, so that small lines have several."""
    from trtrun.kernels.triton.operations import TritonOperations
    from trtrun.kernels.triton.sampling import acceptance, lines, threshold, token_choice
    from trtrun.sampling import distributions, keyed_ranks
    from trtrun.speculation import verify

    for module in (distributions, keyed_ranks, verify):
        monkeypatch.setattr(module, "operations_of", lambda device_type: TritonOperations())
    if not torch.cuda.is_available():
        for module in (acceptance, lines, threshold, token_choice):
            monkeypatch.setattr(module, "PIECE", 32)
        monkeypatch.setattr(threshold, "CANDIDATES", 128)
