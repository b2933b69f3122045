"""Files with EAGLE-3 heads: what each layout proposes is what the paper says, and what fits no target is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from decoder_heads import change_config, change_tensors
from eagle3_heads import Eagle3, check_proposals, eagle3, make_head, write_head
from medusa_heads import Proposals
from pipelines import make_llm, prompt_of
from safetensors.torch import load_file, save_file

from trtrun import SamplingParams
from trtrun.errors import CheckpointError
from trtrun.heads.head_reading import read_boundaries
from trtrun.speculation.drafters.eagle import EagleDrafter

PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33, 8)]
SAMPLING = [SamplingParams(max_tokens=7, seed=index, temperature=1.1 * (index % 2)) for index in range(4)]
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 40}
TENSORS = "model.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eagle3") / "target", seed=1, num_hidden_layers=7)


def run(target: Path, path: Path, head: Eagle3, patch: pytest.MonkeyPatch, **options: Any) -> Proposals:
    """Drafts of a few rows, which are the reference's, token for token."""
    seen = Proposals(patch, EagleDrafter)
    with make_llm(target, heads=path, speculation=eagle3(draft_len=3, **options), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS, SAMPLING)
    assert check_proposals(seen, target, head) > 15
    return seen


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("reference", {}),
        ("reference", {"num_tokens": 60, "boundaries": (1, 4, 6)}),
        ("specforge", {"num_tokens": 60}),
        ("specforge", {"boundaries": (5, 1, 3), "own_embedding": True, "head_dim": 24}),
        ("speculators", {"boundaries": (0, 5, 7), "norm_before_residual": True, "head_norms": True}),
        ("speculators", {"num_tokens": 90, "num_layers": 3, "norm_before_fc": True, "norm_before_residual": True}),
        ("speculators", {"fc_norm": True, "norm_output": True, "num_kv_heads": 4}),
        ("prefixed", {"hidden_size": 48, "fc_norm": True, "num_tokens": 100}),
        ("prefixed", {"biases": True, "boundaries": (2, 6), "norm_output": True}),
    ],
)
def test_drafts_are_the_papers_token_for_token(
    tmp_path: Path, target: Path, layout: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, and sampled ones with the target's random numbers; prompts in chunks."""
    head = make_head(target, **shape)
    path = write_head(tmp_path / "head", head, layout, target)
    seen = run(target, path, head, monkeypatch)
    if head.token_ids is not None:
        proposed = {token for *_, tokens, draft_len in seen.seen for token in tokens[:draft_len]}
        assert proposed <= set(head.token_ids.tolist()) and max(proposed) > len(head.token_ids)


def test_a_config_that_lies_is_read_by_the_tensors(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of vocabularies, layers, sizes that shapes show, and positions; keys that are silent of norms and heads."""
    head = make_head(target, num_tokens=80, norm_before_fc=True, num_layers=2, num_kv_heads=1)
    path = write_head(tmp_path / "head", head, "prefixed", target)
    change_config(path, draft_vocab_size=7, vocab_size=5, num_hidden_layers=9, hidden_size=3, intermediate_size=1)
    change_config(path, norm_before_fc=None, head_dim=None, num_key_value_heads=2, max_position_embeddings=16)
    run(target, path, head, monkeypatch)


def test_the_option_overrides_what_the_file_says(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(target, boundaries=(0, 3, 7))
    path = write_head(tmp_path / "head", head, "speculators", target, eagle_aux_hidden_state_layer_ids=[1, 2, 5])
    run(target, path, head, monkeypatch, eagle3_layers_to_capture=[-1, 2, 6])


def test_the_targets_own_head_serves_where_the_file_has_none(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_head(target)
    own = load_file(target / TENSORS)["lm_head.weight"].float()
    head = replace(made, tensors={**made.tensors, "lm_head.weight": own})
    path = write_head(tmp_path / "head", head, "reference", target)
    change_tensors(path, lm_head_weight=None)
    run(target, path, head, monkeypatch)


ZEROS = torch.zeros_like
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: change_tensors(path, d2t=None), "60 of the target's 199 tokens, and there is no d2t"),
        (lambda path: change_tensors(path, d2t=ZEROS), "d2t and t2d do not name the same tokens"),
        (lambda path: change_tensors(path, d2t=ZEROS, t2d=None), "zero everywhere for 60 of 199 tokens: it was not"),
        (lambda path: change_tensors(path, d2t=lambda one: one + torch.arange(60)), "leads to ids from"),
        (lambda path: change_tensors(path, d2t=lambda one: one.clone().index_fill_(0, torch.arange(3), 0) -
                                     torch.arange(60).clamp(max=2)), "leads to an id twice"),
        (lambda path: change_tensors(path, d2t=lambda one: one[:9]), r"d2t has shape \[9\], but the head is for 60"),
        (lambda path: change_tensors(path, d2t=torch.Tensor.float), "must hold whole numbers"),
        (lambda path: change_tensors(path, t2d=lambda one: one[1:]), r"t2d has shape \[198\], but the target has 199"),
        (lambda path: change_tensors(path, t2d=torch.Tensor.float), "must hold true and false"),
        (lambda path: change_tensors(path, fc_weight=None), "there is no fc.weight among its tensors"),
        (lambda path: change_tensors(path, fc_weight=lambda one: one[:, 1:]), "the head is for another target"),
        (lambda path: change_tensors(path, midlayer_hidden_norm_weight=None), "it has no layers.0.hidden_norm.weight"),
        (lambda path: change_tensors(path, norm_weight=None), "it has no norm.weight: the files are incomplete"),
        (lambda path: change_tensors(path, midlayer_mlp_up_proj_weight=None), "has no tensor 'midlayer.mlp.up_proj.w"),
        (lambda path: change_tensors(path, midlayer_self_attn_k_proj_weight=lambda one: one[:, :64]),
         r"k_proj.weight' has shape \[32, 64\], not \[32, 128\]"),
        (lambda path: change_tensors(path, fc_weight=lambda one: one[:32], norm_weight=lambda one: one[:32],
                                     lm_head_weight=lambda one: one[:, :32]), "no embed_tokens.weight, and its hidden"),
        (lambda path: change_config(path, num_attention_heads=3), "its queries have 64 numbers and its keys 32"),
        (lambda path: change_config(path, head_dim=24), "4 heads of 24 do not make"),
        (lambda path: change_config(path, num_attention_heads=None), "'num_attention_heads' must be a positive whole"),
        (lambda path: change_config(path, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (lambda path: change_config(path, norm_before_fc=True), "says norm_before_fc true, but there is no input_norm"),
        (lambda path: change_config(path, fc_norm=True), "says fc_norm true, but there is no fc_norm.0.weight"),
        (lambda path: change_config(path, norm_output=2), "'norm_output' must be true or false"),
        (lambda path: change_config(path, layer_types=["sliding_attention"]), "'sliding_window' must be a positive"),
        (lambda path: change_config(path, layer_types=["linear_attention"]), "'layer_types' must name full_at"),
        (lambda path: change_config(path, layer_types=[]), "and for layer 0 does not"),
        (lambda path: change_config(path, rope_scaling={"type": "dynamic"}), "rope type 'dynamic' is not supported"),
        (lambda path: change_config(path, eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is fal"),
        (lambda path: change_config(path, eagle_config={IDS: [1, 2]}), "2 layers are named, but fc.weight takes"),
        (lambda path: change_config(path, eagle_config={IDS: [1, 2, 2]}), "outputs of layers 1, 2, 2, one of them tw"),
        (lambda path: change_config(path, eagle_config={IDS: [1, 2, 8]}), "the output of layer 7 of a target of 7"),
        (lambda path: change_config(path, eagle_config={IDS: "all"}), "must be a list of whole numbers"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / TENSORS).rename(path / "pytorch_model.bin"), "save the heads as safetensors"),
    ],
)  # fmt: skip
def test_what_fits_no_target_is_refused_in_one_line(
    tmp_path: Path, target: Path, spoil: Callable[[Path], object], says: str
) -> None:
    path = write_head(tmp_path / "head", make_head(target, num_tokens=60), "specforge", target)
    spoil(path)
    with pytest.raises(CheckpointError, match=says) as caught:
        make_llm(target, heads=path, speculation=eagle3())
    line = str(caught.value)
    assert "\n" not in line and "head" in line


def test_other_tensors_are_refused_and_what_trainers_leave_is_not(tmp_path: Path, target: Path) -> None:
    path = write_head(tmp_path / "head", make_head(target), "speculators", target)
    whole = load_file(path / TENSORS)
    save_file(
        {**whole, "verifier_norm.weight": torch.ones(64), "verifier_lm_head.weight": torch.ones(9)}, path / TENSORS
    )
    make_llm(target, heads=path, speculation=eagle3()).close()
    for name, says in (
        ("mask_hidden", "tensor 'mask_hidden' is none that heads of EAGLE-3 have"),
        ("midlayer.mlp.up_proj.weight", "it has a tensor twice"),
        ("layers.0.self_attn.k_norm.weight", "k_norm.weight' goes with others that are not there"),
    ):
        save_file({**whole, name: torch.ones(96, 64)}, path / TENSORS)
        with pytest.raises(CheckpointError, match=says):
            make_llm(target, heads=path, speculation=eagle3())


@pytest.mark.parametrize(
    ("values", "num_layers", "expected"),
    [
        ({}, 36, (2, 18, 33)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, 32, (2, 16, 29)),
        ({"eagle_config": {"use_aux_hidden_state": True, IDS: []}}, 32, (2, 16, 29)),
        ({"eagle_config": {IDS: [1, 17, 32]}}, 36, (2, 18, 33)),
        ({"eagle_config": {IDS: [2, 18, 33]}}, 36, (2, 18, 33)),
        ({IDS: [1, 46, 90], "transformer_layer_config": {}}, 94, (2, 47, 91)),
        ({IDS: [2, 47, 91], "transformer_layer_config": {}}, 94, (2, 47, 91)),
        ({IDS: [1, 9, 20], "transformer_layer_config": {}}, 36, (1, 9, 20)),
        ({"eagle_config": {IDS: [1, 9, 20]}}, 36, (2, 10, 21)),
        ({"eagle_config": {IDS: [3, 9, 36]}}, 36, (3, 9, 36)),
    ],
)
def test_both_ways_of_naming_layers_are_told_apart(
    values: dict[str, Any], num_layers: int, expected: tuple[int, ...]
) -> None:
    """The usual layers by themselves, wherever they stand; others by the layout."""
    assert read_boundaries(values, num_layers, 3, None) == expected
    assert read_boundaries(values, num_layers, 3, [0, 1, 5]) == (1, 2, 6)


def test_a_short_target_needs_the_option(tmp_path: Path) -> None:
    short = make_checkpoint(tmp_path / "short", seed=1, num_hidden_layers=2)
    path = write_head(tmp_path / "head", make_head(short, boundaries=(0, 1, 2)), "reference", short, eagle_config=None)
    with pytest.raises(CheckpointError, match=r"names no layers.*set speculation\.eagle3_layers_to_capture"):
        make_llm(short, heads=path, speculation=eagle3())
    make_llm(short, heads=path, speculation=eagle3(eagle3_layers_to_capture=[-1, 0, 1])).close()
