"""Training of an EAGLE-3 head: its steps against drafting in plain torch, the loss by its definition, and what is
written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from eagle3_heads import Eagle3, check_proposals, eagle3
from medusa_heads import Proposals
from own_drafters import hidden_states
from pipelines import Reference, make_llm, tokens_of
from safetensors.torch import load_file
from training_runs import VOCABULARY, make_heads, make_heads_loop, rows_of, run

from trtrun import SamplingParams
from trtrun.errors import ConfigError
from trtrun.heads.head_reading import read_boundaries
from trtrun.speculation.drafters.eagle import EagleDrafter
from trtrun.tools.training.data import DataRow
from trtrun.tools.training.methods.eagle3 import Eagle3Method
from trtrun.tools.training.methods.eagle3_config import choose_boundaries, commonest_tokens, make_config

Pair = tuple[Path, Path]
Tensors = dict[str, torch.Tensor]


def make_head(target: Path, data: Path, **changes: Any) -> Eagle3Method:
    made = make_heads("eagle3", target, rows_of(data), **changes)
    assert isinstance(made, Eagle3Method)
    return made


def shake(method: Eagle3Method) -> None:
    """Weights that no symmetry hides, norms too."""
    with torch.no_grad():
        for index, value in enumerate(method.model.parameters()):
            value += 0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(index))


def reference_head(tensors: Tensors, config: dict[str, Any], target: Path) -> Eagle3:
    """The plain-torch head of tensors and config.json as they are written."""
    token_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return Eagle3(
        {name.replace("midlayer.", "layers.0."): value.float() for name, value in tensors.items()},
        tuple(one + 1 for one in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        load_file(target / "model.safetensors")["model.embed_tokens.weight"].float(),
        token_ids,
        theta=config["rope_theta"],
    )


def written(method: Eagle3Method, path: Path) -> tuple[Tensors, dict[str, Any]]:
    path.mkdir()
    method.save(path)
    return load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("layers", [None, (0,), (2, -1, 0)])
def test_steps_and_losses_are_those_of_drafting_with_own_states(
    pair: Pair, data: Path, tmp_path: Path, layers: tuple[int, ...] | None
) -> None:
    """From each place of a row a draft of its own, step by step, without a mask or a cache; rows of several lengths."""
    settings = {"divergence": 0.7, "cross_entropy": 0.3, "draft_vocab_size": 90, "eagle3_layers_to_capture": layers}
    method = make_head(pair[0], data, **settings)
    shake(method)
    reference, head = Reference(pair[0]), reference_head(*written(method, tmp_path / "head"), pair[0])
    assert head.token_ids is not None and len(head.token_ids) == 90
    known, rows = head.token_ids.tolist(), [*rows_of(data)[:2], DataRow((5, 6), 1, True, 9), rows_of(data)[3]]
    batch = method.prepare(rows, 0, range(len(rows)))
    with torch.no_grad():
        found = method._unroll(method._target.read(batch.text, method.boundaries), batch)
    wanted, counts, outside = torch.zeros(3), [0, 0, 0], Counter[str]()
    for index, row in enumerate(rows):
        states, log_probs = hidden_states(reference, list(row.tokens)), reference.logits(row.tokens).log_softmax(-1)
        for place in range(len(row.tokens) - 2):
            hidden = head.fuse(states[: place + 1])
            for depth in range(min(3, len(row.tokens) - 2 - place)):
                made = head.states(row.tokens[1 : place + 2 + depth], hidden)
                torch.testing.assert_close(found[depth][index, place], made[-1], atol=1e-4, rtol=1e-4)
                hidden = torch.cat((hidden, made[-1:]))
                guessed = place + 2 + depth
                if guessed < row.prompt_length:
                    continue
                counts[depth] += 1
                given = head.logits(made[-1:], VOCABULARY)[0, known].log_softmax(-1)
                truth = log_probs[guessed - 1, known].log_softmax(-1)
                if int(log_probs[guessed - 1].argmax()) in known:
                    wanted[depth] += 0.7 * float((truth.exp() * (truth - given)).sum())
                else:
                    outside["choices"] += 1
                if row.tokens[guessed] in known:
                    wanted[depth] -= 0.3 * float(given[known.index(row.tokens[guessed])])
                else:
                    outside["tokens"] += 1
    assert outside["choices"] and outside["tokens"], "nothing was to be masked"
    assert method.counts(batch).tolist() == counts
    torch.testing.assert_close(method.losses(batch), wanted, atol=2e-3, rtol=1e-4)


def test_gradients_flow_into_the_head_alone(pair: Pair, data: Path) -> None:
    method = make_head(pair[0], data)
    method.losses(method.prepare(rows_of(data)[:3], 0, range(3)))[2].backward()
    assert all(bool(value.grad.abs().sum() > 0) for value in method.model.parameters())
    frozen = dict(method._target.model.named_parameters())
    assert all(value.grad is None and not value.requires_grad for value in frozen.values())
    assert not {id(value) for value in frozen.values()} & {id(value) for value in method.model.parameters()}


def test_what_is_written_drafts_as_it_was_measured(
    pair: Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the runtime's reader and by plain torch, along rows that the target made."""
    before = {path.name: path.read_bytes() for path in pair[0].iterdir()}
    changes = {"steps": 30, "draft_vocab_size": 120, "depth_decay": 0.8}
    method, loop = make_heads_loop("eagle3", pair[0], data, tmp_path / "out", **changes)
    assert isinstance(method, Eagle3Method)
    losses = torch.tensor([line["loss"] for line in run(loop)])
    assert bool((losses[-5:].mean(0) < 0.8 * losses[:5].mean(0)).all())
    method.finish()
    output = tmp_path / "head"
    tensors, config = written(method, output)
    assert {path.name: path.read_bytes() for path in pair[0].iterdir()} == before
    assert sorted(name for name in tensors if not name.startswith("midlayer.")) == [
        *("d2t", "fc.weight", "lm_head.weight", "norm.weight", "t2d"),
    ]
    token_ids = tensors["d2t"] + torch.arange(120)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), token_ids)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCABULARY, 120)
    head, reference = reference_head(tensors, config, pair[0]), Reference(pair[0])
    rows, found = rows_of(data)[:4], 0
    for row, table in zip(rows, method.matches(rows), strict=True):
        assert table.shape == (len(row.tokens) - row.prompt_length, 3)
        for known in range(len(table)):
            text, true = list(row.tokens[: row.prompt_length + known]), list(row.tokens[row.prompt_length + known :])
            drafts = head.draft(reference, text, 3, 0.0, 0)
            agree = [drafts[: depth + 1] == true[: depth + 1] for depth in range(min(3, len(true)))]
            agree += [False] * (3 - len(agree))
            assert table[known].long().cumprod(0).bool().tolist() == agree
            found += sum(agree)
    assert found > 0
    seen, prompts = Proposals(monkeypatch, EagleDrafter), [list(row.tokens[: row.prompt_length]) for row in rows]
    sampling = [SamplingParams(max_tokens=18, temperature=0.7 * (index % 2), seed=index) for index in range(4)]
    with make_llm(pair[0]) as llm:
        plain = tokens_of(llm.generate(prompts, sampling))
    with make_llm(pair[0], heads=output, speculation=eagle3(draft_len=3)) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == plain
        assert llm.statistics()["num_accepted_draft_tokens"] > 0
    assert check_proposals(seen, pair[0], head) > 20


