"""What an engine's rounds need beside weights and KV store, told from shapes alone: an upper bound.

`trtrun plan` and the ranks on CPUs reckon with it; on GPUs the ranks measure their largest round at start instead
(memory/largest_round.py). On a CPU that round would keep a start waiting for as long as its prompts take, seconds to
minutes, and nothing there counts the peak of what torch holds. It counts what models, kernels and sampling hold at a
time, each at its largest. It knows shapes. It does not know plans, devices' free memory or weights, and it leaves out
what libraries keep for themselves and the contexts that plain torch attention gathers for other rows than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtrun.core.sampling_params import MOST_LOGPROBS
from trtrun.engine.batch import MOST_EVEN_PADDING, tile_width
from trtrun.engine.graphs.graph_cache import MOST_GRAPHS
from trtrun.engine.graphs.graph_shapes import MOST_PROMPT_TOKENS, GraphShapes
from trtrun.engine.rows import RowState
from trtrun.engine.start_forwards import count_tree_graphs
from trtrun.engine.verification import positions_at_once
from trtrun.heads.heads import HeadsPlan
from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.attention import takes_blocks, takes_head, whole_head
from trtrun.kernels.cpu.attention_form import TILE_TOKENS
from trtrun.kernels.triton.attention.attention_tiles import MOST_LATENT_BYTES, MOST_PARTIAL_BYTES
from trtrun.kvcache.specs import PagedLatent, latent_of
from trtrun.kvcache.tile_widths import most_padding
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.loading.weight_check import held_weights
from trtrun.models.config import ModelConfig
from trtrun.models.layer_plan import ModelShape
from trtrun.sampling.filters import MOST_ELEMENTS, RANKING_BYTES, most_ranked
from trtrun.weights.weight import Share

_GRAPH_LAYER_BYTES = 64 << 10
"""What a graph is taken to hold beside its share of the pool, for each layer: its nodes, and the tensors that it reads.
Half of it was seen, of a model of 32 layers on an H100."""

_FLOAT = 4
_MOST_NAMED = 1 + MOST_LOGPROBS
"""Tokens whose log probabilities are reported of a position: its own, and the most likely ones."""

_SAMPLING_TENSORS = 8
"""Tensors of float32 that penalties, filters, noise or acceptance hold of the logits that are worked on at a time."""


@dataclass(frozen=True)
class RoundShape:
    """The largest round of a configuration.

    Attributes:
        max_rows: rows that run at once.
        max_tokens: tokens of one round over all rows.
        draft_len: tokens drafted for a row, one behind the other; 0 without speculation.
        max_seq_len: tokens of one row, at most what the KV store may hold.
        block_size: tokens of a KV block.
        use_logits: whether draft_probs are made and verified.
        num_guesses: drafts that draft ranks of their own make ahead, at most.
        max_paths: of a row's draft; 1 where it is a chain.
        draft_nodes: tokens of a row's draft in all; None where each path has its own.
        most_fed: nodes of a row's draft tree that heads have logits of at once.
        most_catch_up: tokens of a row that a draft engine feeds after rounds that it sat out, at most.
        in_parallel: whether it drafts all tokens of a row in one forward.
    """

    max_rows: int
    max_tokens: int
    draft_len: int
    max_seq_len: int
    block_size: int
    use_logits: bool
    num_guesses: int = 0
    max_paths: int = 1
    most_catch_up: int = 1
    in_parallel: bool = False
    draft_nodes: int | None = None
    most_fed: int = 1

    @property
    def verified_tokens(self) -> int:
        """Tokens of a row that are verified in a round: its newest one and its draft."""
        return 1 + (self.max_paths * self.draft_len if self.draft_nodes is None else self.draft_nodes)

    @property
    def path_tokens(self) -> int:
        """Tokens along all paths of a row in a round, its newest one at the start of each."""
        return self.max_paths * (1 + self.draft_len)


@dataclass(frozen=True)
class EngineForm:
    """One rank of an engine, as far as its memory depends on it.

    Attributes:
        model: of the engine; the target's on a rank of its own for heads.
        share: which part of it the rank has.
        dtype: of activations.
        device_type: "cpu" or "cuda".
        verifies: whether it is the target engine.
        quantization: how its weights are held, by name.
        graphs: whether forwards are captured as CUDA graphs.
        num_taps: boundaries of the residual stream that are handed out.
        kv_in_place: whether kernels read the KV store where it lies.
        heads: that draft for its rows; None without.
    """

    model: ModelConfig
    share: Share
    dtype: torch.dtype
    device_type: str
    verifies: bool = False
    quantization: str = "none"
    graphs: bool = False
    num_taps: int = 0
    kv_in_place: bool = True
    heads: HeadsPlan | None = None

    @property
    def tap_bytes(self) -> int:
        """Bytes of the hidden states of a token that are handed out."""
        return self.num_taps * self.model.hidden_size * self.dtype.itemsize


def working_bytes(shape: RoundShape, form: EngineForm) -> int:
    """Upper bound of the bytes that one rank of an engine needs beside its weights and its KV store in a round of
    `shape`, the largest."""
    model, share, dtype, verifies, heads = form.model, form.share, form.dtype, form.verifies, form.heads
    # A guess is a row of the draft engine.
    drafting = max(shape.max_rows, shape.num_guesses) * (shape.draft_len if shape.in_parallel else 1)
    verified = shape.max_rows * shape.verified_tokens if verifies else drafting
    tokens = max(shape.max_tokens, verified, shape.max_rows * (1 if verifies else shape.most_catch_up))
    # Drafts of different lengths are padded to the longest, beyond what the scheduler counts.
    tokens += verified
    width = tile_width(model, share.size, form.device_type)
    if width:
        tokens += min(shape.max_tokens, shape.max_rows * most_padding(width)) + MOST_EVEN_PADDING
    logits = verified * model.vocab_size * _FLOAT
    scored = min(shape.max_tokens, positions_at_once(model.vocab_size)) if verifies else 0
    head = _head_bytes(verified, form)
    total = sum(RotaryEmbedding.most_bytes(_most_positions(shape), size, dtype) for _, size in set(model.rotations))
    rows = shape.max_rows + shape.num_guesses
    total += RowState.num_bytes(rows, shape.max_seq_len, shape.block_size, shape.draft_len)
    total += _activation_bytes(tokens, form)
    total += _attention_bytes(tokens, shape, form, model)
    scoring = _scoring_bytes(scored, shape.max_tokens, form) if scored else 0
    total += head + logits + max(scoring, _sampling_bytes(shape, verified, form))
    if verifies and shape.max_paths > 1:
        # Attention meets nodes once for each path through them. Logits are laid out by path, of some rows at a time;
        # then those of one path of each.
        total += _activation_bytes(shape.max_rows * shape.path_tokens, form)
        at_a_time = min(shape.max_rows * shape.path_tokens * model.vocab_size, _most_of_paths(shape, model))
        total += (at_a_time + shape.max_rows * (1 + shape.draft_len) * model.vocab_size) * _FLOAT
    total += _product_bytes(tokens, max(verified, scored), form)
    total += 2 * tokens * form.tap_bytes  # as the forward keeps them, and those of prompts as they are handed out
    if heads is not None:
        # Of a round's rows: gathered, in float32, changed, with noise.
        total += heads.num_logits * shape.max_rows * shape.most_fed * model.vocab_size * _FLOAT * _SAMPLING_TENSORS
        total += tokens * heads.token_bytes(share, dtype.itemsize)
        if heads.stored is not None:
            total += RotaryEmbedding.most_bytes(_most_positions(shape), heads.stored.head_dim, dtype)
            total += _attention_bytes(tokens, shape, form, heads.stored)
    if form.graphs:
        total += _graph_bytes(shape, form, width, verified)
    return total


def _graph_bytes(shape: RoundShape, form: EngineForm, width: int | None, verified: int) -> int:
    """What CUDA graphs keep, of forwards with up to `verified` tokens that are verified, and of prompts in tiles of
    `width`."""
    model, heads = form.model, form.heads
    mixes = shape.max_tokens if form.verifies and shape.max_paths == 1 else None
    rows, size, blocks = shape.max_rows, shape.block_size, -(-_most_positions(shape) // shape.block_size)
    shapes = GraphShapes(rows, shape.verified_tokens, blocks, size, width, max_mixed_tokens=mixes)
    mixed = shapes.mixed.all
    captured = max(verified, shape.max_rows * 2, MOST_PROMPT_TOKENS, *(one.tokens for one in mixed))
    of_tiles = -(-MOST_PROMPT_TOKENS // shapes.narrowest_tile) if width else 0
    lines = max(verified, of_tiles, *(one.lines for one in mixed))
    most_graphs = MOST_GRAPHS + len(mixed)
    pool = _activation_bytes(captured, form) + _head_bytes(lines, form)
    # Twice the logits: where graphs write them, and as the head made them.
    total = (
        captured * form.tap_bytes
        + pool
        + 2 * lines * model.vocab_size * _FLOAT
        + most_graphs * model.num_layers * _GRAPH_LAYER_BYTES
    )
    if heads is not None and heads.stored is not None:
        total += verified * (form.tap_bytes + heads.stored.hidden_size * form.dtype.itemsize)
        # A tree is one graph of as many forwards as it is deep.
        of_trees = count_tree_graphs(shapes, shape.draft_len) * shape.draft_len if shape.max_paths > 1 else 0
        total += (MOST_GRAPHS + of_trees) * heads.stored.num_layers * _GRAPH_LAYER_BYTES
    return total


def _most_positions(shape: RoundShape) -> int:
    """Most positions of a row, with those that are scratch behind it."""
    return shape.max_seq_len + shape.draft_len + 2 + shape.block_size


def head_rank_bytes(shape: RoundShape, form: EngineForm) -> int:
    """Upper bound of the bytes that a rank of its own needs for the form's heads, which keep keys and values, beside
    their weights and their KV store in a round of `shape`, the largest."""
    target, heads, dtype = form.model, form.heads, form.dtype
    assert heads is not None and heads.stored is not None
    rows, gained = shape.max_rows + shape.num_guesses, shape.max_rows * (1 + shape.draft_len)
    tokens = max(shape.max_tokens, rows) + gained
    total = RotaryEmbedding.most_bytes(_most_positions(shape), heads.stored.head_dim, dtype)
    total += RowState.num_bytes(rows, shape.max_seq_len, shape.block_size, shape.draft_len)
    # As they come, and as they are laid out by rows.
    total += 2 * tokens * len(heads.taps) * target.hidden_size * dtype.itemsize
    total += tokens * heads.token_bytes(form.share, dtype.itemsize)
    total += _attention_bytes(tokens, shape, form, heads.stored)
    drafting = max(shape.max_rows * shape.most_fed, shape.num_guesses)
    total += heads.num_logits * drafting * target.vocab_size * _FLOAT * _SAMPLING_TENSORS
    if form.graphs:
        of_token = len(heads.taps) * target.hidden_size + heads.stored.hidden_size
        of_trees = shape.draft_len if shape.max_paths > 1 else 0
        total += gained * of_token * dtype.itemsize
        total += MOST_GRAPHS * (1 + of_trees) * heads.stored.num_layers * _GRAPH_LAYER_BYTES
    return total


def _product_bytes(tokens: int, verified: int, form: EngineForm) -> int:
    """What one product needs beside operands and result, by what its quantization says."""
    return max(
        held.working_bytes(weight, verified if weight.use == "head" else tokens, form.dtype, form.device_type)
        for weight, held in held_weights(form.model, form.share, QUANTIZATIONS.get(form.quantization))
    )


def _activation_bytes(tokens: int, form: EngineForm) -> int:
    """What a layer holds, by its plan, beside what is gathered over the group."""
    model, share, dtype = form.model, form.share, form.dtype
    of_token = max(layer.token_bytes(share, dtype.itemsize) for layer in model.layers)
    if model.layer_inputs is not None:
        of_token += model.layer_inputs.token_bytes(dtype.itemsize)
    held = tokens * of_token
    gathered = tokens * model.hidden_size * (share.size * dtype.itemsize + 2 * _FLOAT) if share.size > 1 else 0
    inputs = tokens * 6 * 8
    return held + gathered + inputs


def _attention_bytes(tokens: int, shape: RoundShape, form: EngineForm, model: ModelShape) -> int:
    """What attention of `model`, the engine's or that of heads, needs in the layers where it is most."""
    latent = latent_of(model.keeps(form.share))
    return max(_bytes_of_heads(tokens, shape, form, heads, latent) for heads in model.attention_shapes)


