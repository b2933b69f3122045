"""A draft as the table that travels in a packet: for each row how many tokens count, where they are from, and they.

It knows drafts and arrays of the host. It does not know packets, or who sends them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from trtrun.core.nouns import Draft
from trtrun.wire.reports import ReportArrays

_COLUMNS = 5
"""In front of a row's tokens: how many count, were foreseen, were found in texts; how many columns they have, and how
deep the paths behind them are."""


@dataclass(frozen=True)
class Origins:
    """Where the tokens of a draft are from, for each of its rows.

    Attributes:
        foreseen: 1 where it was made before the verdict that it follows was known.
        num_suffix_tokens: how many of its first were found in texts.
    """

    foreseen: tuple[int, ...] = ()
    num_suffix_tokens: tuple[int, ...] = ()

    def added_to(self, report: ReportArrays) -> ReportArrays:
        """The report of a verdict on the draft with them; rows behind the draft's have none."""
        foreseen, found = (np.zeros(len(report.draft_lens), dtype=np.int64) for _ in range(2))
        foreseen[: len(self.foreseen)] = self.foreseen
        foreseen[report.draft_lens < 1] = 0  # where it was there too late for the device
        found[: len(self.num_suffix_tokens)] = self.num_suffix_tokens
        return replace(report, foreseen=foreseen, num_suffix_tokens=found)


@dataclass(frozen=True)
class DraftTable:
    """A draft on the host, but for its draft_probs.

    Attributes:
        numbers: [rows, any] int64.
    """

    numbers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, draft: Draft) -> DraftTable:
        """That of a draft on the host."""
        rows, nodes = draft.tokens.shape
        paths = draft.paths
        numbers = np.zeros((rows, _COLUMNS + nodes + (0 if paths is None else paths[0].numel())), dtype=np.int64)
        numbers[:, 0] = draft.draft_lens.numpy()
        if draft.foreseen is not None:
            numbers[:, 1] = draft.foreseen.numpy()
        if draft.num_suffix_tokens is not None:
            numbers[:, 2] = draft.num_suffix_tokens.numpy()
        numbers[:, 3] = nodes
        numbers[:, _COLUMNS : _COLUMNS + nodes] = draft.tokens.numpy()
        if paths is not None:
            numbers[:, 4] = paths.shape[2]
            numbers[:, _COLUMNS + nodes :] = paths.flatten(1).numpy()
        return cls(numbers)

    @property
    def draft_lens(self) -> npt.NDArray[np.int64]:
        """[rows]: see Draft."""
        return self.numbers[:, 0]

    @property
    def width(self) -> int:
        """Columns of the tokens."""
        return int(self.numbers[0, 3]) if len(self.numbers) else 0

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[rows, width]: see Draft."""
        return self.numbers[:, _COLUMNS : _COLUMNS + self.width]

    @property
    def origins(self) -> Origins:
        """Of the draft's tokens."""
        return Origins(tuple(self.numbers[:, 1].tolist()), tuple(self.numbers[:, 2].tolist()))

    def on(self, device: torch.device, probs: torch.Tensor | None) -> Draft:
        """The draft on a device, with its draft_probs there."""
        width, depth = self.width, int(self.numbers[0, 4]) if len(self.numbers) else 0
        table = torch.from_numpy(self.numbers).to(device, non_blocking=True)
        tokens, paths = table[:, _COLUMNS : _COLUMNS + width], table[:, _COLUMNS + width :]
        return Draft(tokens, table[:, 0], probs, paths=paths.view(len(table), -1, depth) if depth else None)
