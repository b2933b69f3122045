"""What `GET /status` tells of a draft's shape."""

from __future__ import annotations

from typing import Any

import pytest

from launch.serve.application.status import describe_drafts
from trtrun.configuration.config import make_config
from trtrun.start.job_spec import JobSpec

CHOICES = [[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("draft", "speculation", "nodes", "parents"),
    [
        ("medusa", {"method": "medusa"}, 4, None),
        ("medusa", {"method": "medusa", "medusa_choices": CHOICES}, 6, [-1, -1, 0, 1, 1, 3]),
        ("eagle3", {"method": "eagle3", "eagle_choices": CHOICES}, 6, [-1, -1, 0, 1, 1, 3]),
        ("eagle3", {"method": "eagle3", "eagle_topk": 3, "max_total_draft_tokens": 9}, 9, None),
        (None, {"method": "token_recycling", "token_recycling_nodes": 4, "draft_len": 2}, 4, [-1, -1, -1, 0]),
        (None, {"method": "lookahead", "lookahead_config": [2, 3, 1]}, 5, [-1, -1, 1, -1, 3]),
        (None, {"method": "ngram", "max_paths": 3, "draft_len": 2}, 6, None),
        (None, {"method": "none"}, 0, None),
    ],
)
def test_trees_of_one_shape_are_told_token_by_token(
    draft: str | None, speculation: dict[str, Any], nodes: int, parents: list[int] | None
) -> None:
    sections = {"draft": {"model": f"asset:{draft}"}} if draft else {}
    values = {"target": {"model": "asset:target", "devices": ["cpu:0"]}, **sections, "speculation": speculation}
    told = describe_drafts(JobSpec(make_config(values)))
    assert told == {"draft_nodes": nodes, "draft_parents": parents, "drafts_in_parallel": False}


def test_a_draft_model_that_drafts_in_one_forward_is_told() -> None:
    for draft, in_parallel in (("draft", False), ("pard_draft", True)):
        engines = {"target": {"model": "asset:target"}, "draft": {"model": f"asset:{draft}"}}
        told = describe_drafts(
            JobSpec(make_config({role: one | {"devices": ["cpu:0"]} for role, one in engines.items()}))
        )
        assert told == {"draft_nodes": 4, "draft_parents": None, "drafts_in_parallel": in_parallel}
