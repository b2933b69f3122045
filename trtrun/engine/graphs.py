"""CUDA graphs of the forwards that rounds repeat: a whole forward becomes one launch.

On a GPU a small forward takes longer to launch, kernel by kernel from Python, than to run. A forward over rows with the
same number of queries each is captured once for every bucket of rows and of context, and replayed from then on: its
inputs are copied into tensors of fixed place, its logits into one buffer that all graphs share.

Where a row's next token follows from the logits and the row's parameters, a chain of such steps with their choices is
one graph, too.

It knows a function from tokens, positions and block tables to logits. It does not know models, plans or which ranks the
function talks to; collectives inside it must be capturable (`Communicator.is_capturable`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from trtrun.engine.draft_paths import TreeBatch
from trtrun.kernels.torch.graph_capture import capturing
from trtrun.sampling.keyed_ranks import KeyedRanks
from trtrun.sampling.likeliest import likeliest

RowForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
"""(tokens [R, Q], positions [R, Q], block_tables [R, blocks], last_only) → logits [R * Q or R, vocab] float32."""

TreeForward = Callable[[TreeBatch], torch.Tensor]
"""Trees → logits [R * (nodes + 1), vocab] float32."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns work on tensors of fixed place into something that does it again when called."""

MOST_GRAPHS = 64
"""Graphs kept of one engine. Each holds its nodes on the device and a share of the pool; rounds repeat a few shapes."""

MOST_PROMPT_TOKENS = 512
"""Tokens of prompts, padding counted, that are computed through a graph. With more the device has enough to do while
the host launches, and padding would cost more than launching."""

SHARED_CONTEXT = 256
"""Contexts of up to so many tokens share a graph: attention does not split them, however wide the table."""