def _bytes_of_heads(
    tokens: int, shape: RoundShape, form: EngineForm, model: ModelShape, latent: PagedLatent | None
) -> int:
    """Partial results of the kernels on GPUs; one row's context, mask and scores where plain torch attends."""
    share, dtype, device_type, kv_in_place = form.share, form.dtype, form.device_type, form.kv_in_place
    if device_type == "cuda" and kv_in_place:
        return MOST_PARTIAL_BYTES if latent is None else MOST_LATENT_BYTES
    is_known = device_type == "cpu" and dtype in (torch.bfloat16, torch.float32)
    has_kernels = is_known and machine.processor_kind() is not None
    if latent is None and has_kernels and kv_in_place and takes_head(model.head_dim) and takes_blocks(shape.block_size):
        return 0
    heads, keys, head_dim = len(model.queries.units(share)), len(model.keys.held(share)), model.head_dim
    if latent is not None:
        keys = head_dim = latent.head_dim
    # A format that no kernel knows is widened, by way of float32 twice.
    held = keys if latent is not None else 2 * keys
    context = held * shape.max_seq_len * (dtype.itemsize + (0 if kv_in_place else 2 * _FLOAT + 1))
    if has_kernels and dtype is torch.float32:
        # The kernel takes whole heads and tiles, keys turned over.
        numbers = whole_head(head_dim) * keys // head_dim
        return context + 3 * (shape.max_seq_len + TILE_TOKENS) * numbers * _FLOAT
    mask = min(tokens, shape.max_seq_len) * shape.max_seq_len * (_FLOAT + 2)
    scores = max(1 << 20, 16 * heads * shape.max_seq_len) * (3 * _FLOAT + dtype.itemsize)
    return context + mask + scores


