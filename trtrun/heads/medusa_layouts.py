"""Medusa's heads as files have them, told apart by the names of their tensors (Cai et al. 2024, arXiv:2401.10774).

    0.0.linear.weight [D, D], 0.0.linear.bias [D], 0.1.weight [V, D]   FasterDecoding: head 0, block 0; 1 is behind it
    the same without the last                                          version 2, TGI: the target's own head serves all
    medusa_head.0.0.linear.weight beside a model's tensors             whole models; ModelOpt's say medusa_heads
    blocks.0.layers.0.weight, lm_heads.0.weight, token_map             vLLM, with or without medusa_heads. in front

How many heads and blocks there are follows from the names: what a config.json says of it is often wrong. It knows names
and shapes. It does without torch, and does not know how heads are computed (heads/medusa_heads.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from parallel.sharding import loaded_vocabulary_range, vocabulary_range
from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError, shorten
from trtrun.heads.heads import HEADS, HEADS_FILES, HeadsTarget
from trtrun.linear.quantization import QUANTIZATIONS, Quantization
from trtrun.models.config import ModelConfig
from trtrun.weights.checkpoint import Checkpoint, read_json
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from parallel.communicator import Communicator
    from trtrun.heads.medusa_heads import MedusaHeads
    from trtrun.weights.weight_reader import WeightReader

_PREFIX = re.compile(r"medusa_heads?\.")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", re.ASCII)
_MATRIX = re.compile(r"(\d+)\.(\d+)\.weight|lm_heads\.(\d+)\.weight", re.ASCII)
_TOKEN_MAP = "token_map"
_MOST = 64
"""Heads, and blocks of one: a larger number in a name is a misprint."""


@dataclass(frozen=True)
class Block:
    """One residual block of a head: names of its tensors; no bias where it has none."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class MedusaPlan:
    """The heads of a directory, those that are used.

    Attributes:
        files: where they are.
        num_heads: in the files.
        blocks: of each head that is used, in order; all have as many.
        matrices: of each head that is used; none where the target's own head serves all.
        token_map: name of the tensor with the target's id of each line of the matrices; None where they are the same.
        hidden_size, vocab_size: of the target.
        num_lines: of the matrices.
        taps: the normed end of the target.
    """

    files: Checkpoint
    num_heads: int
    blocks: tuple[tuple[Block, ...], ...]
    matrices: tuple[str, ...]
    token_map: str | None
    hidden_size: int
    vocab_size: int
    num_lines: int
    taps: tuple[int, ...]
    stored = None

    @property
    def num_logits(self) -> int:
        """The number of heads, which all give logits at once."""
        return len(self.blocks)

    def held(self, weight: Weight) -> Quantization:
        return QUANTIZATIONS.get("none")

    def target_weights(self, target: ModelConfig) -> Sequence[Weight]:
        return () if self.matrices else (target.head,)

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        return 0

    @property
    def block_weights(self) -> Sequence[Sequence[tuple[Weight, Weight | None]]]:
        """Weight and bias [D, D] of each block, by block and head. The first ones read the same, and are multiplied
        with as one."""
        if not self.blocks[0]:
            return ()
        apart = [[self._of_blocks([of_head[place]]) for of_head in self.blocks] for place in range(len(self.blocks[0]))]
        return [[self._of_blocks([of_head[0] for of_head in self.blocks])], *apart[1:]]

    def _of_blocks(self, blocks: Sequence[Block]) -> tuple[Weight, Weight | None]:
        hidden = Axis(self.hidden_size)
        weight = Weight(tuple(StoredTensor(block.weight, (hidden, hidden)) for block in blocks), "linear")
        names = [block.bias for block in blocks if block.bias is not None]
        return weight, Weight(tuple(StoredTensor(name, (hidden,), 0.0) for name in names)) if names else None

    @property
    def matrix_weights(self) -> Sequence[Weight]:
        """[share of the lines, D] of each head, cut as the target's own head is."""
        lines = Axis(self.num_lines, loaded_vocabulary_range, padded=vocabulary_range)
        return [Weight((StoredTensor(name, (lines, Axis(self.hidden_size))),), "head") for name in self.matrices]

    @cached_property
    def weights(self) -> Sequence[Weight]:
        pairs = [pair for of_place in self.block_weights for pair in of_place]
        return [*(part for pair in pairs for part in pair if part is not None), *self.matrix_weights]

    def describe(self) -> str:
        used = len(self.blocks)
        return f"{self.num_heads} Medusa heads" + (f", {used} of them used" if used < self.num_heads else "")

    def build(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> MedusaHeads:
        """Make the heads on this rank.

        Raises:
            CheckpointError: token_map holds what is no token, or one twice.
        """
        import torch

        from trtrun.heads.medusa_heads import MedusaHeads

        matrices = [reader.linear(weight) for weight in self.matrix_weights]
        blocks = [[reader.linear(*pair) for pair in of_place] for of_place in self.block_weights]
        token_map: torch.Tensor | None = None
        if self.token_map is not None:
            token_map = self.files.integers(self.token_map)
            if int(token_map.min()) < 0 or int(token_map.max()) >= self.vocab_size:
                raise CheckpointError(
                    f"{self.files.file(self.token_map)}: {self.token_map} holds ids from {int(token_map.min())} "
                    f"to {int(token_map.max())}, but the target has {self.vocab_size} tokens"
                )
            if len(set(token_map.tolist())) < len(token_map):
                raise CheckpointError(f"{self.files.file(self.token_map)}: {self.token_map} holds an id twice")
            token_map = token_map.to(reader.device)
        return MedusaHeads(
            len(self.blocks),
            self.hidden_size,
            target.dtype,
            blocks,
            matrices,
            target.logits,
            communicator,
            self.vocab_size,
            self.num_lines,
            token_map,
        )


@HEADS.register("medusa")
def read_medusa(path: Path, target: ModelConfig, section: SpeculationSection) -> MedusaPlan:
    """Plan the first `draft_len` heads of those in a directory.

    Raises:
        CheckpointError: see `heads.HEADS`.
    """
    draft_len, files = section.draft_len, Checkpoint(path, HEADS_FILES, "heads")
    blocks, matrices, token_map = _sort_names(files)
    if not blocks and not matrices:
        raise CheckpointError(
            f"{path} has no Medusa heads: none of its {len(files.names())} tensors is called as those are, such as "
            "0.0.linear.weight or blocks.0.layers.0.weight"
        )
    num_heads, num_blocks = _count(files, blocks, matrices)
    if draft_len > num_heads:
        raise CheckpointError(
            f"{path} has {num_heads} Medusa heads, and each drafts one token: set speculation.draft_len to "
            f"{num_heads} or less, not {draft_len}"
        )
    hidden, num_lines = target.hidden_size, target.vocab_size
    if token_map is not None:
        files.check_integers(token_map)
        shape = files.shape(token_map)
        if len(shape) != 1 or not matrices or not shape[0]:
            raise CheckpointError(f"{files.file(token_map)}: token_map has shape {list(shape)}, which fits no heads")
        num_lines = shape[0]
    planned = []
    for head in range(draft_len):
        for place in range(num_blocks):
            block = blocks[head, place]
            _check_shape(files, block.weight, (hidden, hidden), f"the target's hidden size is {hidden}")
            if block.bias is not None:
                _check_shape(files, block.bias, (hidden,), f"the target's hidden size is {hidden}")
        planned.append(tuple(blocks[head, place] for place in range(num_blocks)))
        if matrices:
            lines = f"{num_lines} tokens" if token_map is None else f"{num_lines} tokens of token_map"
            why = f"it is for {lines} of the target's {target.vocab_size}, with a hidden size of {hidden}"
            _check_shape(files, matrices[head], (num_lines, hidden), why)
    return MedusaPlan(
        files,
        num_heads,
        tuple(planned),
        tuple(matrices[head] for head in range(draft_len)) if matrices else (),
        token_map,
        hidden,
        target.vocab_size,
        num_lines,
        (target.num_layers + 1,),
    )


def _sort_names(files: Checkpoint) -> tuple[dict[tuple[int, int], Block], dict[int, str], str | None]:
    """Blocks by head and place, matrices by head, and the token map.

    Raises:
        CheckpointError: a tensor of the heads has a name that none of theirs have, or a matrix stands in a wrong place.
    """
    has_prefix = any(_PREFIX.match(name) for name in files.names())
    weights, biases = dict[tuple[int, int], str](), dict[tuple[int, int], str]()
    matrices, places = dict[int, str](), dict[int, int]()
    token_map = None
    for name in files.names():
        prefix = _PREFIX.match(name)
        own = name[prefix.end() :] if prefix else name
        if own == _TOKEN_MAP:
            token_map = name
            continue
        if has_prefix and prefix is None:
            continue  # of the model that the heads stand beside
        if found := _BLOCK.fullmatch(own):
            head, place, kind = (part for part in found.groups() if part is not None)
            (weights if kind == "weight" else biases)[_number(files, name, head), _number(files, name, place)] = name
        elif found := _MATRIX.fullmatch(own):
            head = _number(files, name, found[1] or found[3])
            if head in matrices:
                raise CheckpointError(f"{files.file(name)}: head {head} has two matrices, {matrices[head]} and {name}")
            matrices[head] = name
            if found[2] is not None:
                places[head] = _number(files, name, found[2])
        elif not own.startswith("model.") and own != "lm_head.weight":
            raise CheckpointError(f"{files.file(name)}: tensor {shorten(name)} is none that Medusa heads have")
    for head, place in places.items():
        num_blocks = sum(key[0] == head for key in weights)
        if place != num_blocks:
            raise CheckpointError(
                f"{files.file(matrices[head])}: {matrices[head]} stands behind {place} blocks, but head {head} has "
                f"{num_blocks}: the file is incomplete"
            )
    orphan = next((key for key in biases if key not in weights), None)
    if orphan is not None:
        raise CheckpointError(f"{files.file(biases[orphan])}: {biases[orphan]} is there, but no weight beside it")
    return {key: Block(name, biases.get(key)) for key, name in weights.items()}, matrices, token_map


def _count(files: Checkpoint, blocks: Mapping[tuple[int, int], Block], matrices: dict[int, str]) -> tuple[int, int]:
    """How many heads there are, and blocks of each. Empties `matrices` where the target's own head serves all.

    Raises:
        CheckpointError: a head lacks what others have.
    """
    heads = {head for head, _ in blocks} | set(matrices)
    num_heads, num_blocks = max(heads) + 1, max((place for _, place in blocks), default=-1) + 1
    if set(matrices) == {0} and num_heads > 1 and read_json(files.path, "config.json", False).get("original_lm_head"):
        matrices.clear()  # vLLM's word for it: this one is the target's
    for head in range(num_heads):
        missing = [f"block {place}" for place in range(num_blocks) if (head, place) not in blocks]
        if matrices and head not in matrices:
            missing.append("the matrix")
        if missing:
            raise CheckpointError(
                f"{files.path} has {num_heads} Medusa heads, but head {head} lacks {missing[0]}: the files are "
                "incomplete"
            )
        for place in range(num_blocks):
            if (blocks[head, place].bias is None) != (blocks[0, place].bias is None):
                raise CheckpointError(
                    f"{files.path} has biases of block {place} for some of its {num_heads} Medusa heads alone: the "
                    "files are incomplete"
                )
    return num_heads, num_blocks


def _number(files: Checkpoint, name: str, digits: str) -> int:
    if len(digits) > 2 or int(digits) >= _MOST:
        raise CheckpointError(f"{files.file(name)}: tensor {shorten(name)}: at most {_MOST} heads and blocks are taken")
    return int(digits)


def _check_shape(files: Checkpoint, name: str, shape: tuple[int, ...], why: str) -> None:
    found = files.shape(name)
    if found != shape:
        raise CheckpointError(
            f"{files.file(name)}: tensor '{name}' has shape {list(found)}, not {list(shape)}: {why}; these heads are "
            "not for this target"
        )
    files.check(name, shape)
