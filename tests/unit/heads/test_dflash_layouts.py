"""Files with DFlash and DSpark heads: what each layout proposes is what its authors say, and what fits no target is
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from dflash_heads import LAYOUTS, check_proposals, dflash, make_dflash, method_of, write_dflash
from eagle3_heads import make_head, write_head
from medusa_heads import Proposals
from pipelines import make_llm, prompt_of
from safetensors.torch import load_file, save_file

from trtrun import SamplingParams
from trtrun.configuration.drafting.head_methods import DFlashSection
from trtrun.errors import CheckpointError
from trtrun.heads.heads import read_heads
from trtrun.models.config import read_model_config
from trtrun.speculation.drafters.dflash import DFlashDrafter

PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33, 8)]
SAMPLING = [
    SamplingParams(max_tokens=7, seed=index, temperature=1.1 * (index % 2), draft_len=2 if index == 3 else None)
    for index in range(4)
]
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 40}
TENSORS = "model.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dflash") / "target", seed=1, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("layout", "shape", "draft_len"),
    [
        *((layout, {}, 3) for layout in LAYOUTS),
        ("dflash", {"is_causal": True}, 3),
        ("dflash", {"num_layers": 1, "boundaries": (2,), "num_kv_heads": 4}, 5),
        ("speculators", {"num_tokens": 90}, 1),
        ("dspark", {"is_gated": True}, 4),
        ("speculators dspark", {"num_tokens": 90, "num_layers": 3}, 6),
    ],
)
def test_drafts_are_the_authors(
    tmp_path: Path,
    target: Path,
    layout: str,
    shape: dict[str, Any],
    draft_len: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Token for token, of rows in company, one of which needs fewer."""
    head = make_dflash(target, layout, **shape)
    path = write_dflash(tmp_path / "head", head, layout, target)
    seen = Proposals(monkeypatch, DFlashDrafter)
    with make_llm(target, heads=path, speculation=dflash(layout, draft_len=draft_len), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS, [sampling if draft_len > 2 else SamplingParams(max_tokens=7) for sampling in SAMPLING])
    assert check_proposals(seen, target, head) > 15


def read(path: Path, target: Path, method: str = "dflash", draft_len: int = 3) -> Any:
    return read_heads(path, read_model_config(target), DFlashSection(method=method, draft_len=draft_len))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_head_is_stands_in_its_plan(tmp_path: Path, target: Path, layout: str) -> None:
    head = make_dflash(target, layout)
    plan = read(write_dflash(tmp_path / "head", head, layout, target), target, method_of(layout))
    assert plan.taps == head.boundaries and plan.num_logits == 3
    kind = "DSpark head of 2 layers and a Markov head" if layout.endswith("dspark") else "DFlash head of 2 layers"
    assert plan.describe() == (
        f"{kind}, 199 of 199 tokens, blocks of 6, reading outputs of the target's layers 0, -1, 2"
    )


def test_the_first_token_is_said_where_the_file_says_it_is(tmp_path: Path, target: Path) -> None:
    """DSpark's at the newest token, DFlash's at the first mask token, unless config.json says otherwise."""
    for layout, changes, expected in (
        ("dflash", {}, False),
        ("dspark", {}, True),
        ("dflash", {"sample_from_anchor": True}, True),
        ("speculators dspark", {"sample_from_anchor": False}, False),
        ("dflash", {"shift_label": True}, True),
    ):
        path = write_dflash(tmp_path / layout / str(changes), make_dflash(target, layout), layout, target, **changes)
        assert read(path, target, method_of(layout)).from_newest == expected


def change_config(path: Path, nested: dict[str, Any] | None = None, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= changes
    config["dflash_config"] |= nested or {}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / TENSORS)
    change(tensors)
    save_file(tensors, path / TENSORS)


def drop(path: Path, name: str) -> None:
    change_tensors(path, lambda tensors: tensors.pop(name))