def _head_bytes(count: int, form: EngineForm) -> int:
    """`count` rows of logits in the dtype of activations, and gathered over the group (layers/embedding.py)."""
    logits = count * form.model.head.cut(form.share).shape[0] * form.dtype.itemsize
    return logits * (1 if form.share.size == 1 else 2 + 2 * form.share.size)


def _scoring_bytes(scored: int, num_tokens: int, form: EngineForm) -> int:
    """Logits of `scored` positions of prompts, in float32, as log probabilities and ranked, and what is kept of all
    tokens of a round, in parts and whole (engine/verification.py)."""
    elements = scored * form.model.vocab_size
    ranked = min(elements, max(most_ranked(form.device_type), form.model.vocab_size)) * RANKING_BYTES
    kept = 2 * num_tokens * _MOST_NAMED * (torch.int64.itemsize + _FLOAT)
    return _head_bytes(scored, form) + 2 * elements * _FLOAT + ranked + kept


def _most_of_paths(shape: RoundShape, model: ModelConfig) -> int:
    """Logits along the paths of rows that are looked at together (speculation/trees.py)."""
    return max(MOST_ELEMENTS, shape.path_tokens * model.vocab_size)


def _sampling_bytes(shape: RoundShape, verified: int, form: EngineForm) -> int:
    """Changed logits, and the temporaries of what is worked on at a time (sampling, speculation/verify.py)."""
    model, verifies = form.model, form.verifies
    row = max(1, verified // shape.max_rows) * model.vocab_size
    elements, most = verified * model.vocab_size, verified * model.vocab_size
    if verifies and shape.max_paths > 1:  # rows with penalties are looked at path by path
        row, most = max(row, shape.path_tokens * model.vocab_size), max(most, _most_of_paths(shape, model))
    at_a_time = min(most, max(MOST_ELEMENTS, row))
    ranked = min(most, max(most_ranked(form.device_type), row))
    scratch = at_a_time * _FLOAT * _SAMPLING_TENSORS + ranked * RANKING_BYTES
    token_ids = shape.max_rows * shape.max_seq_len
    counted = min(token_ids, max(MOST_ELEMENTS, shape.max_seq_len)) * 32
    probabilities = 0
    if shape.use_logits:
        # Made step by step, stacked and padded by the draft; received by the target.
        made = shape.max_rows if verifies else shape.max_rows + shape.num_guesses
        probabilities = made * shape.draft_len * model.vocab_size * _FLOAT * (1 if verifies else 3)
    return elements * _FLOAT + scratch + counted + probabilities
