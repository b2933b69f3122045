"""How many CUDA graphs a start captures: counted from a configuration and config.json, as the start makes them.

Pure functions. They know no device and no rank; whether there are graphs at all is for others to say.
"""

from __future__ import annotations

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.rows import row_columns
from trtrun.engine.start_forwards import (
    StartLimits,
    count_draft_graphs,
    count_head_graphs,
    count_target_graphs,
    count_tree_graphs,
)
from trtrun.loading.model_settings import JobModels
from trtrun.memory.memory_requirements import round_shape
from trtrun.memory.spaces import guess_space, path_space
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
    limits = StartLimits(config.scheduler.max_num_tokens, rows, models.context)
    shape = round_shape(config, models)
    if role == "target":
        verified = shape.verified_tokens
        has_trees = path_space(config, 0).most_paths > 1
        mixes = None if has_trees else config.scheduler.max_num_tokens
        shapes = GraphShapes(rows, verified, max_blocks, size, prompt_width, max_mixed_tokens=mixes)
        graphs = count_target_graphs(shapes, limits, sure_draft_lens(config), has_trees=has_trees)
        method = METHODS[config.speculation.method]
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
