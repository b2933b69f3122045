"""RMSNorm of all queries of a token as one, and of all its keys, where each rank has some of the heads.

Ranks add up what squares of their heads come to, in the order of the ranks, before anything is scaled. It knows heads
and the communicator, and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel.communicator import Communicator
from trtrun.kernels.chooser import operations_of


class WholeNorm:
    """x / sqrt(mean(x²) + eps) * weight, over all query heads of the group, and over all its key heads; rounded once
    or twice.

    Args:
        queries, keys: weights of this rank's heads, float32 [heads, head_dim] and [kv_heads, head_dim].
        sizes: numbers of all queries, and of all keys.
        counts_keys: whether this rank's squares of keys count. Of ranks with the same heads one counts.
        eps: added to the mean square.
        communicator: of the tensor-parallel group.
        rounds_before_weighing: whether it rounds before it multiplies by the weight, too.
    """

    by_head = None

    def __init__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        sizes: tuple[int, int],
        counts_keys: bool,
        eps: float,
        communicator: Communicator,
        rounds_before_weighing: bool = False,
    ) -> None:
        device = queries.device
        self._weight = torch.cat((queries, keys))
        self._heads = len(queries)
        self._sizes = torch.tensor(sizes, dtype=torch.float32, device=device)
        self._part_of_head = torch.tensor([0] * len(queries) + [1] * len(keys), device=device)
        self._counts_keys = counts_keys
        self._eps = eps
        self._communicator = communicator
        self._rounds_before_weighing = rounds_before_weighing
        self._operations = operations_of(device.type)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads + kv_heads, head_dim] → the same shape and dtype."""
        sums = self._square_sums((x[:, : self._heads], x[:, self._heads :]))
        factors = (sums.div_(self._sizes) + self._eps).sqrt_().reciprocal_()
        of_heads = factors.index_select(1, self._part_of_head).unsqueeze(2)
        normed = x * of_heads
        if self._rounds_before_weighing:
            normed = normed.to(x.dtype)
        return normed.mul_(self._weight).to(x.dtype)

    def _square_sums(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sums over the group, [tokens, 2] float32."""
        sums = torch.stack([self._operations.square_sums(part.flatten(1)) for part in parts], dim=1)
        if self._communicator.size == 1:
            return sums
        if not self._counts_keys:
            sums[:, 1] = 0
        return self._communicator.all_reduce(sums)
