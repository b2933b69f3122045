"""What a draft of a configuration looks like, for who shows it: how many tokens, in one forward or several, and where
each stands in its tree.

It knows the configuration alone, not what is drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.medusa_choices import ChoiceTree
from trtrun.configuration.drafting.text_methods import LookaheadSection
from trtrun.loading.model_settings import mask_token


def describe_drafts(config: RuntimeConfig) -> dict[str, Any]:
    """What `GET /status` tells.

    Returns:
        `draft_nodes`: tokens of a draft of the full draft_len, those beside each other counted, at most.
        `draft_parents`: of a tree of one shape for each of its tokens the one in front of it, -1 for the row's newest;
        None of chains, and of trees whose shape follows from what is drafted.
        `drafts_in_parallel`: whether a draft model makes all of them in one forward.
    """
    section, most = config.speculation, config.draft_len
    size = section.size_of(most)
    paths: Iterable[Sequence[int]] | None = None
    tree = getattr(section, "tree", None)
    if isinstance(tree, ChoiceTree):
        paths = tree.paths
    elif isinstance(section, LookaheadSection):
        paths = section.sizes.tree(most).paths
    return {
        "draft_nodes": size.nodes,
        "draft_parents": _parents(paths, size.nodes) if paths is not None and size.paths > 1 else None,
        "drafts_in_parallel": mask_token(config) is not None,
    }


def _parents(paths: Iterable[Sequence[int]], num_nodes: int) -> list[int]:
    parents = [-1] * num_nodes
    for path in paths:
        for before, node in pairwise(path):
            parents[node] = before
    return parents
