"""The method `pard`: a draft model that proposes several tokens in one forward.

PARD (An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation", arXiv 2504.18583)
trains all depths of all places of a text in one forward. The sequence is the text, and behind it for each place i and
each depth j from 1 on a mask token at position i + j, which sees the text up to i, the masks of i before it, and
itself. With conditional drop only some places keep a depth: a share of `retention` of those that keep the one before,
and `least_retention` of all at least. A place that keeps a depth keeps all before it: its mask sees theirs.

The loss of a depth is the mean over its places of KL(target ‖ draft), with the target's distribution behind the true
text, and some cross-entropy with the true token. What it writes is an ordinary checkpoint whose config.json has
`pard_token` and `spd_type`, as PARD's authors publish theirs.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn import functional

from trtrun.errors import ConfigError
from trtrun.tokens.text import read_tokenizer
from trtrun.tools.training.data import DataRow
from trtrun.tools.training.methods.table import MethodContext
from trtrun.tools.training.models import check_attends_to_all, load_model, stored_dtype


@dataclass(frozen=True)
class Layout:
    """The sequences of some rows, of one length by padding.

    Attributes:
        tokens: [rows, length] int64; masks hold the mask token, padding too.
        positions: [rows, length] int64.
        starts: [rows, length] int64: the place in the text up to which each entry sees it; -1 for padding.
        depths: [rows, length] int64: 0 for the text, j for a mask of depth j; -1 for padding.
        predicts: [rows, length] bool: whether the entry's logits count.
        text: [rows, longest] int64: the rows alone, padded with 0: what the target reads.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    depths: torch.Tensor
    predicts: torch.Tensor
    text: torch.Tensor

    def visible(self) -> torch.Tensor:
        """[rows, 1, length, length] bool: which entry (third axis) sees which (fourth)."""
        start, depth = self.starts[:, :, None], self.depths[:, :, None]
        other_start, other_depth = self.starts[:, None, :], self.depths[:, None, :]
        text = (other_depth == 0) & (other_start <= start)
        own = (other_start == start) & (other_depth <= depth)
        return (text | own)[:, None]

    def predicted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and place in the text of each entry that predicts, one row after the other: the token behind that place
        is what it is to guess."""
        rows, entries = self.predicts.nonzero(as_tuple=True)
        return rows, self.positions[rows, entries]

    def to(self, device: torch.device) -> Layout:
        """Copy the layout to another device."""
        return Layout(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def kept_places(num_places: int, num_masks: int, retention: float, least: float) -> list[int]:
    """How many of a row's places keep depth 1, 2, … num_masks."""
    counts: list[int] = []
    for depth in range(1, num_masks + 1):
        share = max(retention**depth, least)
        counts.append(min(num_places, math.ceil(share * num_places)))
    return counts


def lay_out(
    rows: Sequence[DataRow],
    mask_token: int,
    num_tokens: int,
    generators: Sequence[numpy.random.Generator] | None = None,
    retention: float = 1.0,
    least: float = 1.0,
) -> Layout:
    """Put rows and masks one behind the other.

    Args:
        rows: their prompts are seen and not learned.
        mask_token: its id.
        num_tokens: tokens that one forward proposes: depths 0 to num_tokens - 1.
        generators: of each row's drops; None keeps everything.
        retention: see the module.
        least: see the module.
    """
    parts = [
        _lay_out_row(row, num_tokens, generators[index] if generators else None, retention, least)
        for index, row in enumerate(rows)
    ]
    longest = max(len(row.tokens) for row in rows)
    most_masks = max(len(starts) for starts, _ in parts)
    shape = (len(rows), longest + most_masks)
    tokens = numpy.full(shape, mask_token, dtype=numpy.int64)
    positions = numpy.zeros(shape, dtype=numpy.int64)
    starts = numpy.full(shape, -1, dtype=numpy.int64)
    depths = numpy.full(shape, -1, dtype=numpy.int64)
    predicts = numpy.zeros(shape, dtype=bool)
    text = numpy.zeros((len(rows), longest), dtype=numpy.int64)
    for index, (row, (mask_starts, mask_depths)) in enumerate(zip(rows, parts, strict=True)):
        length, masks = len(row.tokens), slice(longest, longest + len(mask_starts))
        text[index, :length] = tokens[index, :length] = row.tokens
        positions[index, :length] = starts[index, :length] = numpy.arange(length)
        depths[index, :length] = 0
        predicts[index, row.prompt_length - 1 : length - 1] = True
        starts[index, masks], depths[index, masks] = mask_starts, mask_depths
        positions[index, masks] = mask_starts + mask_depths
        predicts[index, masks] = True
    return Layout(*map(torch.from_numpy, (tokens, positions, starts, depths, predicts, text)))


