"""Which layers run the same kernels, and what of a model runs before a graph of it is captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint
from gpus import needs_gpu
from paged import PagedModel

from trtrun.layers.uniform_layers import are_uniform


class Part:
    """Of anything."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Promised(Protocol):
    """What a class may name as its base, to say that it keeps to it."""

    number: int


class Promising(Promised):
    """Has its attributes as any class has."""

    def __init__(self, number: int) -> None:
        self.number = number


class Hidden:
    """Cannot be looked into."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def adds(number: int, seen: list[int] | None = None) -> Callable[[int], int]:
    """A function with something around it."""
    return lambda other: number + other + len(seen or ())


def waits() -> Callable[[], int]:
    """A function with something around it that is not there yet."""
    if False:
        later = 1
    return lambda: later


def shifted(numbers: int) -> torch.Tensor:
    """One that begins so many numbers of 4 bytes behind 64."""
    memory = torch.zeros(64)
    start = -memory.data_ptr() % 64 // 4 + numbers
    return memory[start : start + 8]


PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "tensors of a kind": (torch.zeros(2, 3), torch.ones(2, 3), True),
    "another shape": (torch.zeros(2, 3), torch.zeros(3, 2), False),
    "another dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
    "other steps": (torch.zeros(3, 3), torch.zeros(3, 3).t(), False),
    "another beginning": (shifted(0), shifted(1), False),
    "beginnings of a kind": (shifted(0), shifted(4), True),
    "a tensor or none": (torch.zeros(2), None, False),
    "windows": (Part(window=7), Part(window=8), False),
    "a window or none": (Part(window=7), Part(window=None), False),
    "parts": (Part(one=Part(eps=1e-5)), Part(one=Part(eps=1e-5)), True),
    "parts of other classes": (Part(), object(), False),
    "more parts": (Part(one=1), Part(one=1, two=None), False),
    "rows of parts": ([Part(a=1), Part(a=2)], [Part(a=1), Part(a=2)], True),
    "longer rows": ((Part(),), (Part(), Part()), False),
    "other names": ({"codes": 1}, {"words": 1}, False),
    "functions": (adds(1), adds(1), True),
    "functions with other things around": (adds(1), adds(2), False),
    "functions with rows around": (adds(1, [1]), adds(1, [1, 2]), False),
    "functions that wait for a name": (waits(), waits(), False),
    "other functions": (adds(1), lambda other: other, False),
    "methods": (Part(a=1).__init__, Part(a=1).__init__, True),  # type: ignore[misc]
    "methods of other parts": (Part(a=1).__init__, Part(a=2).__init__, False),  # type: ignore[misc]
    "partials": (partial(adds, 1), partial(adds, 1), True),
    "other partials": (partial(adds, 1), partial(adds, 2), False),
    "what cannot be looked into": (Hidden(1), Hidden(1), False),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_only_what_cannot_choose_a_kernel_may_differ(kind: str) -> None:
    one, other, is_alike = PAIRS[kind]
    assert are_uniform([one, other]) is is_alike and are_uniform([other, one]) is is_alike
    assert are_uniform([one, one]) and are_uniform([one])
    assert are_uniform([one, one, other]) is is_alike


def test_parts_within_themselves_are_not_told() -> None:
    rings = [Part(), Part()]
    for ring in rings:
        ring.around = ring
    assert not are_uniform(rings) and are_uniform([rings[0], rings[0]])


MIXED: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "Qwen3ForCausalLM": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}


def layers_run(paged: PagedModel, *, first: bool) -> list[int]:
    """How many layers a forward runs on each rank, the first of a graph or another."""
    ran = [0] * len(paged.models)

    def count(rank: int) -> None:
        ran[rank] += 1

    with ExitStack() as stack:
        for rank, model in enumerate(paged.models):
            model.on_layer = partial(count, rank)
            if first:
                stack.enter_context(model.first_run())
        paged.forward([[(int(first), 0, [5, 7, 9])]])
    return ran


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_of_like_layers_the_first_and_the_last_run_first(tmp_path: Path, architecture: str) -> None:
    model = PagedModel(make_checkpoint(tmp_path, architecture, num_hidden_layers=4))
    assert [layers_run(model, first=first) for first in (True, False, True)] == [[2], [4], [2]]


@needs_gpu
@pytest.mark.parametrize("quantization", ["none", "fp8", "fp8_block", "fp8_weight_only", "int8"])
def test_like_layers_are_told_on_a_gpu(tmp_path: Path, quantization: str) -> None:
    path = make_checkpoint(tmp_path, "Qwen2ForCausalLM", dtype=torch.bfloat16, num_hidden_layers=4)
    model = PagedModel(path, torch.bfloat16, quantization=quantization, device=torch.device("cuda"))
    assert [layers_run(model, first=first) for first in (True, False, True)] == [[2], [4], [2]]


@pytest.mark.parametrize("architecture", MIXED)
def test_of_layers_that_differ_all_run_first(tmp_path: Path, architecture: str) -> None:
    model = PagedModel(make_checkpoint(tmp_path, architecture, num_hidden_layers=4, **MIXED[architecture]))
    assert layers_run(model, first=True) == [4]


def test_a_model_of_few_layers_runs_all(tmp_path: Path) -> None:
    model = PagedModel(make_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=2))
    assert layers_run(model, first=True) == [2]


def test_ranks_of_a_group_run_all_unless_all_agree(tmp_path: Path) -> None:
    """Until somebody has asked each of them, as layers meet in sums."""
    paged = PagedModel(make_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=4), tp_size=2)
    assert layers_run(paged, first=True) == [4, 4]
    for model in paged.models:
        assert model.has_like_layers
        model.shortens_first_runs = True
    assert layers_run(paged, first=True) == [2, 2] and layers_run(paged, first=False) == [4, 4]


def test_a_class_may_name_the_protocol_that_it_keeps_to() -> None:
    assert are_uniform([Promising(1), Promising(1)]) and not are_uniform([Promising(1), Promising(2)])
