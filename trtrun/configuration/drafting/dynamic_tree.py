"""How large a draft tree grows whose shape follows from what is drafted (EAGLE-2: Li et al. 2024, arXiv:2406.16858).

The likeliest nodes of each depth are continued, and of all that were met then the likeliest are kept. It knows numbers.
It does not know who drafts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DynamicTree:
    """Bounds of a dynamic draft tree.

    Attributes:
        top_k: nodes of each depth that are continued, and continuations of each that are looked at; 2 or more.
        most_nodes: that are kept of all.
        most_depth: of the tree that has so many.
    """

    top_k: int
    most_nodes: int
    most_depth: int

    def num_candidates(self, depth: int) -> int:
        """Nodes that are met on the way to a tree so deep."""
        return self.top_k + (depth - 1) * self.top_k**2

    def num_nodes(self, depth: int) -> int:
        """Nodes of a tree so deep, always as many: of a tree that pacing has made less deep as many for each depth."""
        return min(-(-self.most_nodes * depth // self.most_depth), self.num_candidates(depth))

    def num_paths(self, depth: int) -> int:
        """Paths from the root to a leaf, at most: that many nodes need some that are continued, which are no leaves."""
        nodes = self.num_nodes(depth)
        return nodes - (-(-nodes // self.top_k) - 1)
