"""Training of a PARD draft: against inference with masks appended, and from the first step to the checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from training_runs import MASK, make_heads_loop, make_loop, make_method, rows_of, run
from transformers import AutoModelForCausalLM

from parallel.transports import open_communicator
from trtrun.errors import CheckpointError, ConfigError
from trtrun.models.config import read_model_config
from trtrun.tools.training.data import DataRow, batch_indexes, read_data
from trtrun.tools.training.evaluation import measure, walk
from trtrun.tools.training.loop import DivergedError, TrainingLoop
from trtrun.tools.training.methods.pard import lay_out
from trtrun.tools.training.methods.table import DraftTraining
from trtrun.tools.training.state import StateFile, rate_factor

Pair = tuple[Path, Path]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@torch.no_grad()
def test_depths_of_one_forward_are_inference_with_masks_appended(pair: Pair, data: Path) -> None:
    """The oracle is transformers on plain causal sequences, one for each place, without a mask of ours."""
    method = make_method(*pair, num_tokens=4)
    method.model.eval()
    rows = rows_of(data)[:3]
    generators = [numpy.random.default_rng([5, index]) for index in range(3)]
    layout = lay_out(rows, MASK, 4, generators, 0.7, 0.2)
    logits = method.logits(layout)
    starts, depths = layout.starts[layout.predicts].tolist(), layout.depths[layout.predicts].tolist()
    row_indexes = layout.predicted()[0].tolist()
    assert set(depths) == {0, 1, 2, 3}
    for row, start, depth, found in zip(row_indexes, starts, depths, logits, strict=True):
        tokens = [*rows[row].tokens[: start + 1], *[MASK] * depth]
        wanted = method.model(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"divergence": 0.0, "cross_entropy": 1.0}, {"optimizer": "muon"}])
def test_loss_falls_and_the_target_stays_as_it_is(
    pair: Pair, data: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    before = digests(pair[0]), digests(pair[1])
    _, loop = make_loop(*pair, data, tmp_path / "out", steps=20, **changes)
    losses = torch.tensor([line["loss"] for line in run(loop)])
    assert losses.shape == (20, 3)
    first, last = losses[:5].mean(0), losses[-5:].mean(0)
    assert bool((last < first).all()), (first, last)
    assert bool((last[1:] < 0.8 * first[1:]).all()), "what masks guess has to be learned"
    assert (digests(pair[0]), digests(pair[1])) == before


def test_the_loss_is_what_its_definition_says(pair: Pair, data: Path) -> None:
    """KL divergence from the target behind the true text, and cross-entropy with the true token: a loop."""
    method = make_method(*pair, divergence=0.7, cross_entropy=0.3)
    target = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    rows = rows_of(data)[:2]
    layout = method.prepare(rows, step=3, indexes=[0, 1])
    wanted = torch.zeros(3)
    with torch.no_grad():
        found, given = method.losses(layout), method.logits(layout).log_softmax(-1)
        row_indexes, places = layout.predicted()
        depths = layout.depths[layout.predicts].tolist()
        for row, place, depth, log_draft in zip(row_indexes.tolist(), places.tolist(), depths, given, strict=True):
            tokens = rows[row].tokens
            log_target = target(torch.tensor([tokens[: place + 1]])).logits[0, -1].log_softmax(-1)
            divergence = float((log_target.exp() * (log_target - log_draft)).sum())
            wanted[depth] += 0.7 * divergence - 0.3 * float(log_draft[tokens[place + 1]])
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)
    assert method.counts(layout).tolist() == [depths.count(depth) for depth in range(3)]


def test_steps_are_those_of_plain_torch(pair: Pair, data: Path, tmp_path: Path) -> None:
    """Each step's rows at once, and everything written out: weights of depths, clipping, warm-up and cosine."""
    changes = {"steps": 4, "depth_decay": 0.5, "clip_norm": 0.3, "weight_decay": 0.1}
    method, loop = make_loop(*pair, data, tmp_path / "out", **changes)
    run(loop)
    plain = make_method(*pair, **changes)
    rows = read_data([data], 40, 4, 199, 0).rows
    named = dict(plain.model.named_parameters())
    matrices = [value for name, value in named.items() if "proj" in name]
    others = [value for name, value in named.items() if "proj" not in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step, factor in enumerate([0.5, 1.0, 1.0, 0.55]):
        indexes = batch_indexes(len(rows), 6, step, seed=0)
        layout = plain.prepare([rows[index] for index in indexes], step, range(6))
        means = plain.losses(layout) / plain.counts(layout)
        optimizer.zero_grad()
        ((means[0] + 0.5 * means[1] + 0.25 * means[2]) / 1.75).backward()
        torch.nn.utils.clip_grad_norm_(list(named.values()), 0.3)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * factor
        optimizer.step()
    for name, value in method.model.named_parameters():
        torch.testing.assert_close(
            value, named[name], atol=2e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("method", "changes"),
    [("pard", {}), ("pard", {"optimizer": "muon"}), ("medusa", {}), ("eagle3", {"draft_vocab_size": 90})],
)
def test_a_run_that_stops_comes_to_the_same_bits(
    pair: Pair, data: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    def make(name: str) -> tuple[DraftTraining, TrainingLoop]:
        if method == "pard":
            return make_loop(*pair, data, tmp_path / name, **changes)
        return make_heads_loop(method, pair[0], data, tmp_path / name, **changes)

    whole, loop = make("whole")
    lines = run(loop)
    _, loop = make("parts")
    asked = iter([False] * 7 + [True])
    assert not loop.run(lambda line: None, lambda: next(asked))
    # As of a run that was killed behind its last checkpoint.
    StateFile(tmp_path / "parts").add_metrics({"step": 8, "loss": [0.0] * 3, "seconds": 1.0})
    resumed, loop = make("parts")
    loop.resume()
    assert loop.step == 7
    again = run(loop)
    for (name, value), (_, other) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(value, other), name
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[7:]]
    both = StateFile(tmp_path / "parts").read_metrics()
    assert [line["step"] for line in both] == list(range(1, 13))
    assert [line["loss"] for line in both] == [line["loss"] for line in lines]


def test_a_run_that_diverges_ends_with_what_was_saved_before(pair: Pair, data: Path, tmp_path: Path) -> None:
    _, loop = make_heads_loop("medusa", pair[0], data, tmp_path, learning_rate=1e30, checkpoint_steps=1)
    with pytest.raises(DivergedError, match="at step 2 its loss or gradients are no finite numbers"):
        run(loop)
    saved = StateFile(tmp_path).load()
    assert saved is not None and saved.step == 1
    assert all(bool(value.isfinite().all()) for value in saved.model.values())
    assert [line["step"] for line in StateFile(tmp_path).read_metrics()] == [1]


def test_metrics_behind_the_last_checkpoint_are_forgotten(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    file.folder.mkdir()
    for step in range(1, 8):
        file.add_metrics({"step": step, "loss": [1.0], "seconds": 1.0})
    with open(file.metrics_path, "a") as lines:
        lines.write('{"step": 8, "lo')  # killed while it wrote
    assert [line["step"] for line in file.keep_metrics(4)] == [1, 2, 3, 4]
    file.add_metrics({"step": 5, "loss": [2.0]})
    assert [line["loss"] for line in file.read_metrics()] == [[1.0]] * 4 + [[2.0]]


@pytest.mark.parametrize("damaged", ["", "[1]", "{}", '{"settings": 5}', '{"settings": "5"}'])
def test_what_a_run_that_is_done_was_may_be_damaged(tmp_path: Path, damaged: str) -> None:
    file = StateFile(tmp_path)
    file.folder.mkdir()
    assert file.finished_settings() is None
    file.finish({"settings": "{}"}, {"steps": 1})
    assert file.finished_settings() == {"settings": "{}"}
    (file.folder / "settings.json").write_text(damaged)
    with pytest.raises(CheckpointError, match=r"settings\.json cannot be used: "):
        file.finished_settings()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"seed": 1}, "--seed"), ({"num_tokens": 2}, "--num-tokens"), ({"learning_rate": 1e-3}, "--learning-rate")],
)
def test_another_run_is_not_gone_on_with(
    pair: Pair, data: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    _, loop = make_loop(*pair, data, tmp_path, steps=1)
    run(loop)
    _, other = make_loop(*pair, data, tmp_path, **{"steps": 1, **changes})
    with pytest.raises(ConfigError, match=said):
        other.resume()
    less = tmp_path / "less.jsonl"
    less.write_text("".join(data.read_text().splitlines(keepends=True)[1:]))
    _, other = make_loop(*pair, less, tmp_path, steps=1)
    with pytest.raises(ConfigError, match="another data"):
        other.resume()
    _, same = make_loop(*pair, data, tmp_path, steps=1, checkpoint_steps=50)
    same.resume()
    assert same.step == 1


@torch.no_grad()
def speculate(target: torch.nn.Module, draft: torch.nn.Module, row: list[int], prompt: int, count: int) -> list[int]:
    """Tokens of each round of greedy speculative decoding, as PARD drafts: one forward with masks appended."""
    rounds, output = [], row[:prompt]
    while len(output) + count < len(row):
        tokens = torch.tensor([[*output, *[MASK] * (count - 1)]])
        drafts = draft(tokens).logits[0, -count:].argmax(-1).tolist()
        chosen = target(torch.tensor([[*output, *drafts]])).logits[0, -count - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < count and drafts[accepted] == chosen[accepted]:
            accepted += 1
        output = [*output, *chosen[: accepted + 1]]
        rounds.append(accepted + 1)
    assert output == row[: len(output)], "speculative is plain"
    return rounds


def test_the_written_checkpoint_drafts_as_it_was_measured(pair: Pair, data: Path, tmp_path: Path) -> None:
    """transformers reads it, and rounds of real speculative decoding with it are what the evaluation counted."""
    method, loop = make_loop(*pair, data, tmp_path / "out", steps=30)
    run(loop)
    method.finish()
    output = tmp_path / "drafter"
    output.mkdir()
    method.save(output)
    config = json.loads((output / "config.json").read_text())
    assert (config["pard_token"], config["spd_type"], config["dtype"]) == (MASK, "pard", "bfloat16")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert read_model_config(output).vocab_size == 199
    draft = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    target = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    for (name, value), (_, other) in zip(draft.named_parameters(), method.model.named_parameters(), strict=True):
        assert torch.equal(value, other), name
    rows = rows_of(data)[:4]
    rounds = [speculate(target, draft, list(row.tokens), row.prompt_length, 3) for row in rows]
    method.model.eval()
    assert [walk(matches) for matches in method.matches(rows)] == [(sum(item), len(item)) for item in rounds]
    found = measure(method.matches, rows, 4, 3, loop._communicator)
    total, count = sum(map(sum, rounds)), sum(map(len, rounds))
    assert (found.tokens_per_round, found.rounds) == (round(total / count, 4), count)
    assert total > count, "some drafts are accepted"


def test_acceptance_by_depth_is_of_places_that_have_that_depth() -> None:
    matches = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 0], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    assert walk(matches) == (3, 1), "a round from place 3 could reach beyond the end"

    row = DataRow((1,) * 6, 1, False, 1)
    found = measure(lambda rows: [matches], [row], 1, 3, open_communicator(torch.device("cpu"), None, "training"))
    assert found.tokens_per_round is None, "of rows that are sampled no greedy round is known"
    assert found.by_depth == [4 / 5, 2 / 4, 0.0]


class Clock:
    """A second for each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """Seconds so far."""
        self.now += 1.0
        return self.now


def test_a_run_of_minutes_ends_by_the_clock(
    pair: Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks a step: a minute has room for thirty, in one go or in two; and the rate falls towards the end."""
    monkeypatch.setattr("trtrun.tools.training.loop.time", Clock())
    factors: list[float] = []
    monkeypatch.setattr(
        "trtrun.tools.training.loop.rate_factor", lambda *given: factors.append(rate_factor(*given)) or factors[-1]
    )

    def make() -> TrainingLoop:
        return make_loop(*pair, data, tmp_path / "out", steps=0, minutes=1.0, num_tokens=1, evaluation_steps=50)[1]

    loop = make()
    lines = run(loop)
    assert len(lines) == loop.step == loop.steps and 29 <= loop.step <= 31
    assert [line["step"] for line in lines if "tokens_per_round" in line] == [loop.step]
    assert max(factors[:4]) == 1.0 and factors[3:] == sorted(factors[3:], reverse=True) and factors[-1] < 0.12
    shutil.rmtree(tmp_path / "out")
    loop, looks = make(), iter(range(100))
    assert len(run(loop, lambda: next(looks) == 10)) == 10
    loop = make()
    loop.resume()
    factors.clear()
    more = run(loop)
    assert more[0]["step"] == 11 and 29 <= loop.step <= 31
    assert factors == sorted(factors, reverse=True) and factors[0] > 0.5, "the first step is as any other"
    loop, done = make(), loop.step
    loop.resume()
    assert not run(loop) and loop.step == done, "its time is over"
