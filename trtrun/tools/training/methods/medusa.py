"""The method `medusa`: heads on the target's last hidden state that guess the tokens behind the next one (Medusa-1).

Medusa (Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv
2401.10774): each head is a residual block, x + SiLU(W x + b), or several, and a matrix to the vocabulary. It reads the
hidden state behind the final norm, from which the target makes token i + 1; head h guesses token i + 2 + h. W and b
begin at zero, and the matrix as the target's own head. What is written has the names of the authors' checkpoints:
`{head}.{block}.linear.weight`, `{head}.{block}.linear.bias` and, numbered behind the blocks, the matrix's
`{head}.1.weight` in medusa_lm_head.safetensors, and config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from trtrun.errors import RustLibrary
from trtrun.tools.training.data import DataRow
from trtrun.tools.training.methods.head_batch import HeadBatch, check_long_enough, pad_rows, tables_of
from trtrun.tools.training.methods.table import MethodContext
from trtrun.tools.training.models import TargetOutput, check_attends_to_all, read_config, stored_dtype

WEIGHTS = "medusa_lm_head.safetensors"


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), the identity at first."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, hidden] to [..., hidden]."""
        return hidden + functional.silu(self.linear(hidden))


def make_head(output: torch.Tensor, num_blocks: int) -> nn.Sequential:
    """A head that computes what the target's own [vocabulary, hidden] does."""
    vocab_size, hidden = output.shape
    matrix = nn.Linear(hidden, vocab_size, bias=False)
    with torch.no_grad():
        matrix.weight.copy_(output)
    return nn.Sequential(*(ResidualBlock(hidden) for _ in range(num_blocks)), matrix)


class MedusaMethod:
    """The `DraftTraining` of `medusa`.

    Args:
        context: with a target.

    Raises:
        CheckpointError: attention of the target has a window shorter than the rows.
    """

    def __init__(self, context: MethodContext) -> None:
        assert context.target is not None
        self._settings, self._device, self._target = context.settings, context.device, context.target
        self._target_path, self._dtype = context.target_path, stored_dtype(context.target_path)
        config = read_config(context.target_path)
        check_attends_to_all(config, self._settings.max_length, f"the target {context.target_path}")
        self.num_depths, self.vocab_size = self._settings.num_tokens, context.target_vocab_size
        output = context.target.head_weight()
        heads = [make_head(output, self._settings.medusa_layers) for _ in range(self.num_depths)]
        self.model = nn.ModuleList(heads).to(self._device)

    def check(self, rows: Sequence[DataRow]) -> None:
        """Raise ConfigError where no row is long enough for a guess."""
        check_long_enough(rows)

    def prepare(self, rows: Sequence[DataRow], step: int, indexes: Sequence[int]) -> HeadBatch:
        """The rows, padded; nothing is random."""
        return pad_rows(rows, self._device)

    def counts(self, prepared: HeadBatch) -> torch.Tensor:
        """[num_tokens] float32: guesses of each head."""
        return torch.stack([prepared.places(head).sum() for head in range(self.num_depths)]).to(torch.float32)

    def losses(self, prepared: HeadBatch) -> torch.Tensor:
        """[num_tokens] float32: the loss of each head, summed over its guesses; with gradients."""
        settings, output = self._settings, self._target.read(prepared.text)
        wanted = output.log_probs(self.vocab_size) if settings.divergence else None
        found = []
        for head in range(self.num_depths):
            rows, places = prepared.places(head).nonzero(as_tuple=True)
            logits = self._logits(head, output, rows, places)
            loss = logits.new_zeros(())
            if settings.cross_entropy:
                labels = prepared.text[rows, places + 2 + head]
                loss = loss + settings.cross_entropy * functional.cross_entropy(logits, labels, reduction="sum")
            if wanted is not None:
                # What the target says where it guesses the same token.
                log_probs = wanted[rows, places + 1 + head]
                divergence = functional.kl_div(logits.log_softmax(-1), log_probs, reduction="sum", log_target=True)
                loss = loss + settings.divergence * divergence
            found.append(loss)
        return torch.stack(found)

    @torch.no_grad()
    def matches(self, rows: Sequence[DataRow]) -> list[torch.Tensor]:
        """Whether each head's first choice is the data's token: for each row [places, num_tokens] bool on the CPU.

        Where t tokens are known, the newest has not been read by the target: heads see the hidden state before it.
        """
        batch = self.prepare(rows, 0, range(len(rows)))
        output = self._target.read(batch.text)
        found = []
        for head in range(self.num_depths):
            indexes, places = batch.places(head).nonzero(as_tuple=True)
            chosen = self._logits(head, output, indexes, places).argmax(-1)
            found.append(chosen == batch.text[indexes, places + 2 + head])
        return tables_of(rows, batch, found)

    def finish(self) -> None:
        """Round the weights to the target's dtype."""
        self.model.to(self._dtype).to(torch.float32)

    def save(self, directory: Path) -> None:
        """Write the heads in the target's dtype, and config.json."""
        state = {name: value.detach().cpu().to(self._dtype) for name, value in self.model.state_dict().items()}
        with RustLibrary("safetensors"):
            save_file(state, directory / WEIGHTS, {"format": "pt"})
        values = {
            "base_model_name_or_path": str(self._target_path),
            "medusa_num_heads": self.num_depths,
            "medusa_num_layers": self._settings.medusa_layers,
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def _logits(self, head: int, output: TargetOutput, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[guesses, vocabulary] float32 of one head."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16"):
            logits: torch.Tensor = self.model[head](output.hidden[rows, places].float())
        return logits[:, : self.vocab_size].float()


def make(context: MethodContext) -> MedusaMethod:
    """Load the target and make heads for it; see MedusaMethod."""
    return MedusaMethod(context)
