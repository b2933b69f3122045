"""Which tokens some places of a round may take, as bits on the device.

It knows logits and bits. It does not know who says what may be taken, nor rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trtrun.kernels.chooser import operations_of


@dataclass(frozen=True)
class TokenMasks:
    """Of R rows at P positions each.

    Attributes:
        places: [R, P] int32 on the device: of each position the line of `bits` that it has, or -1 where any token may
            be taken.
        bits: [n, W] int32 on the device: token t may be taken where bit t % 32 of word t // 32 is set; 32 * W is at
            least the vocabulary's size.
    """

    places: Tensor
    bits: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [R, P, V] float32 with -inf where a token may not be taken: a new tensor."""
        return operations_of(logits.device.type).mask_tokens(logits, self.places, self.bits)

    def picked(self, columns: Tensor) -> TokenMasks:
        """Of each row the positions `columns` [R, n] int64."""
        return TokenMasks(self.places.gather(1, columns), self.bits)
