"""MiniMax-M2, Hy3 and mixtures of Ernie 4.5: what their releases write otherwise than transformers does, and what is
refused. Their logits and texts are in test_families.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from paged import PagedModel
from quantized_checkpoints import edit_config
from test_model_logits import check_logits, prompt_of

from trtrun.errors import CheckpointError
from trtrun.models.config import read_model_config


def test_minimax_says_how_much_of_a_head_is_rotated_by_a_number(tmp_path: Path) -> None:
    """As released, with keys that transformers passes over."""
    path = write_family(tmp_path, "minimax_m2")
    expected = PagedModel(path).forward([[(0, 0, prompt_of(9))]])
    edit_config(
        path, rope_parameters=None, rope_theta=1e4, rotary_dim=12, attn_type_list=[1] * 5, scoring_func="sigmoid",
        use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer", shared_intermediate_size=0,
    )  # fmt: skip
    assert torch.equal(PagedModel(path).forward([[(0, 0, prompt_of(9))]]), expected)


def test_ernies_first_and_last_layers_may_be_dense(tmp_path: Path) -> None:
    check_logits(write_family(tmp_path, "ernie4_5_moe", moe_layer_interval=1, moe_layer_end_index=2))


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("minimax_m2", {"scoring_func": "softmax"}, "'scoring_func' 'softmax' is not supported, only sigmoid"),
        ("minimax_m2", {"attn_type_list": [0, 1, 1, 1, 1]}, "'attn_type_list' must be 1 for each layer"),
        ("minimax_m2", {"num_experts_per_tok": 9}, "more than there are experts: 6"),
        ("minimax_m2", {"rope_parameters": None, "rotary_dim": 13}, "rotates 13: not an even number"),
        ("hy_v3", {"mlp_layer_types": ["dense", "wide", "dense"]}, "must name dense or sparse for each layer"),
        ("hy_v3", {"mlp_bias": True}, "'mlp_bias' true is not supported"),
        ("ernie4_5_moe", {"use_bias": True}, "'use_bias' true is not supported in layers of experts"),
        ("ernie4_5_moe", {"moe_k": 7}, "'moe_k' is 7, more than there are experts: 6"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "must be whole numbers, not"),
        ("ernie4_5_moe", {"moe_num_shared_experts": "2"}, "moe_num_shared_experts"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, family: str, values: dict[str, Any], said: str) -> None:
    path = write_family(tmp_path, family)
    edit_config(path, **values)
    with pytest.raises(CheckpointError, match=said):
        _ = read_model_config(path).layers
