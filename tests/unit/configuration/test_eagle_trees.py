"""Draft trees of an EAGLE head as a user says them, how large they are, and what of them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from eagle3_heads import eagle3
from eagle_heads import eagle
from pipelines import configuration

from parallel.topology import Role
from trtrun.configuration.drafting.draft_trees import ChoiceTree, read_choices, read_eagle_choices
from trtrun.errors import ConfigError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Any directory: a configuration does not look into it."""
    return tmp_path


def test_the_known_tree_is_the_references_and_not_medusas() -> None:
    """Nodes by depth, as eagle/model/choices.py has them."""
    tree = ChoiceTree.of(read_eagle_choices("mc_sim_7b_63"))
    assert [sum(len(node) == depth for node in tree.nodes) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert tree.most_continued == 4 and read_choices("mc_sim_7b_63") != read_eagle_choices("mc_sim_7b_63")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eagle_choices": "mc_sim"}, "there is no tree 'mc_sim' (did you mean 'mc_sim_7b_63'?)"),
        ({"eagle_choices": "zephyr_stage2"}, "there is no tree 'zephyr_stage2'"),
        ({"eagle_choices": [[0], [1, 0]]}, "has [1, 0] without [1]"),
        ({"eagle_choices": [[0], [0, 0]], "draft_len": 3}, "draft_len is 3, but eagle_choices are 2 deep"),
        ({"eagle_choices": [[0]], "eagle_topk": 2}, "eagle_choices and eagle_topk are two trees"),
        ({"max_total_draft_tokens": 8}, "max_total_draft_tokens is of dynamic trees: set eagle_topk to 2 or more"),
        ({"eagle_topk": 3, "max_total_draft_tokens": 3}, "max_total_draft_tokens is 3, but draft_len is 4"),
        ({"eagle_topk": 6, "max_total_draft_tokens": 5}, "max_total_draft_tokens is 5, but eagle_topk is 6"),
        ({"eagle_topk": 3, "enable_suffix_decoding": True}, "does not go with a tree: leave eagle_topk out"),
        ({"eagle_choices": [[0], [1]], "enable_suffix_decoding": True}, "a tree: leave eagle_choices out"),
        ({"eagle_topk": 33}, "eagle_topk"),
        ({"eagle_top_k": 3}, "did you mean 'eagle_topk'?"),
        ({"medusa_choices": [[0]]}, "medusa_choices is an option of method medusa"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(target, None, heads=target, speculation=eagle3(**options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu:0"], "draft.devices: cpu:0 is the target's, too: give the head a device of its own, or leave it out"),
        (["cpu:1", "cpu:2"], "draft.devices: a head with a device of its own is not shared out, but 2 are listed"),
        (["cuda:1"], "CPU slots and GPUs cannot be mixed in one run"),
        (["node1/cpu:1"], "some devices name a host and some do not"),
        (["gpu"], "draft.devices: 'gpu' is no device"),
    ],
)
def test_devices_that_a_head_cannot_have_are_refused(target: Path, devices: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(target, None, heads=target, heads_apart=True, devices=(devices, ["cpu:0"]), speculation=eagle3())
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_with_a_device_of_its_own_is_apart(target: Path) -> None:
    on_target = configuration(target, None, heads=target, speculation=eagle3())
    assert (on_target.draft_devices, on_target.drafts_apart, on_target.drafting_role) == ((), False, Role.TARGET)
    apart = configuration(
        target, None, heads=target, heads_apart=True, devices=(["cpu:1"], ["cpu:0"]), speculation=eagle3()
    )
    assert (apart.draft_devices, apart.drafts_apart, apart.drafting_role) == (("cpu:1",), True, Role.DRAFT)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (4, 1, (0, 1, 2, 3, 4))),
        ({"eagle_choices": "mc_sim_7b_63"}, (5, 15, (0, 4, 12, 20, 23, 25))),
        ({"eagle_choices": [[0, 0], [0]]}, (2, 1, (0, 1, 2))),
        ({"eagle_topk": 1}, (4, 1, (0, 1, 2, 3, 4))),
        ({"eagle_topk": 3}, (4, 9, (0, 3, 6, 9, 12))),
        ({"eagle_topk": 4, "draft_len": 3, "max_total_draft_tokens": 9}, (3, 7, (0, 3, 6, 9))),
        ({"eagle_topk": 4, "draft_len": 1, "max_total_draft_tokens": 9}, (1, 4, (0, 4))),
        ({"eagle_topk": 32, "draft_len": 8}, (8, 125, tuple(range(0, 129, 16)))),
    ],
)
def test_a_tree_counts_by_its_nodes(target: Path, options: dict[str, Any], expected: tuple[int, ...]) -> None:
    scheduler = {"max_batch_size": 2, "max_num_tokens": 300}
    for section in (eagle, eagle3):
        config = configuration(target, None, heads=target, speculation=section(**options), scheduler=scheduler)
        assert (config.draft_len, config.max_paths, config.draft_nodes) == expected


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("eagle", {"eagle3_layers_to_capture": [1]}, "is an option of method eagle3, but the method is eagle:"),
        (
            "medusa",
            {"eagle_topk": 2},
            "eagle_topk is an option of method eagle, eagle3 and mtp, but the method is medusa",
        ),
        ("eagle", {"use_logits": True}, "use_logits does not go with method eagle"),
        ("eagle2", {}, "unknown method 'eagle2' (did you mean 'eagle'?)"),
    ],
)
def test_both_kinds_have_the_trees_and_eagle3_alone_its_layers(
    target: Path, method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(target, None, heads=target, speculation={"method": method, **options})
    assert message in str(caught.value)


def test_a_round_must_have_room_for_the_trees(target: Path) -> None:
    for options, key in (({"eagle_choices": "mc_sim_7b_63"}, "eagle_choices"), ({"eagle_topk": 5}, "max_total_draft")):
        scheduler = {"max_batch_size": 4, "max_num_tokens": 80}
        with pytest.raises(ConfigError, match=rf"too small to verify 2[16] tokens of each of 4 rows.*{key}"):
            configuration(target, None, heads=target, speculation=eagle3(**options), scheduler=scheduler)
