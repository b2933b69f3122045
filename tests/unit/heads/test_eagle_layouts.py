"""Files with heads of EAGLE-1 and EAGLE-2: what each layout proposes is what the paper says, and what fits no target,
or is of another kind, is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import make_checkpoint
from decoder_heads import change_config, change_tensors
from eagle3_heads import check_proposals, eagle3, make_head, write_head
from eagle_heads import Eagle, eagle, make_eagle_head, write_eagle_head
from medusa_heads import Proposals
from pipelines import make_llm, prompt_of
from safetensors.torch import load_file, save_file

from trtrun import SamplingParams
from trtrun.errors import CheckpointError
from trtrun.heads.eagle_tensors import find_eagle_method
from trtrun.speculation.drafters.eagle import EagleDrafter

PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33, 8)]
SAMPLING = [SamplingParams(max_tokens=7, seed=index, temperature=1.1 * (index % 2)) for index in range(4)]
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 40}
TENSORS = "model.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eagle") / "target", seed=1)


def run(target: Path, path: Path, head: Eagle, patch: pytest.MonkeyPatch) -> None:
    """Drafts of a few rows are the reference's, token for token."""
    seen = Proposals(patch, EagleDrafter)
    with make_llm(target, heads=path, speculation=eagle(draft_len=3), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS, SAMPLING)
    assert check_proposals(seen, target, head) > 15


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("reference", {}),
        ("reference", {"fc_bias": False, "own_embedding": True, "num_layers": 2, "head_dim": 24}),
        ("reference", {"input_norm": True, "biases": True, "own_head": True}),
        ("reference", {"final_norm": True, "head_norms": True, "num_kv_heads": 4}),
        ("speculators", {"own_embedding": True}),
        ("speculators", {"fc_bias": False, "own_head": True, "num_kv_heads": 1}),
        ("vllm", {}),
        ("vllm", {"num_layers": 3, "own_embedding": True, "own_head": True}),
        ("vllm", {"input_norm": True, "final_norm": True, "fc_bias": False}),
    ],
)
def test_drafts_are_the_papers_token_for_token(
    tmp_path: Path, target: Path, layout: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, and sampled ones with the target's random numbers; prompts in chunks. vLLM's files have norms that
    do not count."""
    head = make_eagle_head(target, **shape)
    run(target, write_eagle_head(tmp_path / "head", head, layout, target), head, monkeypatch)


def add_tensors(path: Path, **added: tuple[int, ...]) -> None:
    """Tensors of such shapes beside the others."""
    others = {
        name.replace("_0_", ".0.").replace("_weight", ".weight"): torch.ones(size) for name, size in added.items()
    }
    save_file({**load_file(path / TENSORS), **others}, path / TENSORS)


def test_norms_of_a_trainer_that_has_both_count(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ModelOpt's words; what the next step reads they leave open."""
    head = make_eagle_head(target, input_norm=True, final_norm=True)
    path = write_eagle_head(tmp_path / "head", head, "reference", target, skip_prenorm=None)
    change_config(path, eagle_config={"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True})
    run(target, path, head, monkeypatch)


@pytest.mark.parametrize("said", ["skip_prenorm", "eagle_config"])
def test_norms_that_are_said_not_to_count_do_not(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    head = make_eagle_head(target)
    path = write_eagle_head(tmp_path / "head", head, "reference", target)
    save_file(
        {**load_file(path / TENSORS), "norm.weight": torch.full((64,), 3.0),
         "layers.0.input_layernorm.weight": torch.full((64,), 3.0)},
        path / TENSORS,
    )  # fmt: skip
    if said == "skip_prenorm":
        change_config(path, skip_prenorm=True, skip_output_norm=True)
    else:
        change_config(path, eagle_config={"use_input_layernorm_in_first_layer": False, "use_last_layernorm": False})
    run(target, path, head, monkeypatch)


def test_a_config_that_lies_is_read_by_the_tensors(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of vocabularies, layers, sizes that shapes show, and positions; keys that are silent of biases and heads."""
    head = make_eagle_head(target, num_layers=2, num_kv_heads=1)
    path = write_eagle_head(tmp_path / "head", head, "reference", target)
    change_config(path, vocab_size=5, num_hidden_layers=9, hidden_size=3, intermediate_size=1, bias=None)
    change_config(path, num_key_value_heads=2, max_position_embeddings=16)
    run(target, path, head, monkeypatch)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: change_tensors(path, fc_weight=None), "it has no head of EAGLE: there is no fc.weight"),
        (lambda path: change_tensors(path, fc_weight=lambda one: one[:, 1:]), "the head is for another target"),
        (lambda path: change_tensors(path, fc_weight=lambda one: one[:32]), r"must be \[64, 128\]: the head is for an"),
        (lambda path: change_tensors(path, fc_bias=None), "config.json says bias true, but there is no fc.bias"),
        (lambda path: change_tensors(path, fc_bias=lambda one: one[1:]), r"'fc.bias' has shape \[63\], not \[64\]"),
        (lambda path: change_config(path, bias=False), "config.json says bias false, but there is a fc.bias"),
        (lambda path: change_tensors(path, layers_0_mlp_up_proj_weight=None), "has no tensor 'layers.0.mlp.up_proj.w"),
        (lambda path: change_tensors(path, layers_0_post_attention_layernorm_weight=None),
         "it has no layers.0.post_attention_layernorm.weight: the files are incomplete"),
        (lambda path: change_tensors(path, embed_tokens_weight=lambda one: one[1:]),
         r"embed_tokens.weight' has shape \[198, 64\], not \[199, 64\]"),
        (lambda path: change_tensors(path, lm_head_weight=lambda one: one[:90]),
         "lm_head.weight is for 90 of the target's 199 tokens, and there is no d2t"),
        (lambda path: change_tensors(path, layers_0_self_attn_k_proj_weight=lambda one: one[:, :32]),
         r"k_proj.weight' has shape \[32, 32\], not \[32, 64\]"),
        (lambda path: add_tensors(path, layers_0_input_layernorm_weight=(64,)),
         "does not say whether this one does: write skip_prenorm: true there, or false"),
        (lambda path: add_tensors(path, norm_weight=(64,)), "write skip_output_norm: true there, or false"),
        (lambda path: change_config(path, skip_prenorm=False), "calls for layers.0.input_layernorm.weight, which is n"),
        (lambda path: change_config(path, skip_output_norm="no"), "'skip_output_norm' must be true or false"),
        (lambda path: change_config(path, eagle_config={"use_last_layernorm": True}), "add skip_output_norm: false"),
        (lambda path: change_config(path, layernorms=True), "heads with norms around fc are not supported"),
        (lambda path: add_tensors(path, enorm_weight=(64,)), "it has enorm.weight: heads with norms around fc"),
        (lambda path: add_tensors(path, token_map=(9,)), "it has a token_map: EAGLE heads for a part of the target's"),
        (lambda path: add_tensors(path, mask_hidden=(9,)), "tensor 'mask_hidden' is none that heads of EAGLE have"),
        (lambda path: add_tensors(path, transformer_0_weight=(9,)), "tensor 'transformer.0.weight' is none that heads"),
        (lambda path: change_config(path, num_attention_heads=3), "its queries have 64 numbers and its keys 32"),
        (lambda path: change_config(path, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
    ],
)  # fmt: skip
def test_what_fits_no_target_is_refused_in_one_line(
    tmp_path: Path, target: Path, spoil: Callable[[Path], object], says: str
) -> None:
    head = make_eagle_head(target, own_embedding=True, own_head=True)
    path = write_eagle_head(tmp_path / "head", head, "reference", target)
    spoil(path)
    with pytest.raises(CheckpointError, match=says) as caught:
        make_llm(target, heads=path, speculation=eagle())
    line = str(caught.value)
    assert "\n" not in line and "head" in line


def test_pickle_is_refused_with_a_line_that_converts_it(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reference's files are."""
    head = make_eagle_head(target, own_embedding=True)
    path = write_eagle_head(tmp_path / "head", head, "reference", target)
    torch.save(load_file(path / TENSORS), path / "pytorch_model.bin")
    (path / TENSORS).unlink()
    with pytest.raises(CheckpointError, match=r"only as pickle \(pytorch_model\.bin\)") as caught:
        make_llm(target, heads=path, speculation=eagle())
    monkeypatch.chdir(path)
    _, _, way = str(caught.value).partition("save the heads as safetensors, such as by ")
    eval(way, {"torch": torch, "safetensors": safetensors})
    run(target, path, head, monkeypatch)


@pytest.mark.parametrize("layout", ["reference", "speculators", "vllm"])
def test_a_head_of_the_other_kind_is_refused_with_the_name_of_its_method(
    tmp_path: Path, target: Path, layout: str
) -> None:
    old = write_eagle_head(tmp_path / "old", make_eagle_head(target), layout, target)
    # With two taps fc of EAGLE-3 is as large as that of EAGLE.
    new = write_head(tmp_path / "new", make_head(target, boundaries=(0, 2)), "prefixed", target)
    with pytest.raises(CheckpointError, match=r"a head of EAGLE-1 or EAGLE-2: set speculation\.method to eagle$"):
        make_llm(target, heads=old, speculation=eagle3())
    with pytest.raises(CheckpointError, match=r"a head of EAGLE-3: set speculation\.method to eagle3$"):
        make_llm(target, heads=new, speculation=eagle())
    assert [find_eagle_method(path) for path in (old, new, tmp_path)] == ["eagle", "eagle3", "eagle3"]
