"""A pair and its data, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training_runs import make_data, make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft; nobody may change them."""
    return make_pair(tmp_path_factory.mktemp("training_pair"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> Path:
    """Rows that the target made."""
    return make_data(tmp_path_factory.mktemp("training_data") / "data.jsonl", pair[0])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in one order, so that runs can be compared bit by bit; and models this small have no use for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
