"""Whose rows heads with a store are fed: the target's, beside which they sit, or on a rank of their own rows that they
keep themselves by plans and verdicts.

It knows rows, and what makes graphs. It does not know what heads compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtrun.engine.graphs.capture import Capture
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.rows import RowState
from trtrun.engine.runner import Engine


@dataclass(frozen=True)
class HeadRows:
    """What heads with a store need beside their layers.

    Attributes:
        rows: the state of every row; behind the batch's those of guesses, where drafts are made ahead.
        tapped_shape: hidden states of the target that are read of a token, and numbers of each.
        capture: makes graphs; None where there are none.
        graph_shapes: of these.
        are_own: whether nobody else takes plans in for the rows.
    """

    rows: RowState
    tapped_shape: tuple[int, int]
    capture: Capture | None
    graph_shapes: GraphShapes | None
    are_own: bool = False

    @classmethod
    def of(cls, target: Engine) -> HeadRows:
        """Those of a target, which taps what heads read."""
        return cls(target.rows, target.tapped_shape, target.capture, target.graph_shapes)
