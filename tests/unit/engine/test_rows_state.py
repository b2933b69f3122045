"""Where rows stand on the device: what verdicts do to lengths and histories."""

from __future__ import annotations

import torch

from trtrun.engine.rows import RowState


def test_a_row_that_gains_nothing_stays_where_it_is() -> None:
    state = RowState(3, 20, 4, 2, 10, torch.device("cpu"))
    state.lengths[:] = torch.tensor([3, 4, 5])
    state.token_ids[1, :4] = torch.tensor([7, 8, 9, 6], dtype=torch.int32)
    rows = torch.tensor([1, 2])
    state.advance(rows, torch.tensor([0, 2]), torch.tensor([[-1, -1, -1], [5, 6, -1]]))
    assert state.lengths.tolist() == [3, 4, 7]
    assert state.token_ids[1, :4].tolist() == [7, 8, 9, 6]
    assert state.token_ids[2, 5:7].tolist() == [5, 6]
