"""The method `pard`: a draft model that proposes several tokens in one forward.

Its input is the text and mask tokens behind it; see `pard_layout` for the sequence that trains it. The loss of a depth
is the mean over its places of KL(target ‖ draft), with the target's distribution behind the true text, and some
cross-entropy with the true token. What it writes is an ordinary checkpoint whose config.json has `pard_token` and
`spd_type`, as PARD's authors publish theirs.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn import functional

from trtrun.errors import ConfigError
from trtrun.tokens.text import read_tokenizer
from trtrun.tools.training.data import DataRow
from trtrun.tools.training.methods.context import MethodContext
from trtrun.tools.training.methods.pard_layout import Layout, lay_out
from trtrun.tools.training.models import check_attends_to_all, load_model, stored_dtype

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
    """See `DraftTraining` for what it promises.

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
