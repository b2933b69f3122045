"""What heads with a store of keys and values read and compute, as the engine sees it: their layers by protocol, whose
rows they are fed, and where the nodes of draft trees have their keys.

Heads are fed the target's rows, beside which they sit, or on a rank of their own rows that they keep themselves by
plans and verdicts.

A tree is fed depth by depth. Each of its nodes is a row of its own to attention, with scratch blocks behind the store's
others: a copy of what its parent's hold, of a row's own block at first. So it sees what stands before it on its own
path and nothing else, in the order of a chain. There are two sets of such blocks, for parents and for nodes, as several
nodes may have one parent. Once the target has decided, its hidden states of the accepted path are fed into the row's
own blocks, and all of this is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trtrun.engine.draft_paths import copy_blocks
from trtrun.engine.graphs.graph_cache import Capture
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.rows import RowState
from trtrun.engine.runner import Engine
from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.kvcache.segments import AttentionBatch
from trtrun.kvcache.specs import LayerSpecs
from trtrun.kvcache.store import KVStore
from trtrun.tensors import cached_range


@dataclass(frozen=True)
class HeadRows:
    """What heads with a store need beside their layers.

    Attributes:
        rows: the state of every row; behind the batch's those of guesses, where drafts are made ahead.
        tapped_shape: hidden states of the target that are read of a token, and numbers of each.
        capture: makes graphs; None where there are none.
        graph_shapes: of these.
        are_own: whether nobody else takes plans in for the rows.
        store: what the target keeps of them; None on a rank of the heads' own.
    """

    rows: RowState
    tapped_shape: tuple[int, int]
    capture: Capture | None
    graph_shapes: GraphShapes | None
    are_own: bool = False
    store: KVStore | None = None

    @classmethod
    def of(cls, target: Engine) -> HeadRows:
        """Take the rows of a target, which taps what heads read."""
        return cls(target.rows, target.tapped_shape, target.capture, target.graph_shapes, store=target.store)


class FeatureLayers(Protocol):
    """Heads of one rank."""

    hidden_size: int
    dtype: torch.dtype
    keeps: Sequence[LayerSpecs]
    has_overflowed: bool

    def reserve_positions(self, positions: int) -> None:
        """Make rotary tables for positions [0, positions) now; free otherwise."""
        ...

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """Hidden states of the target [n, taps, its hidden] → [n, hidden]."""
        ...

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attention: AttentionBatch,
        store: KVStore,
    ) -> torch.Tensor:
        """Feed tokens [n] at positions [n], with hidden states [n, hidden]; the states [n, hidden] behind them."""
        ...

    def logits(self, state: torch.Tensor) -> torch.Tensor | None:
        """[n, the target's vocab_size] float32 for states [n, hidden]; None on ranks that do not decide."""
        ...

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the rank that decides has in `tokens`, on all ranks."""
        ...


@dataclass(frozen=True)
class HeadSpace:
    """Which blocks of a store of heads belong to nodes of draft trees.

    Attributes:
        most_fed: nodes of a row that are fed at once; 0 where drafts are chains.
        max_rows: rows that may have a tree.
        first_block: the first of them.
        blocks_per_path: for the rest of the block that the newest token stands in, and all but the last of a path.
    """

    most_fed: int
    max_rows: int
    first_block: int
    blocks_per_path: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all nodes: of those that are fed, and of their parents."""
        return 2 * self.max_rows * self.most_fed * self.blocks_per_path


@dataclass
class HeadTree:
    """Trees of rows while they are fed.

    Attributes:
        rows: [R] int64 on the device.
        positions: [R, steps] int64: where nodes of each depth are fed; -1 where a row takes no part.
        tables: [R, blocks] int64: of the rows.
        start: [R, 1] int64: the column of the block in which the first is fed.
        step: of the depth that is fed next.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    start: torch.Tensor
    step: int = 0


class HeadPaths:
    """Keys and values of trees' nodes."""

    def __init__(self, space: HeadSpace, rows: RowState, store: KVStore) -> None:
        """Keep them in the blocks of `space`, which `store` has."""
        self._rows = rows
        self._store = store
        shape = (space.max_rows, 2, space.most_fed, space.blocks_per_path)
        blocks = torch.arange(space.first_block, space.first_block + space.num_blocks, device=rows.device)
        self._blocks = blocks.view(shape)

    def begin(self, rows: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> HeadTree:
        """Make ready for trees of `rows`; see HeadTree."""
        start = (self._rows.lengths.index_select(0, rows) - 1).clamp(min=0) // self._rows.block_size
        return HeadTree(rows, positions, tables, start.unsqueeze(1))

    def next_depth(self, tree: HeadTree, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the nodes of the next depth have their keys.

        Args:
            tree: of `begin`.
            parents: [R, F] int64: of each node the place of its parent among those that were fed before; 0 at first.

        Returns:
            block tables [R * F, blocks] int64 and positions [R * F, 1] int64 of the nodes, row by row.
        """
        nodes = parents.shape[1]
        own = self._blocks[:, tree.step % 2, :nodes].index_select(0, tree.rows)
        # Rows that take no part may stand beside themselves, as padding of a graph: they must not write.
        is_fed = tree.positions[:, tree.step : tree.step + 1] >= 0
        own = torch.where(is_fed.unsqueeze(2), own, NULL_BLOCK)
        if tree.step:
            every = self._blocks[:, 1 - tree.step % 2].index_select(0, tree.rows)
            source = every.gather(1, parents.unsqueeze(2).expand(-1, -1, every.shape[2]))
            self._copy(source, own)
        else:
            self._copy(tree.tables.gather(1, tree.start).expand(-1, nodes), own[:, :, 0])
        behind = (cached_range(0, tree.tables.shape[1], own.device) - tree.start).unsqueeze(1).expand(-1, nodes, -1)
        replaced = own.gather(2, behind.clamp(0, own.shape[2] - 1))
        tables = torch.where((behind >= 0) & (behind < own.shape[2]), replaced, tree.tables.unsqueeze(1))
        positions = tree.positions[:, tree.step : tree.step + 1].repeat_interleave(nodes, dim=0)
        tree.step += 1
        return tables.flatten(0, 1), positions

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        copy_blocks(self._store, source.reshape(-1), target.reshape(-1))

    def clear(self, rows: torch.Tensor) -> None:
        """Zero the blocks of the rows' nodes: see `KVStore.clear`."""
        self._store.clear(self._blocks.index_select(0, rows).flatten().tolist())
