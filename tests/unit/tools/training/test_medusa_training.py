"""Training of Medusa heads: losses and matches against a plain loop, and the checkpoint in its authors' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from training_runs import make_heads, make_heads_loop, rows_of, run
from transformers import LlamaForCausalLM

from trtrun.tools.training.data import DataRow
from trtrun.tools.training.methods.medusa import WEIGHTS, MedusaMethod

Pair = tuple[Path, Path]


def make_medusa(target: Path, **changes: Any) -> MedusaMethod:
    made = make_heads("medusa", target, **changes)
    assert isinstance(made, MedusaMethod)
    return made


def guess(weights: dict[str, torch.Tensor], head: int, hidden: torch.Tensor) -> torch.Tensor:
    """A head as its authors' code computes it, from the names of a checkpoint."""
    block = 0
    while f"{head}.{block}.linear.weight" in weights:
        names = f"{head}.{block}.linear.weight", f"{head}.{block}.linear.bias"
        hidden = hidden + functional.silu(functional.linear(hidden, *(weights[name] for name in names)))
        block += 1
    return functional.linear(hidden, weights[f"{head}.{block}.weight"])


def test_heads_begin_as_the_targets_own(pair: Pair, data: Path) -> None:
    method = make_medusa(pair[0])
    weight = LlamaForCausalLM.from_pretrained(pair[0], dtype=torch.float32).lm_head.weight
    hidden = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
    for head in method.model:
        torch.testing.assert_close(head(hidden), functional.linear(hidden, weight))


@pytest.mark.parametrize(("divergence", "cross_entropy"), [(0.0, 1.0), (0.6, 0.4)])
def test_losses_are_what_their_definition_says(pair: Pair, data: Path, divergence: float, cross_entropy: float) -> None:
    """Head h on the hidden state that makes token i + 1 guesses token i + 2 + h, if that is the completion's."""
    method = make_medusa(pair[0], divergence=divergence, cross_entropy=cross_entropy)
    with torch.no_grad():
        for index, value in enumerate(method.model.parameters()):
            value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(index))
    target = LlamaForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    rows, weights = rows_of(data)[:3], dict(method.model.state_dict())
    wanted, counts = torch.zeros(3), [0, 0, 0]
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([row.tokens])
            hidden = target.model(tokens).last_hidden_state[0]
            log_probs = target(tokens).logits[0].log_softmax(-1)
            for head in range(3):
                for place in range(len(row.tokens) - 2 - head):
                    if place + 2 + head < row.prompt_length:
                        continue
                    given = guess(weights, head, hidden[place]).log_softmax(-1)
                    truth = log_probs[place + 1 + head]
                    wanted[head] += divergence * float((truth.exp() * (truth - given)).sum())
                    wanted[head] -= cross_entropy * float(given[row.tokens[place + 2 + head]])
                    counts[head] += 1
        prepared = method.prepare(rows, 0, range(3))
        torch.testing.assert_close(method.losses(prepared), wanted, atol=1e-3, rtol=1e-4)
    assert method.counts(prepared).tolist() == counts


@pytest.mark.parametrize("layers", [1, 2])
def test_what_is_written_drafts_as_it_was_measured(pair: Pair, data: Path, tmp_path: Path, layers: int) -> None:
    """Rounds of greedy decoding with heads of the file: the bonus token is known, and heads guess behind it."""
    before = {path.name: path.read_bytes() for path in pair[0].iterdir()}
    method, loop = make_heads_loop(
        "medusa", pair[0], data, tmp_path / "out", steps=25, num_tokens=2, medusa_layers=layers
    )
    losses = torch.tensor([line["loss"] for line in run(loop)])
    assert bool((losses[-5:].mean(0) < 0.9 * losses[:5].mean(0)).all())
    method.finish()
    output = tmp_path / "heads"
    output.mkdir()
    method.save(output)
    assert {path.name: path.read_bytes() for path in pair[0].iterdir()} == before
    config = json.loads((output / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, layers)
    assert config["base_model_name_or_path"] == str(pair[0])
    weights = load_file(output / WEIGHTS)
    parts = [f"{layer}.linear.{name}" for layer in range(layers) for name in ("bias", "weight")]
    assert sorted(weights) == [f"{head}.{name}" for head in range(2) for name in (*parts, f"{layers}.weight")]
    if layers == 2:
        assert not torch.equal(weights["0.0.linear.weight"], weights["0.1.linear.weight"])
    target = LlamaForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    found = 0
    for row, table in zip(rows_of(data)[:4], method.matches(rows_of(data)[:4]), strict=True):
        assert table.shape == (len(row.tokens) - row.prompt_length, 2)
        for known in range(len(table)):
            read = row.prompt_length + known - 1  # tokens that the target has read: all but the newest
            with torch.no_grad():
                hidden = target.model(torch.tensor([row.tokens[:read]])).last_hidden_state[0, -1]
            drafts = [int(guess(weights, head, hidden).argmax()) for head in range(2)]
            true = list(row.tokens[read + 1 : read + 3])
            assert table[known].tolist() == [drafts[head] in true[head : head + 1] for head in range(2)]
            found += int(table[known].sum())
    assert found > 0


def test_a_row_of_one_known_token_has_no_hidden_state_to_guess_from(pair: Pair) -> None:
    (table,) = make_medusa(pair[0]).matches([DataRow((1, 2, 3, 4), 1, True, 1)])
    assert table.shape == (3, 3) and not table[0].any()
