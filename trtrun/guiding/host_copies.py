"""What a device has, on its way to the host: nothing waits for it until somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trtrun.core.nouns import Draft
from trtrun.tensors import to_host


class HostCopies:
    """Tensors on their way to the host: from a GPU to pinned memory, behind what it has to do first."""

    def __init__(self, *sources: torch.Tensor) -> None:
        """Begin to copy; nothing waits for it here."""
        self._copies = [to_host(source) for source in sources]
        self._event: Any = None
        if any(source.is_cuda for source in sources):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._lists: list[Any] | None = None

    def lists(self) -> list[Any]:
        """Wait for them, and list what they hold."""
        if self._lists is None:
            if self._event is not None:
                self._event.synchronize()
            self._lists = [copy.tolist() for copy in self._copies]
        return self._lists


class HostDraft:
    """A draft on its way to the host."""

    def __init__(self, draft: Draft) -> None:
        """Begin to copy the tokens of `draft`, and which of them follow one another."""
        self.num_rows = len(draft.tokens)
        self.is_tree = draft.paths is not None
        sources = [draft.tokens, draft.draft_lens, *([] if draft.paths is None else [draft.paths])]
        self._copies = HostCopies(*sources)

    def chain(self, place: int) -> list[int]:
        """The tokens of one row's draft that follow one another."""
        tokens, lens = self._copies.lists()[:2]
        chain: list[int] = tokens[place][: max(0, lens[place])]
        return chain

    def edges(self, place: int) -> Iterable[tuple[int, int, int]]:
        """Edges of one row's tree: the parent of each node (-1 for the row's newest token), the node and its token,
        parents first; some more than once."""
        tokens, lens, paths = self._copies.lists()
        for path in paths[place]:
            parent = -1
            for node in path[: max(0, lens[place])]:
                if node < 0:
                    break
                yield parent, node, tokens[place][node]
                parent = node
