"""What a benchmark measures: workloads as --rows names them, and texts that differ between the two modes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
import pytest

from launch.batch.options import BenchOptions, Workload
from launch.bench.measure import Batch, Case, Draws, _count_equal, _run_once
from launch.commands.bench import parse_workloads
from trtrun.core.request_statistics import RequestStatistics
from trtrun.timing.telemetry import RunStatistics


class Flipping:
    """Stands for an LLM whose speculative texts differ from plain ones in the rows that are named."""

    def __init__(self, *rows: int) -> None:
        self._rows, self._speculates = rows, False

    def set_speculation(self, enabled: bool) -> None:
        self._speculates = enabled

    def generate(self, prompts: list[list[int]], sampling: list[Any]) -> list[Any]:
        assert len(prompts) == len(sampling)
        flips = [self._speculates and row in self._rows for row in range(len(prompts))]
        texts = [(*prompt, int(flip)) for prompt, flip in zip(prompts, flips, strict=True)]
        return [SimpleNamespace(error=None, completions=[SimpleNamespace(token_ids=text)]) for text in texts]


def draws(**options: Any) -> Draws:
    return Draws(5, 50, BenchOptions(workloads=(), max_tokens=6, **options))


def test_texts_that_flip_are_not_counted() -> None:
    batch = draws().draw(Workload(5, 8))
    assert [_count_equal(llm, batch) for llm in (Flipping(), Flipping(1), Flipping(0, 2, 4))] == [5, 4, 2]  # type: ignore[arg-type]


def test_a_workload_is_drawn_anew_each_time_and_sampled_by_seed() -> None:
    source = draws(top_p=0.9)
    first, second = source.draw(Workload(3, 8)), source.draw(Workload(3, 8, 0.7), max_tokens=2)
    assert [len(prompt) for prompt in first.prompts + second.prompts] == [8] * 6
    assert first.prompts != second.prompts
    assert all(3 <= token < 50 for prompt in first.prompts for token in prompt)
    assert {(one.temperature, one.top_p, one.max_tokens, one.ignore_eos) for one in first.sampling} == {(0, 1, 6, True)}
    assert {(one.temperature, one.top_p, one.max_tokens) for one in second.sampling} == {(0.7, 0.9, 2)}
    assert len({one.seed for one in second.sampling}) == 3
    lengths = {len(prompt) for prompt in source.draw(Workload(200, 8), mixed=True).prompts}
    assert lengths == {4, 5, 6, 7, 8}
    assert draws().draw(Workload(3, 8)) == draws().draw(Workload(3, 8))


class Making:
    """Stands for an LLM that makes as many graphs and kernels in each run."""

    def __init__(self, captures: int, compilations: int) -> None:
        self._totals = RunStatistics(num_rounds=1, num_captures=captures, num_compilations=compilations)

    def reset_statistics(self) -> None: ...

    def generate(self, prompts: list[list[int]], sampling: list[Any]) -> list[Any]:
        done = SimpleNamespace(token_ids=(1, 2), statistics=RequestStatistics(first_token=1.0, finished=2.0))
        return [SimpleNamespace(error=None, completions=[done]) for _ in prompts]

    def statistics(self) -> dict[str, Any]:
        return self._totals.as_dict()


def test_a_case_has_the_graphs_and_kernels_of_all_its_runs() -> None:
    case = Case()
    for llm in (Making(5, 20), Making(1, 3)):
        _run_once(llm, case, Batch([[4]], []))  # type: ignore[arg-type]
    told = case.as_dict()
    assert (told["num_rounds"], told["num_captures"], told["num_compilations"]) == (2, 6, 23)


def test_the_first_run_is_compared_with_the_median_of_the_others() -> None:
    assert Case(tokens_per_s=[50.0, 80.0, 1.0, 100.0, 900.0, 110.0]).first_over_next == 0.5
    assert Case(tokens_per_s=[50.0]).first_over_next is None


def test_rows_name_workloads() -> None:
    found = parse_workloads("1, 8x2000,8@0.8,4x16@1,1", 32, 0.0)
    assert found == [Workload(1, 32), Workload(8, 2000), Workload(8, 32, 0.8), Workload(4, 16, 1.0)]
    assert [str(one) for one in found[:3]] == [
        "1 row of 32 tokens", "8 rows of 2000 tokens", "8 rows of 32 tokens at temperature 0.8"
    ]  # fmt: skip
    assert parse_workloads("1,2@0", 7, 0.5) == [Workload(1, 7, 0.5), Workload(2, 7, 0.0)]


@pytest.mark.parametrize("rows", ["", "1,", "0", "8x", "8x0", "x8", "8@", "8@-1", "8@1e9", "8@.8.", "-1", "1;2"])
def test_other_rows_are_refused(rows: str) -> None:
    with pytest.raises(click.BadParameter, match="write numbers with commas between"):
        parse_workloads(rows, 32, 0.0)


def test_a_temperature_that_cannot_be_computed_with_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="temperature must be 0 or between"):
        parse_workloads("8", 32, 1e31)