def test_a_row_of_one_known_token_has_no_hidden_state_to_guess_from(pair: Pair, data: Path) -> None:
    method = make_head(pair[0], data)
    table, short = method.matches([DataRow((1, 2, 3, 4), 1, True, 1), DataRow((1, 2), 1, True, 2)])
    assert table.shape == (3, 3) and not table[0].any()
    assert short.shape == (1, 3) and not short.any()


def test_the_vocabulary_is_the_commonest_tokens_of_completions(tmp_path: Path) -> None:
    rows = [DataRow((9, 9, 9, 3, 5, 3), 3, True, 1), DataRow((8, 7, 5, 3), 1, True, 2)]
    assert commonest_tokens(rows, 10, 2) == [3, 5]
    assert commonest_tokens(rows, 10, 3) == [3, 5, 7]
    assert commonest_tokens(rows, 10, 5) == [0, 1, 3, 5, 7], "what no completion holds comes last, in order"
    assert commonest_tokens(rows, 10, None) == list(range(10))
    with pytest.raises(ConfigError, match="--draft-vocab-size is 11, but the target has 10 tokens"):
        commonest_tokens(rows, 10, 11)


OF_TARGET = {
    **{"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50},
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("num_layers", range(2, 41))
def test_layers_that_are_written_are_read_as_they_were_meant(num_layers: int) -> None:
    boundaries = choose_boundaries(num_layers, None)
    assert len(set(boundaries)) == 3 and sorted(boundaries) == list(boundaries)
    assert num_layers < 7 or boundaries == (2, num_layers // 2, num_layers - 3)
    given = [(-1, 0), (num_layers - 1, 0), (num_layers - 1,), (0, 1, num_layers - 1)]
    for layers in (layers for layers in given if len(set(layers)) == len(layers)):
        own = choose_boundaries(num_layers, layers)
        assert own == tuple(layer + 1 for layer in layers)
        assert read_boundaries(make_config(OF_TARGET, own, 50, "float32"), num_layers, len(own), None) == own
    assert read_boundaries(make_config(OF_TARGET, boundaries, 50, "float32"), num_layers, 3, None) == boundaries


@pytest.mark.parametrize(
    ("num_layers", "layers", "said"),
    [
        (1, None, "and one of 1 layer has two: name them with --eagle3-layers-to-capture -1,0"),
        (12, (1, 5, 12), "the target has no layer 12: name some from -1, the embedding, to 11"),
        (12, (1, -2), "the target has no layer -2"),
        (12, (1, 5, 5), "a layer stands there twice"),
        (12, (2, 6, 9), "runtimes take 2,6,9 for inputs of layers, not outputs: name others, or 1,5,8"),
    ],
)
def test_layers_that_nobody_could_read_are_refused(num_layers: int, layers: tuple[int, ...] | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        choose_boundaries(num_layers, layers)
    assert "\n" not in str(raised.value)


def test_a_head_has_the_targets_rotation_and_size_of_heads(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rope type with numbers of its own, and a head_dim that is not hidden / heads: rows that go on with what the
    runtime drafted are wholly as the method guesses."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    target = make_checkpoint(tmp_path / "target", "Qwen3ForCausalLM", num_hidden_layers=2, rope=rope)
    method = make_head(target, data)
    shake(method)
    output = tmp_path / "head"
    _, config = written(method, output)
    assert (config["rope_theta"], config["head_dim"], config["rope_scaling"]["rope_type"]) == (500.0, 24, "llama3")
    seen = Proposals(monkeypatch, EagleDrafter)
    with make_llm(target, heads=output, speculation=eagle3(draft_len=3)) as llm:
        llm.generate([list(rows_of(data)[0].tokens)], SamplingParams(max_tokens=12))
    drafted = [(text, tokens) for text, _, _, tokens, draft_len in seen.seen if draft_len == 3]
    tables = method.matches([DataRow((*text, *tokens), len(text), True, 1) for text, tokens in drafted])
    assert len(tables) > 2 and all(bool(table[0].all()) for table in tables)
