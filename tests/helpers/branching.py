"""A drafting method of the tests' own that proposes random trees: `branching`, on the target ranks.

It knows what the rows' texts will be and builds trees around that: right tokens and wrong ones, paths that part at any
depth, the same token at several nodes, nodes in any order, nodes that no path has, whole continuations and none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from parallel.topology import Role
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.configuration.drafting.speculation_section import DraftingMethod, DraftSize, SpeculationSection
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.protocols import Rows

MAX_PATHS = 5


class Branching(Drafter):
    """Random trees.

    Attributes:
        texts: tokens of prompts and outputs that are known.
        num_trees: rounds' trees so far; num_shared, num_duplicates, num_full: nodes with several children, siblings of
            the same token, and trees with a path that is right to its end.
    """

    texts: ClassVar[list[list[int]]] = []
    num_trees = num_shared = num_duplicates = num_full = 0

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def rows(self) -> Rows:
        return self._rows

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        device, depth = self._rows.lengths.device, plan.draft_len
        most = torch.from_numpy(plan.draft_lens).to(torch.int64).clamp(min=0).to(device)
        width = MAX_PATHS * depth
        tokens = torch.zeros((len(most), width), dtype=torch.int64)
        paths = torch.full((len(most), MAX_PATHS, depth), -1, dtype=torch.int64)
        lengths = self._rows.lengths.tolist()
        for index, row in enumerate(plan.decode_rows.tolist()):
            known = self._rows.token_ids[row, : lengths[row]].tolist()
            # Every rank draws the same.
            chance = random.Random(f"{plan.round_index} {row} {len(known)}")
            nodes, of_paths = self._grow(chance, self._continue(known, depth), depth)
            columns = chance.sample(range(width), len(nodes))
            tokens[index] = torch.tensor([chance.randrange(199) for _ in range(width)])
            for node, token in enumerate(nodes):
                tokens[index, columns[node]] = token
            for number, path in enumerate(of_paths):
                paths[index, number, : len(path)] = torch.tensor([columns[node] for node in path], dtype=torch.int64)
        return Draft(tokens.to(device), most, paths=paths.to(device))

    def _continue(self, known: list[int], depth: int) -> list[int]:
        text = next((text for text in self.texts if text[: len(known)] == known), [])
        return text[len(known) : len(known) + depth]

    @classmethod
    def _grow(cls, chance: random.Random, right: list[int], depth: int) -> tuple[list[int], list[list[int]]]:
        """Tokens of nodes, and paths of nodes."""
        nodes: list[int] = []
        paths: list[list[int]] = []
        cls.num_trees += 1
        for _ in range(chance.randint(0, MAX_PATHS)):
            # Some paths begin as another one does.
            path = list(chance.choice(paths)[: chance.randint(0, depth)]) if paths and chance.random() < 0.6 else []
            shared = len(path)
            for step in range(shared, chance.randint(shared, depth)):
                is_right = chance.random() < 0.8 and step < len(right)
                nodes.append(right[step] if is_right else chance.randrange(199))
                path.append(len(nodes) - 1)
            cls.num_shared += shared > 0 and len(path) > shared
            first = nodes[path[0]] if path else None
            cls.num_duplicates += any(one and one[0] != path[0] and nodes[one[0]] == first for one in paths if path)
            cls.num_full += len(right) == depth and [nodes[node] for node in path] == right
            paths.append(path)
        return nodes, paths


class BranchingSection(SpeculationSection):
    """As many paths as it may have, each with tokens of its own."""

    def size_of(self, draft_len: int) -> DraftSize:
        return DraftSize(MAX_PATHS, MAX_PATHS * draft_len)


def make_branching(context: DrafterContext) -> Drafter:
    assert context.target is not None
    return Branching(context.target.rows)


@contextmanager
def branching_method() -> Iterator[type[Branching]]:
    """`branching` is there, as the methods of the product are."""
    DRAFTERS.register("branching")(make_branching)
    METHODS["branching"] = DraftingMethod(
        Role.TARGET, needs_draft_model=False, has_probabilities=False, section=BranchingSection
    )
    Branching.texts = []
    Branching.num_trees = Branching.num_shared = Branching.num_duplicates = Branching.num_full = 0
    try:
        yield Branching
    finally:
        del DRAFTERS._items["branching"], METHODS["branching"]
