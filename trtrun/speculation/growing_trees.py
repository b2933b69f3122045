"""Draft trees that grow depth by depth, as a head says what follows each of their nodes: of a shape that is known
(EAGLE: Li et al. 2024, arXiv:2401.15077), or one that follows from how likely nodes are (EAGLE-2: Li et al. 2024,
arXiv:2406.16858).

Of a dynamic tree the likeliest nodes of each depth are continued, by the sum of log probabilities along their paths.
Of all that were met then the likeliest are kept: as the sum falls along a path, a node's parents are among them.

Tensors alone, without a read-back from the device. It does not know who ranks tokens, or what they are for. Ranks that
have no ranking are told by one that has: `share`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.draft_trees import Choice, ChoiceTree, DynamicTree
from trtrun.tensors import cached_range

LEAST = -1e30
"""Log probability of a token that is impossible: sums of it fall, and are numbers."""

Share = Callable[[Tensor], Tensor]


class Ranked(NamedTuple):
    """What follows each of R rows' F nodes.

    Attributes:
        tokens: [R, F, ranks] int64, the best first.
        log_probs: [R, F, ranks] float32; None where nobody asks.
    """

    tokens: Tensor
    log_probs: Tensor | None


class Given(NamedTuple):
    """Tokens [R] that take the place of the best path's next, where `is_given` [R] says."""

    tokens: Tensor
    is_given: Tensor


class Growth(Protocol):
    """The trees of R rows in one round.

    Attributes:
        num_ranks: tokens that are wanted behind each node.
        has_log_probs: whether their log probabilities are.
    """

    num_ranks: int
    has_log_probs: bool

    def spread(self, ranked: Ranked | None, given: Given | None, share: Share) -> tuple[Tensor, Tensor]:
        """Take in what follows the nodes that were continued last, of the root at first; None where another rank knows.

        Returns:
            [R, F] int64 each: the nodes to continue, as tokens and as places of their parents among those before.
        """
        ...

    def finish(self, share: Share) -> tuple[Tensor, Tensor]:
        """The trees: tokens [R, nodes] int64, and paths [R, paths, depth] int64 (see `Draft`)."""
        ...


@dataclass(frozen=True)
class _Depth:
    """The nodes of one depth of a static tree, on the device.

    Attributes:
        picks: [nodes] int64: of each node its place among [continued before * num_ranks].
        continued: [F] int64: which of them have others behind them.
        parents: [F] int64: of these the places of their parents among those continued before.
        spine: the node that is on the first of the deepest paths.
    """

    picks: Tensor
    continued: Tensor
    parents: Tensor
    spine: int


class StaticShape:
    """A tree of ranks on a device."""

    def __init__(self, tree: ChoiceTree, num_ranks: int, device: torch.device) -> None:
        """Lay out a whole tree, with as many ranks as it has, or more."""
        self.num_ranks = num_ranks
        self.depths: list[_Depth] = []
        inner = {node[:-1] for node in tree.nodes}
        spine = next(path for path in tree.paths if len(path) == tree.depth)
        before: list[Choice] = [()]

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        for depth in range(1, tree.depth + 1):
            nodes = [node for node in tree.nodes if len(node) == depth]
            parents = [before.index(node[:-1]) for node in nodes]
            picks = [parent * num_ranks + node[-1] for parent, node in zip(parents, nodes, strict=True)]
            continued = [place for place, node in enumerate(nodes) if node in inner]
            of_continued = integers([parents[place] for place in continued])
            on_spine = nodes.index(tree.nodes[spine[depth - 1]])
            self.depths.append(_Depth(integers(picks), integers(continued), of_continued, on_spine))
            before = [nodes[place] for place in continued]
        padded = [[*path, *[-1] * (tree.depth - len(path))] for path in tree.paths]
        self.paths = torch.tensor(padded, dtype=torch.int64, device=device)


class StaticGrowth(Growth):
    """Trees of one shape; see Growth. The nodes are by depth, and of one depth by ranks."""

    has_log_probs = False

    def __init__(self, shape: StaticShape, rows: int) -> None:
        """Begin trees of `shape` for so many rows."""
        self.num_ranks = shape.num_ranks
        self._shape = shape
        self._rows = rows
        self._tokens: list[Tensor] = []

    @override
    def spread(self, ranked: Ranked | None, given: Given | None, share: Share) -> tuple[Tensor, Tensor]:
        here = self._shape.depths[len(self._tokens)]
        if ranked is None:
            tokens = share(here.picks.new_empty((self._rows, len(here.picks))))
        else:
            tokens = share(ranked.tokens.flatten(1).index_select(1, here.picks))
        if given is not None:
            tokens[:, here.spine] = torch.where(given.is_given, given.tokens, tokens[:, here.spine])
        self._tokens.append(tokens)
        return tokens.index_select(1, here.continued), here.parents.expand(self._rows, -1)

    @override
    def finish(self, share: Share) -> tuple[Tensor, Tensor]:
        return torch.cat(self._tokens, dim=1), self._shape.paths.expand(self._rows, -1, -1)


