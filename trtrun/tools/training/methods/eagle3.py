"""The method `eagle3`: a decoder layer that drafts from the target's hidden states, and then from its own (EAGLE-3).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv
2503.01840. Each row is drafted from at all its places at once, `num_tokens` steps deep, with the data's tokens; see
`eagle3_model` for the steps. The loss of a step is the mean over its places of KL(target ‖ head) over the tokens that
the head knows, where the target's first choice is among them, and of the cross-entropy with the data's token likewise;
places where it is not count as zeros, as in SpecForge. Target and embedding are frozen.

What is written is laid out as the reference's and SpecForge's files: model.safetensors with `fc`, `midlayer`, `norm`,
`lm_head`, `d2t` (how far each of its tokens is from the target's id) and `t2d` (which of the target's tokens it knows),
and config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

from trtrun.errors import RustLibrary
from trtrun.tools.training.data import DataRow
from trtrun.tools.training.methods.context import MethodContext
from trtrun.tools.training.methods.eagle3_config import choose_boundaries, commonest_tokens, make_config
from trtrun.tools.training.methods.eagle3_model import Eagle3Model, join, make_rotary
from trtrun.tools.training.methods.head_batch import HeadBatch, check_long_enough, pad_rows, tables_of
from trtrun.tools.training.models import TargetOutput, read_config, stored_dtype

WEIGHTS = "model.safetensors"
UNKNOWN = -1
"""In the place of a token that the head does not know."""


class Eagle3Method:
    """See `DraftTraining` for what it promises.

    Args:
        context: with a target.

    Raises:
        ConfigError: the target has no such layers, or fewer tokens than the head is to know.
    """

    def __init__(self, context: MethodContext) -> None:
        assert context.target is not None
        self._settings, self._device, self._target = context.settings, context.device, context.target
        self._dtype, self.num_depths = stored_dtype(context.target_path), context.settings.num_tokens
        of_target, vocab_size = read_config(context.target_path), context.target_vocab_size
        captured = context.settings.eagle3_layers_to_capture
        self.boundaries = choose_boundaries(of_target["num_hidden_layers"], captured)
        known = commonest_tokens(context.rows, vocab_size, context.settings.draft_vocab_size)
        self.token_ids = torch.tensor(known, device=self._device)
        self._own_ids = torch.full((vocab_size,), UNKNOWN, device=self._device)
        self._own_ids[self.token_ids] = torch.arange(len(known), device=self._device)
        dtype_name = str(self._dtype).removeprefix("torch.")
        self.config = make_config(of_target, self.boundaries, len(known), dtype_name)
        head = context.target.head_weight()[self.token_ids]
        self.model = Eagle3Model(self.config, len(self.boundaries), head, context.settings.seed).to(self._device)
        self._rotary = make_rotary(self.config, self._device)

    def check(self, rows: Sequence[DataRow]) -> None:
        """Raise ConfigError where no row is long enough for a guess."""
        check_long_enough(rows)

    def prepare(self, rows: Sequence[DataRow], step: int, indexes: Sequence[int]) -> HeadBatch:
        """The rows, padded; nothing is random."""
        return pad_rows(rows, self._device)

    def counts(self, prepared: HeadBatch) -> torch.Tensor:
        """[num_tokens] float32: guesses of each step."""
        return torch.stack([prepared.places(depth).sum() for depth in range(self.num_depths)]).to(torch.float32)

    def losses(self, prepared: HeadBatch) -> torch.Tensor:
        """[num_tokens] float32: the loss of each step, summed over its guesses; with gradients."""
        settings, text = self._settings, prepared.text
        output = self._target.read(text, self.boundaries)
        said = self._read_choices(output, prepared) if settings.divergence else None
        found = []
        for depth, states in enumerate(self._unroll(output, prepared)):
            rows, places = prepared.places(depth).nonzero(as_tuple=True)
            logits = self._logits(states[rows, places])
            loss = logits.new_zeros(())
            if settings.cross_entropy:
                labels = self._own_ids[text[rows, places + 2 + depth]]
                entropy = functional.cross_entropy(logits, labels, ignore_index=UNKNOWN, reduction="sum")
                loss = loss + settings.cross_entropy * entropy
            if said is not None:
                log_probs, is_known, lines = said
                own = lines[rows, places + 1 + depth]
                # In this form the target's own entropy, which has no gradient, is taken off.
                every = functional.kl_div(logits.log_softmax(-1), log_probs[own], reduction="none", log_target=True)
                loss = loss + settings.divergence * every.sum(-1).where(is_known[own], 0).sum()
            found.append(loss)
        return torch.stack(found)

    @torch.no_grad()
    def matches(self, rows: Sequence[DataRow]) -> list[torch.Tensor]:
        """Whether each step's first choice is the data's token: for each row [places, num_tokens] bool on the CPU.

        Steps read the data's tokens: where all drafted tokens before one match, they are the drafted ones.
        """
        batch = self.prepare(rows, 0, range(len(rows)))
        found = []
        for depth, states in enumerate(self._unroll(self._target.read(batch.text, self.boundaries), batch)):
            indexes, places = batch.places(depth).nonzero(as_tuple=True)
            chosen = self.token_ids[self._logits(states[indexes, places]).argmax(-1)]
            found.append(chosen == batch.text[indexes, places + 2 + depth])
        return tables_of(rows, batch, found)

    def finish(self) -> None:
        """Round the weights to the target's dtype."""
        self.model.to(self._dtype).to(torch.float32)

    def save(self, directory: Path) -> None:
        """Write the head in the target's dtype, and config.json."""
        state = {name: value.detach().cpu().to(self._dtype) for name, value in self.model.state_dict().items()}
        token_ids = self.token_ids.cpu()
        state["d2t"] = token_ids - torch.arange(len(token_ids))
        state["t2d"] = (self._own_ids != UNKNOWN).cpu()
        with RustLibrary("safetensors"):
            save_file(state, directory / WEIGHTS, {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def _unroll(self, output: TargetOutput, batch: HeadBatch) -> list[torch.Tensor]:
        """[rows, places, hidden] of each step. The last two tokens of a row are guessed, and not guessed from."""
        places = max(1, batch.text.shape[1] - 2)
        tokens = functional.pad(batch.text, (0, self.num_depths))[:, 1 : 1 + places + self.num_depths]
        embedded = functional.embedding(tokens, self._target.embedding_weight()).float()
        with self._autocast():
            return self.model.unroll(join(output.tapped, places), embedded, self._rotary, self.num_depths)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """[guesses, tokens of the head] float32."""
        with self._autocast():
            return self.model.logits(states)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16")

    @torch.no_grad()
    def _read_choices(self, output: TargetOutput, batch: HeadBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the target says, wherever it makes a token of a completion.

        Returns:
            [n, tokens of the head] float32: log probabilities of these among each other; [n] bool: whether its first
            choice is one of them; [rows, longest] int64: which of the n stands for a place.
        """
        wanted = torch.zeros_like(batch.text, dtype=torch.bool)
        for depth in range(self.num_depths):
            rows, places = batch.places(depth).nonzero(as_tuple=True)
            wanted[rows, places + 1 + depth] = True
        logits = output.head(output.hidden[wanted])[:, : len(self._own_ids)]
        is_known = self._own_ids[logits.argmax(-1)] != UNKNOWN
        lines = torch.zeros_like(batch.text)
        lines[wanted] = torch.arange(len(logits), device=self._device)
        if len(self.token_ids) < logits.shape[1]:
            logits = logits[:, self.token_ids]
        return logits.float().log_softmax(-1), is_known, lines


def make(context: MethodContext) -> Eagle3Method:
    """Make a head for the target; see Eagle3Method."""
    return Eagle3Method(context)
