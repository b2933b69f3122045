"""How experts of a token follow from what a router says of it. It knows numbers, and imports no torch, as plans do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Routing:
    """How scores of experts are made of logits, which experts are chosen by them, and what becomes of their shares.

    Attributes:
        scores: softmax over all experts, or the sigmoid of each logit; in float32.
        has_bias: whether a number of each expert is added to its score where experts are chosen, and not to its share.
        groups: in which experts lie, as many in each, one group behind the other.
        chosen_groups: of which a token's experts are.
        summed: best scores of a group that are added up to its own.
        factor: of shares.
        in_float32: whether logits are computed in float32.
        num_shared: experts of all tokens behind the others, each with a share of 1.
        is_gated: whether that share is the sigmoid of a logit, which stands behind those of experts.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    summed: int = 1
    factor: float = 1.0
    in_float32: bool = False
    num_shared: int = 0
    is_gated: bool = False


USUAL = Routing()
"""The likeliest ones of all, with the shares that softmax gives them."""

LEAST_TOTAL = 1e-20
"""Added to what shares are divided by: sigmoids may all be 0."""