class DynamicGrowth(Growth):
    """Trees each of a shape of its own; see Growth. Nodes are in the order in which they were met."""

    has_log_probs = True

    def __init__(
        self, bounds: DynamicTree, rows: int, depth: int, device: torch.device, lens: Tensor | None = None
    ) -> None:
        """Begin trees for so many rows, and so deep, with `lens` [rows] int64 where some need less: what is deeper is
        kept last."""
        self.num_ranks = bounds.top_k
        self._bounds = bounds
        self._depth = depth
        self._lens = lens
        self._shape = rows, bounds.num_nodes(depth), bounds.num_paths(depth)
        self._device = device
        # Of all nodes so far, depth by depth; a trail is the numbers of the nodes on the way, the own one last.
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._trails: list[Tensor] = []
        # Of those that were continued last: the root.
        self._last_scores = torch.zeros((rows, 1), device=device)
        self._last_trails = torch.zeros((rows, 1, 0), dtype=torch.int64, device=device)
        self._count = 0

    @override
    def spread(self, ranked: Ranked | None, given: Given | None, share: Share) -> tuple[Tensor, Tensor]:
        """Take in what follows; a given token is certain, and continues the best path."""
        if ranked is None:
            empty = torch.empty((self._shape[0], 2, self.num_ranks), dtype=torch.int64, device=self._device)
            told = share(empty)
            return told[:, 0], told[:, 1]
        assert ranked.log_probs is not None
        tokens = ranked.tokens.flatten(1)
        log_probs = ranked.log_probs.nan_to_num(nan=LEAST, neginf=LEAST).clamp(max=0)
        if self._lens is not None:
            is_behind = self._lens <= len(self._scores)
            log_probs = torch.where(is_behind.view(-1, 1, 1), LEAST, log_probs)
        scores = (self._last_scores.unsqueeze(2) + log_probs).flatten(1)
        if given is not None:
            tokens[:, 0] = torch.where(given.is_given, given.tokens, tokens[:, 0])
            scores[:, 0] = torch.where(given.is_given, self._last_scores[:, 0], scores[:, 0])
        number = cached_range(self._count, self._count + tokens.shape[1], tokens.device)
        trails = self._last_trails.repeat_interleave(self.num_ranks, dim=1)
        trails = torch.cat((trails, number.expand_as(tokens).unsqueeze(2)), dim=2)
        self._count += tokens.shape[1]
        for kept, made in ((self._tokens, tokens), (self._scores, scores), (self._trails, trails)):
            kept.append(made)
        # The order is the same everywhere and always: of equal ones the first.
        best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : self.num_ranks]
        self._last_scores = scores.gather(1, best)
        self._last_trails = trails.gather(1, best.unsqueeze(2).expand(-1, -1, trails.shape[2]))
        told = share(torch.stack((tokens.gather(1, best), best // self.num_ranks), dim=1))
        return told[:, 0], told[:, 1]

    @override
    def finish(self, share: Share) -> tuple[Tensor, Tensor]:
        """Build the trees: leaves are in the order of nodes, and paths that are not there behind them."""
        rows, nodes, paths = self._shape
        if not self._tokens:
            told = share(torch.empty((rows, nodes + paths * self._depth), dtype=torch.int64, device=self._device))
        else:
            told = share(torch.cat([part.flatten(1) for part in self._kept(nodes, paths)], dim=1))
        return told[:, :nodes], told[:, nodes:].reshape(rows, paths, self._depth)

    def _kept(self, count: int, num_paths: int) -> tuple[Tensor, Tensor]:
        scores, tokens = torch.cat(self._scores, dim=1), torch.cat(self._tokens, dim=1)
        pad = torch.nn.functional.pad
        trails = torch.cat([pad(one, (0, self._depth - one.shape[2]), value=-1) for one in self._trails], dim=1)
        picked = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
        numbers = torch.full_like(tokens, -1)
        numbers.scatter_(1, picked, cached_range(0, count, picked.device).expand_as(picked))
        trails = trails.gather(1, picked.unsqueeze(2).expand(-1, -1, self._depth))
        nodes = numbers.gather(1, trails.clamp(min=0).flatten(1)).view(trails.shape).masked_fill(trails < 0, -1)
        # A leaf is on its own way alone.
        ways = numbers.new_zeros((len(nodes), count + 1))
        ways.scatter_add_(1, (nodes + 1).flatten(1), torch.ones_like(nodes).flatten(1))
        is_leaf = (ways[:, 1:] == 1).to(torch.int64)
        order = torch.sort(is_leaf, dim=1, descending=True, stable=True).indices[:, :num_paths]
        paths = nodes.gather(1, order.unsqueeze(2).expand(-1, -1, self._depth))
        return tokens.gather(1, picked), paths.masked_fill(is_leaf.gather(1, order).unsqueeze(2) == 0, -1)