def add(path: Path, name: str, *shape: int) -> None:
    change_tensors(path, lambda tensors: tensors.update({name: torch.ones(shape)}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: change_config(path, nested={"target_layer_ids": None}), "must be the list of the target's l"),
        (lambda path: change_config(path, nested={"target_layer_ids": [0, 1]}), "names 2 layers, but fc.weight takes"),
        (lambda path: change_config(path, nested={"target_layer_ids": [0, 1, 3]}), "which trainers take before or beh"),
        (lambda path: change_config(path, nested={"target_layer_ids": [0, 1, 9]}), "output of layer 9 of a target of"),
        (lambda path: change_config(path, nested={"target_layer_ids": [0, 1, 1]}), "names a layer twice"),
        (lambda path: change_config(path, num_target_layers=36), "num_target_layers 36, but the target has 4"),
        (lambda path: change_config(path, nested={"mask_token_id": 199}), "mask_token_id is 199, but the target has"),
        (lambda path: change_config(path, nested={"mask_token_id": None}), "'mask_token_id' must be a whole number"),
        (lambda path: change_config(path, block_size=None), "'block_size' must be a whole number from 2 on"),
        (lambda path: change_config(path, block_size=3), "to draft 2 tokens at once: set speculation.draft_len to"),
        (lambda path: change_config(path, layer_types=["sliding_attention", "full_attention"]), "sliding attention ar"),
        (lambda path: change_config(path, nested={"use_swa": True}), "use_swa: heads with sliding attention are not"),
        (lambda path: change_config(path, nested={"attention_sink_bias": True}), "says attention_sink_bias"),
        (lambda path: change_config(path, use_sliding_window=True, layer_types=None), "says use_sliding_window"),
        (lambda path: change_config(path, is_neox_style=False), "heads that rotate otherwise are not supported"),
        (lambda path: change_config(path, nested={"output_multiplier": 0.2}), "says output_multiplier 0.2"),
        (lambda path: change_config(path, nested={"final_logit_softcapping": 20.0}), "says final_logit_softcapping"),
        (lambda path: change_config(path, architectures=["DFlash2DraftModel"]), "heads of DFlash2 are not supported"),
        (lambda path: add(path, "candidate_selector.predecessor_codebook", 199, 8), "heads of DFlash2 are not"),
        (lambda path: change_config(path, nested={"projector_type": "domino"}), "heads of Domino are not supported"),
        (lambda path: add(path, "markov_head.markov_w1.weight", 199, 8), "of DSpark: set speculation.method to dspark"),
        (lambda path: change_config(path, nested={"projector_type": "dspark"}), "set speculation.method to dspark"),
        (lambda path: (path / "mask_embedding.pt").write_bytes(b"x"), "mask_embedding.pt is a pickle file"),
        (lambda path: add(path, "mask_embedding", 64), "tensor 'mask_embedding' is none that heads of DFlash have"),
        (lambda path: drop(path, "norm.weight"), "it has no norm.weight: the files are incomplete"),
        (lambda path: drop(path, "fc.weight"), "it has no head of DFlash: there is no fc.weight"),
        (lambda path: drop(path, "layers.1.mlp.up_proj.weight"), "has no tensor 'layers.1.mlp.up_proj.weight'"),
        (lambda path: change_tensors(path, lambda tensors: tensors.update({"fc.weight": torch.ones(64, 100)})),
         "the head is for another target"),
    ],
)  # fmt: skip
def test_what_fits_no_target_is_refused_in_one_line(
    tmp_path: Path, target: Path, spoil: Callable[[Path], object], says: str
) -> None:
    path = write_dflash(tmp_path / "head", make_dflash(target), "dflash", target)
    spoil(path)
    with pytest.raises(CheckpointError, match=says) as caught:
        read(path, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type 'rnn': only vanilla and gated are supported"),
        ({"markov_head_type": "gated"}, "it has no markov_head.gate_proj.weight: the files are incomplete"),
        ({"block_size": 2}, "to draft 2 tokens at once: set speculation.draft_len to 2 or less, not 3"),
    ],
)
def test_dspark_heads_of_other_kinds_are_refused(
    tmp_path: Path, target: Path, changes: dict[str, Any], says: str
) -> None:
    path = write_dflash(tmp_path / "head", make_dflash(target, "dspark"), "dspark", target, **changes)
    with pytest.raises(CheckpointError, match=says):
        read(path, target, "dspark")
    drop(path, "markov_head.markov_w1.weight")
    drop(path, "markov_head.markov_w2.weight")
    with pytest.raises(CheckpointError, match=r"markov_rank 8, but there is no markov_head\.markov_w1\.weight"):
        read(write_dflash(path, make_dflash(target), "dspark", target), target, "dspark")


def test_heads_of_other_methods_are_named(tmp_path: Path, target: Path) -> None:
    """An EAGLE-3 head for DFlash, and the other way round."""
    eagle = write_head(tmp_path / "eagle3", make_head(target, boundaries=(0, 1, 2)), "reference", target)
    with pytest.raises(CheckpointError, match=r"it is a head of EAGLE-3: set speculation\.method to eagle3"):
        read(eagle, target)
    path = write_dflash(tmp_path / "dflash", make_dflash(target), "dflash", target)
    for method in ("eagle", "eagle3"):
        with pytest.raises(
            CheckpointError, match=r"it is a head of DFlash or DSpark: set speculation\.method to dflash"
        ):
            make_llm(target, heads=path, speculation={"method": method}).close()
    with pytest.raises(CheckpointError, match=r"it is a head of DFlash: set speculation\.method to dflash"):
        read(path, target, "dspark")
