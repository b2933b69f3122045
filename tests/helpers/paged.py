"""Runs models of trtrun over a paged KV store with scattered blocks, alone or as a lock-step tensor-parallel group.

The group lives in one process: its ranks are threads that meet at barriers, so that tests need no mpirun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from parallel.transports.solo import SoloCommunicator
from trtrun.configuration.engine_sections import LoadFormat
from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.formats import choose_format
from trtrun.kvcache.row_states import StateSpace
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.store import KVStore
from trtrun.loading.loading import LoadReport, load_model
from trtrun.models.config import read_model_config
from trtrun.models.decoder import CausalLM

T = TypeVar("T")
CPU = torch.device("cpu")


def straight(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of nothing for values [tokens, heads, head]: what is rotated by them stays as it is."""
    one = torch.ones_like(value[:, :1])
    return one, torch.zeros_like(one)


class LockStepGroup:
    """Shared state of the ranks of one group in one process."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Run `body(rank)` in one thread per rank; the first exception is raised here."""
        size = len(self.slots)
        results: list[T | None] = [None] * size
        errors: list[BaseException] = []

        def start(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        self.barrier.reset()
        return results  # type: ignore[return-value]


class LockStepCommunicator(SoloCommunicator):
    """The collectives that a model uses, among threads."""

    def __init__(self, group: LockStepGroup, rank: int) -> None:
        super().__init__(f"rank{rank}")
        self.rank, self.size, self._group = rank, len(group.slots), group

    def _exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.slots[self.rank] = tensor.clone()
        self._group.barrier.wait()
        everyone = torch.stack(list(self._group.slots))
        self._group.barrier.wait()
        return everyone

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._exchange(tensor).float().sum(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor)[:, self.rank].contiguous()

    def gather(self, tensor: torch.Tensor, root: int) -> torch.Tensor | None:  # type: ignore[override]
        everyone = self._exchange(tensor)
        return everyone if self.rank == root else None


class PagedModel:
    """A model with a KV store; rows are known by number and get blocks in a scattered order as they grow."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype = torch.float32,
        tp_size: int = 1,
        block_size: int = 4,
        num_blocks: int = 200,
        quantization: str = "none",
        device: torch.device = CPU,
        load_format: LoadFormat = "auto",
        kv_format: str = "auto",
        by_experts: bool = False,
    ) -> None:
        self._device = device
        read = read_model_config(path)
        config = read.cut_by_experts() if by_experts else read
        self._group = LockStepGroup(tp_size)

        def load(rank: int) -> tuple[CausalLM, LoadReport]:
            communicator = LockStepCommunicator(self._group, rank) if tp_size > 1 else SoloCommunicator()
            return load_model(
                path,
                config,
                communicator,
                device,
                dtype,
                quantization=quantization,
                load_format=load_format,
                kv_format=kv_format,
            )

        loaded = self._group.run(load)
        self.models = [model for model, _ in loaded]
        self.reports = [report for _, report in loaded]
        made = choose_format(kv_format, config.kv_scheme)
        self.stores = [
            KVStore(
                model.keeps,
                num_blocks,
                block_size,
                dtype,
                device,
                made,
                state_space=StateSpace(num_blocks, 8, True),
                state_operations=operations_of(device.type).states,
            )
            for model in self.models
        ]
        self.block_size = block_size
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        self._free = [int(block) for block in order]
        self._tables: dict[int, list[int]] = {}

    def forward(
        self,
        batch: Sequence[Sequence[tuple[int, int, Sequence[int]]]],
        spare_blocks: int = 0,
        wanted: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One forward of several segments, each a list of (row, first position, tokens) of equal length.

        Args:
            batch: the segments.
            spare_blocks: null blocks that widen every block table, as a coarser bucket would.
            wanted: tokens whose logits are asked for, None for all.

        Returns:
            [n, vocab_size] float32 logits of every token that is wanted, in order, equal on all ranks.
        """
        segments, tokens, positions = [], [], []
        for rows in batch:
            queries = len(rows[0][2])
            tables = [self._table(row, start + queries) for row, start, _ in rows]
            width = max(len(table) for table in tables) + spare_blocks
            padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], device=self._device)
            places = torch.stack([torch.arange(start, start + queries, device=self._device) for _, start, _ in rows])
            segments.append(AttentionSegment(len(tokens), len(rows), queries, padded, places))
            tokens.extend(token for _, _, ids in rows for token in ids)
            positions.append(places.reshape(-1))

        def body(rank: int) -> torch.Tensor:
            model = self.models[rank]
            batch_on_rank = AttentionBatch(segments, self.block_size)
            chosen = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=self._device)
            ids = torch.tensor(tokens, device=self._device)
            hidden = model.forward(ids, torch.cat(positions), batch_on_rank, self.stores[rank], chosen)
            return model.logits(hidden) if len(hidden) else torch.empty((0, model.config.vocab_size))

        logits = self._group.run(body)
        assert all(torch.equal(logits[0], other) for other in logits[1:])
        return logits[0]

    def _table(self, row: int, length: int) -> list[int]:
        table = self._tables.setdefault(row, [])
        while len(table) * self.block_size < length:
            table.append(self._free.pop())
            for store in self.stores:
                if store.states is not None:
                    store.states.announce(*torch.tensor([[row], table[-1:]], device=store.device))
        return table


def check_tilings(
    device: torch.device,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    tilings: Sequence[tuple[int, bool]] = ((16, False), (16, True), (32, False), (32, True), (64, False), (64, True)),
) -> None:
    """Tiles, split or not, have the same bits as the largest one: rows of 11 queries, one of them with padding."""
    from trtrun.kernels.triton.attention.paged_attention import _attend_rows

    generator = torch.Generator().manual_seed(heads)
    kv_heads, queries, blocks = 2, 11, 34
    store = torch.randn(2, 2 * blocks + 1, kv_heads, 16, head_dim, generator=generator).to(device, dtype)
    tables = (torch.randperm(2 * blocks, generator=generator) + 1).view(2, blocks).to(device)
    positions = torch.tensor([[250], [520]]) + torch.arange(queries)
    positions[0, 8:] = -1
    query = torch.randn(2 * queries, heads, head_dim, generator=generator).to(device, dtype)
    real = (positions.flatten() >= 0).to(device)

    def attend(sinks: torch.Tensor | None, tile: int, is_split: bool) -> torch.Tensor:
        output, places = torch.zeros_like(query), positions.to(device)
        _attend_rows(query, store, tables, places, 0.2, window, output, tile, is_split, sinks=sinks)
        return output[real]

    for sinks in (None, torch.arange(heads, device=device).float()):
        expected = attend(sinks, 128, False)
        assert expected.isfinite().all() and expected.any(dim=-1).all()
        for tile, is_split in tilings:
            assert torch.equal(attend(sinks, tile, is_split), expected), (tile, is_split)
