"""Draft trees of Medusa's heads as a user says them, the known ones, and what of them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from medusa_heads import medusa
from pipelines import configuration

from trtrun.configuration.config import make_config
from trtrun.configuration.drafting.draft_trees import ChoiceTree, named_choices, read_choices
from trtrun.errors import ConfigError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Any directory: a configuration does not look into it."""
    return tmp_path


def test_known_trees_are_those_of_the_reference() -> None:
    """Nodes by depth, and leaves, as medusa/model/medusa_choices.py has them."""
    counted = {}
    for name in named_choices():
        tree = ChoiceTree.of(read_choices(name))
        counted[name] = ([sum(len(node) == depth for node in tree.nodes) for depth in range(1, 5)], len(tree.paths))
    assert counted == {
        "mc_sim_7b_63": ([10, 28, 23, 2], 42),
        "vicuna_7b_stage1": ([10, 32, 20, 1], 44),
        "vicuna_7b_stage2": ([10, 23, 23, 7], 42),
        "vicuna_13b_stage1": ([10, 29, 23, 1], 44),
        "vicuna_13b_stage2": ([10, 19, 25, 9], 42),
        "vicuna_33b_stage1": ([10, 34, 19, 0], 46),
        "vicuna_33b_stage2": ([10, 24, 24, 5], 43),
        "zephyr_stage2": ([10, 27, 23, 3], 44),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"medusa_choices": "mc_sim_7b"}, "there is no tree 'mc_sim_7b' (did you mean 'mc_sim_7b_63'?)"),
        ({"medusa_choices": [[0], [0, 0], [1, 0]]}, "has [1, 0] without [1], which it goes through"),
        ({"medusa_choices": [[0], [1], [0]]}, "has [0] twice"),
        ({"medusa_choices": [[0], [-1]]}, "has the path [-1], but ranks are whole numbers"),
        (
            {"medusa_choices": [[0], [64]]},
            "has the path [64], but ranks are whole numbers from 0, the likeliest, to 63",
        ),
        ({"medusa_choices": [[0], []]}, "[] is no path"),
        ({"medusa_choices": 5}, "must be a list of paths of ranks"),
        ({"medusa_choices": [[rank % 60] for rank in range(129)]}, "has 129 paths"),
        ({"medusa_choices": [[0], [0, 0]], "draft_len": 3}, "draft_len is 3, but medusa_choices are 2 deep"),
        ({"use_logits": True}, "use_logits does not go with method medusa"),
        ({"prompt_lookup_max": 2}, "prompt_lookup_max is an option of method ngram"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(target, None, heads=target, speculation=medusa(**options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (None, "draft: missing, though speculation.method is medusa"),
        ({"devices": ["cpu:1"]}, "draft.devices: heads of method medusa sit on the target's devices: leave it out"),
        ({"dtype": "float32"}, "draft: dtype does not go with a method with heads, which are read as they are"),
        ({"modl": "x"}, "draft.modl: unknown key (did you mean 'model'?)"),
        ({"model": "nowhere"}, "draft.model: no such directory"),
    ],
)
def test_a_draft_section_of_heads_is_their_directory(target: Path, draft: Any, message: str) -> None:
    section = draft if draft is None or "modl" in draft else {"model": str(target), **draft}
    values = {"target": {"model": str(target), "devices": ["cpu:0"]}, "speculation": medusa(), "draft": section}
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert message in str(caught.value)


def test_a_tree_counts_by_its_nodes(target: Path) -> None:
    """Paths share tokens: a round has room for 63 of a row, not for 42 paths of 4."""
    speculation = medusa(medusa_choices="mc_sim_7b_63")
    config = configuration(
        target, None, heads=target, speculation=speculation, scheduler={"max_batch_size": 2, "max_num_tokens": 128}
    )
    assert (config.draft_len, config.max_paths, config.draft_nodes) == (4, 42, (0, 10, 38, 61, 63))
    with pytest.raises(ConfigError, match=r"too small to verify 64 tokens of each of 2 rows.*medusa_choices"):
        configuration(
            target, None, heads=target, speculation=speculation, scheduler={"max_batch_size": 2, "max_num_tokens": 127}
        )
    chain = configuration(target, None, heads=target, speculation=medusa(medusa_choices=[[0, 0], [0]]))
    assert (chain.draft_len, chain.max_paths, chain.draft_nodes) == (2, 1, (0, 1, 2))
