"""Draft trees in a target engine: where each path of a tree has its keys, and what a forward over trees reads; and what
plans do to blocks of a store: they are copied, and marked with the adapter that their row is computed with.

Every path is a row of its own to attention, as if it were a chain (kvcache/segments.py): so a node has the bits that
the same tokens have in a chain, whatever kernel attends. The first path's keys go to the row's own blocks. Every other
path has blocks of its own behind the pool's: a copy of the block in which the row's newest token stands, and what a
draft needs behind it. Once the target has decided, the blocks of the path that was accepted are copied to the row's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtrun.configuration.drafting.speculation_section import DraftSize
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.engine.rows import RowState
from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.kvcache.segments import BlockSlots
from trtrun.kvcache.store import KVStore
from trtrun.tensors import cached_range


def copy_blocks(store: KVStore, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy all layers' keys and values of blocks.

    Args:
        store: of the engine.
        source: [n] int64 blocks on its device.
        target: [n] int64 blocks, none twice; one that is a source, too, is its own.
    """
    for data, of_source, of_target in store.parts(source, target):
        operations_of(data.device.type).copy_blocks(data, of_source, of_target)


@dataclass(frozen=True)
class PathSpace:
    """Which blocks of a target's store belong to the paths of draft trees beside the first.

    Attributes:
        most_paths: of a row's draft; 1 where drafts are chains.
        max_rows: rows that may have one.
        first_block: the first of them.
        blocks_per_path: for the rest of the block that the newest token stands in, and a draft behind it.
        sizes: how large drafts are, by how many of their tokens follow one another, from none on.
    """

    most_paths: int
    max_rows: int
    first_block: int
    blocks_per_path: int
    sizes: tuple[DraftSize, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks of all paths."""
        return self.max_rows * (self.most_paths - 1) * self.blocks_per_path


@dataclass(frozen=True)
class TreeBatch:
    """Rows with a draft tree each, for one forward. All of it begins with rows, as what a graph reads does.

    Attributes:
        tokens: [R, nodes + 1] int64: the newest token of each row, and the tokens of its draft.
        positions: [R, paths, depth + 1] int64: where the newest token and each node of a path stand; -1 behind its end.
        tables: [R, paths, blocks] int64: the block table of each path.
        nodes: [R, paths, depth + 1] int64: the column of `tokens` at each place of a path; 0 behind its end.
        places: [R, nodes + 1] int64: for each column of `tokens` a place in [paths * (depth + 1)]; 0 where no path has
            it.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    nodes: torch.Tensor
    places: torch.Tensor


class DraftPaths:
    """The paths of the draft trees of a target engine's rows.

    Attributes:
        most_paths: of a row's tree.
        sizes: see PathSpace.
    """

    def __init__(self, space: PathSpace, rows: RowState, store: KVStore) -> None:
        """Keep keys and values of paths in the blocks of `space`, which `store` has."""
        self.most_paths = space.most_paths
        self.sizes = space.sizes
        self._rows = rows
        self._store = store
        shape = (space.max_rows, space.most_paths - 1, space.blocks_per_path)
        blocks = torch.arange(space.first_block, space.first_block + space.num_blocks, device=rows.device)
        self._blocks = blocks.view(shape)
        self._space = space

    def blocks_of(self, row: int) -> range:
        """The blocks of a row's paths."""
        of_row = self._space.num_blocks // self._space.max_rows
        return range(self._space.first_block + row * of_row, self._space.first_block + (row + 1) * of_row)

    def _copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        copy_blocks(self._store, source, target)

    def fork(self, rows: torch.Tensor, draft: Draft, tables: torch.Tensor) -> TreeBatch:
        """Make ready for a forward over the trees of `draft`, and copy what the paths share of a block.

        Args:
            rows: [R] int64 on the device.
            draft: their trees.
            tables: [R, blocks] int64: their block tables, wide enough for the deepest path.
        """
        assert draft.paths is not None
        forked = operations_of(rows.device.type).lay_out_trees(
            self._rows.token_ids,
            self._rows.lengths,
            rows,
            draft.tokens,
            draft.paths,
            draft.draft_lens,
            tables,
            self._blocks,
            self._rows.block_size,
        )
        # A path that is not there writes nothing, but its row's block may be anyone's later: the copy costs the same.
        self._copy_blocks(forked.shared, forked.copies)
        return TreeBatch(forked.tokens, forked.positions, forked.tables, forked.nodes, forked.places)

    def keep(self, rows: torch.Tensor, accepted: torch.Tensor) -> None:
        """Give rows the keys and values of one of their paths; before they move on.

        Args:
            rows: [R] int64 on the device, as they were forked last.
            accepted: [R] int64: the path.
        """
        size = self._blocks.shape[2]
        own = self._blocks[rows, (accepted - 1).clamp(min=0)]
        start = (self._rows.lengths.index_select(0, rows) - 1) // self._rows.block_size
        columns = start.unsqueeze(1) + cached_range(0, size, rows.device)
        tables = self._rows.block_tables
        target = tables[rows.unsqueeze(1), columns.clamp(max=tables.shape[1] - 1)]
        is_moved = (accepted > 0).unsqueeze(1) & (columns < tables.shape[1]) & (target != NULL_BLOCK)
        # What stays where it is is written to itself: the shapes are the same whatever was accepted.
        target = torch.where(is_moved, target, own)
        self._copy_blocks(own.reshape(-1), target.reshape(-1))

    def clear(self, rows: torch.Tensor) -> None:
        """Zero the blocks of the rows' paths: see `KVStore.clear`."""
        self._store.clear(self._blocks.index_select(0, rows).flatten().tolist())


def announce_slots(slots: BlockSlots, plan: RoundPlan, paths: DraftPaths | None) -> None:
    """Give blocks of the rows that a plan admits the slots of their adapters: their first ones, and those of the paths
    of their drafts, which may stand in the place of these."""
    admitted = {item.row: item.adapter_slot for item in plan.admissions}
    found = [
        (block, admitted[row]) for row, index, block in plan.block_updates.tolist() if index == 0 and row in admitted
    ]
    if paths is not None:
        found += [(block, slot) for row, slot in admitted.items() for block in paths.blocks_of(row)]
    slots.assign([block for block, _ in found], [slot for _, slot in found])
