"""A rank's engines from its loaded models, over stores of any size, and how many CUDA graphs a start captures for them.

Graphs are counted from a configuration and config.json alone, so that plans count them, too. It does not know weights'
files, memory or how many blocks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from parallel.communicator import Communicator
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.engine.forwards import EngineShape
from trtrun.engine.graphs.graph_cache import MOST_GRAPHS, Capture, capture_for
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.heads.head_rows import HeadRows
from trtrun.engine.rows import RowState, row_columns
from trtrun.engine.runner import Engine
from trtrun.engine.start_forwards import (
    StartLimits,
    count_chain_graphs,
    count_draft_graphs,
    count_head_graphs,
    count_target_graphs,
    count_tree_graphs,
)
from trtrun.engine.warmup import warm_up
from trtrun.heads.heads import HeadsPlan
from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.formats import choose_format
from trtrun.kvcache.sizing import NUM_NULL_BLOCKS, StoreSize, blocks_of_tokens
from trtrun.kvcache.store import KVStore
from trtrun.kvcache.window_places import WindowSpace
from trtrun.loading.loading import LoadReport
from trtrun.loading.model_settings import JobModels
from trtrun.memory.largest_round import SilentExchange, TrialRun, chained_round, largest_rounds
from trtrun.memory.memory_requirements import HiddenKind, round_shape, target_taps
from trtrun.memory.spaces import guess_space, layers_in_places, path_space, state_space
from trtrun.memory.working_memory import RoundShape
from trtrun.models.decoder import CausalLM
from trtrun.rounds.exchange.exchange import Exchange
from trtrun.rounds.round import Worker
from trtrun.sampling.distributions import NUM_KINDS
from trtrun.speculation.ahead.chains import NUM_RANKED
from trtrun.start.job_spec import JobSpec
from trtrun.start.policies import sure_draft_lens


def count_graphs(config: RuntimeConfig, models: JobModels, role: str, prompt_width: int | None, num_kinds: int) -> int:
    """Graphs of one rank of an engine that has any, and of heads beside it or on a rank of their own, once it is warm.

    Args:
        config: of the job.
        models: of the job.
        role: "draft" or "target".
        prompt_width: tokens of the tiles that it cuts prompts into (`prompt_tiles.tile_width`); None where it cuts
            none.
        num_kinds: kinds of choices of sampled rows that have kernels (`KeyedRanks.kinds`).
    """
    size = config.kv_cache.block_size
    _, max_blocks = row_columns(models.context, size, config.speculation.draft_len)
    rows = config.scheduler.max_batch_size
    limits = StartLimits(models.most_tokens, rows, models.context)
    shape = round_shape(config, models)
    if role == "target":
        verified = shape.verified_tokens
        has_trees = path_space(config, 0).most_paths > 1
        mixes = None if has_trees else models.most_tokens
        shapes = GraphShapes(rows, verified, max_blocks, size, prompt_width, max_mixed_tokens=mixes)
        graphs = count_target_graphs(shapes, limits, sure_draft_lens(config), has_trees=has_trees)
        method = METHODS[config.speculation.method]
        if method.reads_keys:
            return graphs + count_chain_graphs(shapes, 1 + num_kinds)
        keeps_heads = method.num_behind > 0
        if not keeps_heads or config.heads_apart or method.drafts_masked:
            return graphs
        of_trees = count_tree_graphs(shapes, config.draft_len) if has_trees else 0
        return graphs + of_trees + count_head_graphs(shapes, 1 + num_kinds, has_trees=has_trees)
    masked = config.draft_len if shape.in_parallel else 0
    if config.heads_apart:
        shapes, has_trees = head_graph_shapes(config, models.context), path_space(config, 0).most_paths > 1
        of_trees = count_tree_graphs(shapes, config.draft_len) if has_trees else 0
        return of_trees + count_head_graphs(shapes, 1 + num_kinds, has_trees=has_trees)
    shapes = GraphShapes(rows + guess_space(config, 0).most_guesses, 1, max_blocks, size, prompt_width, masked)
    kinds = 1 + (0 if config.speculation.use_logits else num_kinds)
    kinds = 0 if config.translates_drafts else kinds
    return count_draft_graphs(shapes, limits, shape.most_catch_up, kinds)


def head_graph_shapes(config: RuntimeConfig, context: int) -> GraphShapes:
    """The shapes of the graphs of heads on a rank of their own: of what a row gains in a round."""
    size = config.kv_cache.block_size
    _, max_blocks = row_columns(context, size, config.speculation.draft_len)
    return GraphShapes(config.scheduler.max_batch_size, 1 + config.draft_len, max_blocks, size)


_FEW_LAYERS = 2
"""Of a model in which layers may take turns in what they run."""


@dataclass
class LoadedEngine:
    """One engine rank with its weights and without a KV store."""

    model: CausalLM
    report: LoadReport
    communicator: Communicator


@dataclass(frozen=True)
class EngineMaker:
    """Makes one rank's engines.

    Attributes:
        spec: of the job.
        device: of the engines.
        loaded: by role, as far as they are loaded.
        heads: plan of those that draft from what the target computes; None without.
        has_heads: whether they are on this rank.
        make_worker: of engines by role, and whose rows heads are fed, over an exchange.
    """

    spec: JobSpec
    device: torch.device
    loaded: Mapping[str, LoadedEngine]
    heads: HeadsPlan | None
    has_heads: bool
    make_worker: Callable[[Mapping[str, Engine], HeadRows | None, Exchange], Worker]

    def engines(self, size: StoreSize, capture: Capture | None = None) -> dict[str, Engine]:
        """By role, over stores of that size; `capture` takes the place of the device's."""
        return {role: self._make(role, loaded, size, capture) for role, loaded in self.loaded.items()}

    def head_rows(self, engines: Mapping[str, Engine], capture: Capture | None = None) -> HeadRows | None:
        """Whose rows the rank's heads are fed, where these keep keys and values of rows; None elsewhere."""
        config, heads = self.spec.config, self.heads
        if heads is None or heads.stored is None or not self.has_heads:
            return None
        if not config.heads_apart:
            return HeadRows.of(engines["target"])
        rows = RowState(
            config.scheduler.max_batch_size,
            self.spec.models.context,
            config.kv_cache.block_size,
            config.speculation.draft_len,
            self.spec.target.vocab_size,
            self.device,
            guess_space(config, 0).most_guesses,
            ends_thoughts=False,
        )
        capture = (capture or capture_for(self.device)) if config.cuda_graphs else None
        shapes = None if capture is None else head_graph_shapes(config, self.spec.models.context)
        return HeadRows(rows, (len(heads.taps), self.spec.target.hidden_size), capture, shapes, are_own=True)

    def warm_up(self, worker: Worker, engines: Mapping[str, Engine], *, leaves_graphs: bool = False) -> None:
        """Run every kernel once, and capture the graphs, or of engines' the largest alone: see `warm_up`."""
        config, limits = self.spec.config, self.spec.config.scheduler
        shape = round_shape(config, self.spec.models)
        for role, engine in engines.items():
            verifies, is_apart = role == "target", role == "draft" and config.drafts_apart
            # Draft ranks of their own feed rows one token, as a draft of two does, or draft all anew.
            lens, ranked = ({2, config.draft_len}, NUM_RANKED) if is_apart else (sure_draft_lens(config), 1)
            if role == "draft" and config.translates_drafts:  # which chooses in the target's tokens
                ranked = 0
            warm_up(
                engine,
                lens,
                self.spec.models.most_tokens,
                limits.max_batch_size,
                verifies=verifies,
                num_ranked=ranked,
                most_catch_up=shape.most_catch_up,
                samples_steps=not config.speculation.use_logits,
                in_parallel=shape.in_parallel,
                leaves_graphs=leaves_graphs,
            )
        if worker.drafter is not None:
            worker.drafter.warm_up()

    def trial_run(self, shape: RoundShape, capture: Capture | None = None) -> TrialRun:
        """Engines over stores of the null block alone."""
        engines = self.engines(StoreSize(NUM_NULL_BLOCKS, NUM_NULL_BLOCKS), capture)
        told = HiddenKind.of(self.spec.config, self.spec.target, self.heads)
        exchange = SilentExchange(
            self.device,
            self.spec.target.vocab_size,
            verifies="target" in engines,
            tapped=None if told is None else (told.shape, told.dtype),
        )
        return TrialRun(self.make_worker(engines, self.head_rows(engines, capture), exchange), engines, shape)

    def play_all(self) -> None:
        """Do what follows of a start, rounds of all kinds, with few layers: for who looks at which kernels run."""
        with ExitStack() as stack:
            for loaded in self.loaded.values():
                stack.enter_context(loaded.model.shortened(_FEW_LAYERS))
            shape = round_shape(self.spec.config, self.spec.models)
            trial = self.trial_run(shape, lambda work: _do_nothing)
            stack.callback(trial.close)
            mixed, _, short, _, few, scored = largest_rounds(shape)  # the others run the same kernels
            for plan in (mixed, short, few, scored, chained_round(shape)):
                trial.play(plan)
            self.warm_up(trial.worker, trial.engines)

    def _make(self, role: str, loaded: LoadedEngine, size: StoreSize, capture: Capture | None) -> Engine:
        model, config, num_blocks = loaded.model, self.spec.config, size.blocks
        layers = layers_in_places(config, self.spec.models, role)
        guesses, paths = guess_space(config, num_blocks), path_space(config, num_blocks)
        store = KVStore(
            model.keeps,
            num_blocks + (guesses if role == "draft" else paths).num_blocks,
            config.kv_cache.block_size,
            model.dtype,
            self.device,
            choose_format(config.kv_cache.dtype, model.config.kv_scheme),
            None if layers is None else WindowSpace(layers, size.places),
            num_blocks,
            state_space=state_space(config, self.spec.models, role, num_blocks),
            state_operations=operations_of(self.device.type).states,
            has_adapters=model.adapted is not None,
        )
        if self.device.type == "cpu":
            # As much as one forward may write: enough for the first requests to run at full speed, and little beside
            # the weights. The rest of a store, which may be half of the memory, costs nothing until it is used.
            store.commit(min(num_blocks, blocks_of_tokens(config.max_num_tokens, config.kv_cache.block_size)))
        rows = RowState(
            config.scheduler.max_batch_size,
            self.spec.models.context,
            config.kv_cache.block_size,
            config.speculation.draft_len,
            min(model.config.vocab_size, self.spec.target.vocab_size),
            self.device,
            guesses.most_guesses if role == "draft" else 0,
            ends_thoughts=role == "target",
        )
        graphs = config.cuda_graphs and loaded.communicator.is_capturable
        capture = (capture or capture_for(self.device)) if graphs else None
        shape = round_shape(config, self.spec.models)
        num_made = count_graphs(config, self.spec.models, role, model.prompt_width, NUM_KINDS)
        most_graphs = max(MOST_GRAPHS, num_made)  # all that a start makes are kept: which rounds need them is not known
        if role != "target":
            masked = config.draft_len if shape.in_parallel else 0
            return Engine(model, store, rows, EngineShape(capture, most_masked=masked, most_graphs=most_graphs))
        asked = EngineShape(
            capture,
            shape.verified_tokens,
            target_taps(config, model.config, self.heads),
            paths if paths.most_paths > 1 else None,
            max_tokens=self.spec.models.most_tokens,
            most_graphs=most_graphs,
        )
        return Engine(model, store, rows, asked)


def _do_nothing() -> None:
    """In the place of a graph."""
