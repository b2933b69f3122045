"""What a model does at its two ends beside looking up and multiplying, in numbers alone.

It imports no torch: whoever only reads a configuration does without. It knows no config.json.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelEnds:
    """The ends of a model.

    Attributes:
        embedding_factor: what embedded tokens are multiplied by.
        norm_adds_one: whether the final norm multiplies by 1 + weight.
        norm_in_float32: whether it multiplies by the weight before it rounds, where nothing is added either.
        logit_divisor: what logits are divided by.
        logit_soft_cap: c of c * tanh(logit / c), behind that; None leaves logits as they are.
    """

    embedding_factor: float = 1.0
    norm_adds_one: bool = False
    norm_in_float32: bool = False
    logit_divisor: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether logits are computed with behind the head's product."""
        return self.logit_divisor != 1.0 or self.logit_soft_cap is not None


PLAIN_ENDS = ModelEnds()
"""The ends of most models."""