def _lay_out_row(
    row: DataRow, num_tokens: int, generator: numpy.random.Generator | None, retention: float, least: float
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Starts and depths of a row's masks. A mask at position p predicts p + 1, which must be in the row."""
    first, num_places = row.prompt_length - 1, len(row.tokens) - row.prompt_length
    counts = kept_places(num_places, num_tokens - 1, retention, least)
    order = numpy.arange(num_places) if generator is None else generator.permutation(num_places)
    starts, depths = [], []
    for depth, count in enumerate(counts, start=1):
        kept = numpy.sort(order[:count]) + first
        kept = kept[kept + depth + 1 < len(row.tokens)]
        starts.append(kept)
        depths.append(numpy.full(len(kept), depth))
    if not starts:
        return numpy.zeros(0, dtype=numpy.int64), numpy.zeros(0, dtype=numpy.int64)
    return numpy.concatenate(starts), numpy.concatenate(depths)


SPD_TYPE = "pard"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""What is copied from the draft that it starts from, as far as it is there."""

DROPS = 2
"""Names the random stream of dropped places, beside those of data.py."""


class PardMethod:
    """The `DraftTraining` of `pard`.

    Args:
        context: `draft` is the checkpoint whose weights it starts from.

    Raises:
        CheckpointError: transformers cannot load that checkpoint.
        ConfigError: the mask token is none that it can read.
    """

    def __init__(self, context: MethodContext) -> None:
        assert context.draft is not None
        self._settings, self._device, self._target = context.settings, context.device, context.target
        self._draft = context.draft
        self.model = load_model(context.draft, torch.float32).to(context.device)
        config = self.model.config
        check_attends_to_all(config.to_dict(), self._settings.max_length, f"the draft {context.draft}")
        self._dtype = stored_dtype(context.draft)
        given = self._settings.pard_token
        self.pard_token = find_pard_token(config, context.draft) if given is None else given
        if not 0 <= self.pard_token < config.vocab_size:
            raise ConfigError(f"--pard-token {self.pard_token}: the draft has tokens 0 to {config.vocab_size - 1}")
        self.num_depths = self._settings.num_tokens
        self.vocab_size = min(config.vocab_size, context.target_vocab_size)
        config.pard_token, config.spd_type = self.pard_token, SPD_TYPE

    def check(self, rows: Sequence[DataRow]) -> None:
        """Raise ConfigError for rows that the drafter cannot read."""
        for row in rows:
            if max(row.tokens) >= self.model.config.vocab_size:
                raise ConfigError(
                    f"line {row.number} of the data holds token {max(row.tokens)}, but the draft has a vocabulary of "
                    f"{self.model.config.vocab_size}: start from a draft that knows the target's tokens"
                )
            if self.pard_token in row.tokens:
                raise ConfigError(
                    f"line {row.number} of the data holds token {self.pard_token}, which is to stand for tokens that "
                    "are guessed: choose one with --pard-token that no text has"
                )

    def prepare(self, rows: Sequence[DataRow], step: int, indexes: Sequence[int]) -> Layout:
        """The sequences of some rows of one step; what is dropped depends on step and row alone."""
        settings = self._settings
        generators = [numpy.random.default_rng([settings.seed, DROPS, step, index]) for index in indexes]
        layout = lay_out(
            rows, self.pard_token, settings.num_tokens, generators, settings.retention, settings.least_retention
        )
        return layout.to(self._device)

    def counts(self, prepared: Layout) -> torch.Tensor:
        """[num_tokens] float32: places that predict, by depth."""
        found = torch.bincount(prepared.depths[prepared.predicts], minlength=self._settings.num_tokens)
        return found.to(torch.float32)

    def losses(self, prepared: Layout) -> torch.Tensor:
        """[num_tokens] float32: the loss by depth, summed over places; with gradients."""
        settings, logits = self._settings, self.logits(prepared)
        rows, places = prepared.predicted()
        loss = torch.zeros(len(logits), device=logits.device)
        if settings.cross_entropy:
            loss = loss + settings.cross_entropy * functional.cross_entropy(
                logits, prepared.text[rows, places + 1], reduction="none"
            )
        if settings.divergence:
            assert self._target is not None
            wanted = self._target.read(prepared.text).log_probs(self.vocab_size)[rows, places]
            # The target's entropy has no gradient: in this form one kernel does the rest.
            entropy = -(wanted.exp() * wanted).sum(-1)
            soft = functional.cross_entropy(logits, wanted.exp(), reduction="none")
            loss = loss + settings.divergence * (soft - entropy)
        depths = prepared.depths[prepared.predicts]
        return torch.zeros(settings.num_tokens, device=loss.device).index_add(0, depths, loss)

    @torch.no_grad()
    def matches(self, rows: Sequence[DataRow]) -> list[torch.Tensor]:
        """Whether each draft token is the data's: for each row [places, num_tokens] bool on the CPU; see
        `DraftTraining`."""
        layout = lay_out(rows, self.pard_token, self._settings.num_tokens).to(self._device)
        row_indexes, places = layout.predicted()
        is_match = (self.logits(layout).argmax(-1) == layout.text[row_indexes, places + 1]).cpu()
        starts, depths = layout.starts[layout.predicts].cpu(), layout.depths[layout.predicts].cpu()
        row_indexes, found = row_indexes.cpu(), []
        for index, row in enumerate(rows):
            table = torch.zeros(len(row.tokens) - row.prompt_length, self._settings.num_tokens, dtype=torch.bool)
            own = row_indexes == index
            table[starts[own] - row.prompt_length + 1, depths[own]] = is_match[own]
            found.append(table)
        return found

    def logits(self, layout: Layout) -> torch.Tensor:
        """[predicting entries, vocabulary] float32 of the draft, in the order of `layout.predicted()`."""
        bias = torch.zeros(layout.visible().shape, device=self._device)
        bias = bias.masked_fill(~layout.visible(), torch.finfo(torch.float32).min)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16"):
            hidden = self.model.base_model(
                input_ids=layout.tokens, position_ids=layout.positions, attention_mask=bias, use_cache=False
            ).last_hidden_state
            logits = self.model.get_output_embeddings()(hidden[layout.predicts])
        found: torch.Tensor = logits[:, : self.vocab_size].float()
        return found

    def finish(self) -> None:
        """Round the weights to the dtype of the draft that it started from."""
        self.model.to(self._dtype).to(torch.float32)

    def save(self, directory: Path) -> None:
        """Write config.json, the weights in the dtype of the draft that it started from, and that one's tokenizer."""
        copy.deepcopy(self.model).to(self._dtype).save_pretrained(directory)
        for name in TOKENIZER_FILES:
            if (self._draft / name).is_file():
                shutil.copyfile(self._draft / name, directory / name)


def make(context: MethodContext) -> PardMethod:
    """Load the draft to train; see PardMethod."""
    return PardMethod(context)


def find_pard_token(config: Any, draft: Path) -> int:
    """The mask token of a draft that has one, else the last id of its vocabulary that its tokenizer leaves free.

    Raises:
        ConfigError: there is none.
    """
    known = getattr(config, "pard_token", None)
    if known is not None:
        return int(known)
    tokenizer = read_tokenizer(draft)
    taken = set() if tokenizer is None else set(tokenizer.vocabulary().values())
    free: int = config.vocab_size - 1
    while free in taken:
        free -= 1
    if tokenizer is None or free < 0:
        raise ConfigError(
            "--pard-token: name the id of a token that no text has, since the draft's tokenizer leaves none free"
        )
    return free
