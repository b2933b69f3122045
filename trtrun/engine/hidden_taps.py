"""What one engine's forwards tap of the residual stream, between the model that fills it and the step that holds it.

A graph writes taps to memory of a fixed place; a forward without one gets memory of its own. It knows tensors by token.
It does not know forwards, or who reads taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtrun.core.nouns import HiddenStates
from trtrun.models.config import ModelConfig
from trtrun.models.decoder import Taps, check_boundaries


class HiddenTaps:
    """The taps of one engine.

    Attributes:
        boundaries: see `models.taps`.
    """

    def __init__(self, boundaries: Sequence[int], model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Tap a model whose hidden states have `dtype`.

        Raises:
            ConfigError: a boundary is not among the model's.
        """
        self.boundaries = check_boundaries(boundaries, model.num_layers)
        self._hidden_size = model.hidden_size
        self._dtype = dtype
        self._device = device
        self._fixed: torch.Tensor | None = None
        self._last = self._new(0)

    def reserve(self, most_tokens: int) -> None:
        """Make the memory that graphs of forwards of up to `most_tokens` write to."""
        self._fixed = self._new(most_tokens)

    def begin(self, num_tokens: int, *, in_graph: bool = False) -> Taps:
        """The taps of a forward that begins; `in_graph` where it is, or will be, one."""
        self._last = self._fixed[:num_tokens] if in_graph and self._fixed is not None else self._new(num_tokens)
        return Taps(self.boundaries, self._last)

    def replayed(self, rows: int, queries: int, padded: int) -> None:
        """A graph has run whose first `rows` rows are these, of `padded` queries each, of which the first count."""
        if self._fixed is not None:
            taken = self._fixed[: rows * padded]
            of_rows = taken.view(rows, padded, *taken.shape[1:])
            self._last = of_rows[:, :queries].flatten(0, 1) if padded > queries else taken

    def copy(self, places: Sequence[range]) -> torch.Tensor:
        """[tokens, boundaries, hidden] of the tokens at `places` in the last forward; later ones leave it alone."""
        return torch.cat([self._last[part.start : part.stop] for part in places])

    def states(self, num_rows: int, queries: int, prompts: list[torch.Tensor]) -> HiddenStates:
        """Those of `num_rows` rows of `queries` tokens each, which come first in the last forward, beside prompts'."""
        decoded = self._last[: num_rows * queries].view(num_rows, queries, len(self.boundaries), self._hidden_size)
        return HiddenStates(decoded, prompts)

    def _new(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, len(self.boundaries), self._hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)