@dataclass(frozen=True)
class _Shape:
    """What graphs are told apart by. `num_ranked` is 0 for a forward, whose result is logits; `choices` is how a chain
    of steps chooses, None where it takes the likeliest; `paths` is the number and depth of the paths of trees."""

    rows: int
    queries: int
    blocks: int
    last_only: bool = True
    num_ranked: int = 0
    choices: Hashable = None
    paths: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Captured:
    """One graph, the tensors that it reads, and the one that it writes."""

    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor
    replay: Callable[[], None]


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory: they are replayed one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`, which has run once before: libraries allocate at their first use, which a graph cannot."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            work()
        return graph.replay


class ForwardGraphs:
    """Runs row forwards through graphs, made when a shape comes up for the first time.

    The least recently used one is given back when there are too many. Shapes follow from plans, so that all ranks of a
    tensor-parallel group capture and give back alike.
    """

    def __init__(
        self,
        forward: RowForward,
        capture: Capture,
        *,
        max_rows: int,
        logits_per_row: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
        most_tiles: int = 0,
        most_graphs: int = MOST_GRAPHS,
        fewest_blocks: int = 1,
        forward_trees: TreeForward | None = None,
    ) -> None:
        """Capture `forward` on demand.

        Args:
            forward: reads nothing but its arguments and what never moves, and never waits for the device.
            capture: see `Capture`; `CudaCapture` on a GPU.
            max_rows: of one forward.
            logits_per_row: most queries of a row that have logits.
            max_blocks: width of the rows' block tables.
            vocab_size: width of the logits.
            device: where everything lives.
            most_tiles: tiles of prompts of one forward.
            most_graphs: how many to keep.
            fewest_blocks: up to which contexts share a graph.
            forward_trees: as `forward`, of rows with draft trees; None where there are none.
        """
        self._fewest_blocks = fewest_blocks
        self._forward = forward
        self._forward_trees = forward_trees
        self._capture = capture
        self._max_rows = max_rows
        self._max_blocks = max_blocks
        most_logits = max(max_rows * logits_per_row, most_tiles)
        self._logits = torch.empty((most_logits, vocab_size), dtype=torch.float32, device=device)
        self._most_graphs = most_graphs
        self._graphs: OrderedDict[_Shape, _Captured] = OrderedDict()

    @property
    def num_graphs(self) -> int:
        """Shapes that are held."""
        return len(self._graphs)

    def close(self) -> None:
        """Give all graphs back. NCCL waits for ever for a graph that still holds one of its operations when the
        communicator is destroyed, so this comes first."""
        self._graphs.clear()

    def context_blocks(self, blocks: int) -> int:
        """The width of block tables to hand in for contexts of up to `blocks` blocks."""
        return min(max(self._fewest_blocks, 1 << max(0, blocks - 1).bit_length()), self._max_blocks)

    def takes_prompts(self, tiles: int, width: int) -> bool:
        """Whether so many tiles of prompts, of `width` queries each, are computed through a graph."""
        return self._bucket(tiles) * width <= MOST_PROMPT_TOKENS

    def prompt_tiles(self, width: int) -> list[int]:
        """The numbers of tiles of `width` queries that have graphs of their own."""
        buckets = {self._bucket(tiles) for tiles in range(1, MOST_PROMPT_TOKENS // width + 1)}
        return sorted(tiles for tiles in buckets if self.takes_prompts(tiles, width))

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, block_tables: torch.Tensor, last_only: bool
    ) -> torch.Tensor:
        """Run one forward.

        Args:
            tokens: [R, Q] int64 on the device.
            positions: [R, Q] int64; -1 is padding.
            block_tables: [R, `context_blocks`] int64.
            last_only: whether only each row's last query has logits.

        Returns:
            [R * Q, vocab], or [R, vocab] with `last_only`, float32: valid until the next call.
        """
        rows, queries = tokens.shape
        shape = _Shape(self._bucket(rows), queries, block_tables.shape[1], last_only)

        def work(tokens: torch.Tensor, positions: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
            return self._forward(tokens, positions, block_tables, last_only)

        def shared() -> torch.Tensor:
            return self._logits[: shape.rows if last_only else shape.rows * queries]

        self._replay(shape, (tokens, positions, block_tables), work, shared)
        return self._logits[: rows if last_only else rows * queries]

    def run_trees(self, trees: TreeBatch) -> torch.Tensor:
        """Run one forward over rows with draft trees.

        Returns:
            [R * (nodes + 1), vocab] float32: valid until the next call.
        """
        rows, queries = trees.tokens.shape
        count, depth = trees.positions.shape[1:]
        shape = _Shape(self._bucket(rows), queries, trees.tables.shape[2], False, paths=(count, depth))

        forward = self._forward_trees
        assert forward is not None

        def work(*inputs: torch.Tensor) -> torch.Tensor:
            return forward(TreeBatch(*inputs))

        inputs = (trees.tokens, trees.positions, trees.tables, trees.nodes, trees.places)
        self._replay(shape, inputs, work, lambda: self._logits[: shape.rows * queries])
        return self._logits[: rows * queries]

    def run_chain(
        self,
        first: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        vocab_size: int,
        num_ranked: int,
        keyed: KeyedRanks | None = None,
    ) -> torch.Tensor:
        """Feed a token, choose the one that follows, feed that, and so on: one launch for all steps.

        Args:
            first: [R] int64 on the device: the first tokens.
            positions: [R, steps] int64: where each step's token stands; -1 is padding.
            block_tables: [R, `context_blocks`] int64.
            vocab_size: ids to choose from: the first ones.
            num_ranked: how many tokens to tell of each step.
            keyed: how rows choose where some are sampled; None takes the likeliest.

        Returns:
            [R, steps, num_ranked] int64: after each step the tokens that it would choose, best first; valid until the
            next call.
        """
        rows, steps = positions.shape
        choices = None if keyed is None else keyed.kind
        shape = _Shape(self._bucket(rows), steps, block_tables.shape[1], num_ranked=num_ranked, choices=choices)

        def work(
            first: torch.Tensor, positions: torch.Tensor, block_tables: torch.Tensor, *parameters: torch.Tensor
        ) -> torch.Tensor:
            token, ranked = first, []
            for step in range(steps):
                logits = self._forward(token.unsqueeze(1), positions[:, step : step + 1], block_tables, True)
                logits = logits[:, :vocab_size]
                if keyed is None:
                    ranked.append(likeliest(logits, num_ranked))
                else:
                    ranked.append(keyed.rank(logits, step, num_ranked, *parameters))
                token = ranked[-1][:, 0]
            return torch.stack(ranked, dim=1)

        parameters = () if keyed is None else (keyed.rows, keyed.lengths)
        made = partial(first.new_empty, (shape.rows, steps, num_ranked))
        return self._replay(shape, (first, positions, block_tables, *parameters), work, made)[:rows]

    def _bucket(self, rows: int) -> int:
        bucket = 1 << (rows - 1).bit_length()
        # Tiles of prompts may be more than rows.
        return bucket if rows > self._max_rows else min(bucket, self._max_rows)

    def _replay(
        self,
        shape: _Shape,
        inputs: tuple[torch.Tensor, ...],
        work: Callable[..., torch.Tensor],
        make_output: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Run the graph of `shape` on tokens, positions, block tables and whatever else is by row; make it first, to
        write to what `make_output` gives, if need be."""
        captured = self._graphs.get(shape)
        if captured is None:
            captured = self._graphs[shape] = self._make(shape, inputs, work, make_output())
            # Now and not before: capturing has waited for the device, so that none of the others is still running.
            if len(self._graphs) > self._most_graphs:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(shape)
            _fill(captured.inputs, inputs)
            captured.replay()
        return captured.output

    def _make(
        self,
        shape: _Shape,
        inputs: tuple[torch.Tensor, ...],
        work: Callable[..., torch.Tensor],
        output: torch.Tensor,
    ) -> _Captured:
        """Run the work as it is, which also warms it up, and capture it for the next time."""
        fixed = tuple(tensor.new_zeros((shape.rows, *tensor.shape[1:])) for tensor in inputs)
        fixed[1].fill_(-1)  # positions

        def run() -> None:
            output.copy_(work(*fixed))

        _fill(fixed, inputs)
        run()
        return _Captured(fixed, output, self._capture(run))


def _fill(fixed: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copy tokens, positions, block tables and parameters to where a graph reads them; rows that the bucket adds are
    padding."""
    rows = inputs[0].shape[0]
    torch._foreach_copy_([place[:rows] for place in fixed], list(inputs))  # one launch on a GPU
    positions = fixed[1]
    if rows < positions.shape[0]:
        positions[rows:].fill_(-1)


def capture_for(device: torch.device) -> Capture | None:
    """What captures the forwards of an engine on `device`: CUDA graphs on a GPU, nothing elsewhere."""
    return CudaCapture(device) if device.type == "cuda" else None
