"""First use of every kernel, before the first request: nothing initialises under load.

oneDNN and cuBLAS choose or compile kernels at the first call of each shape, which costs milliseconds. This runs the
shapes that rounds of one row have. It writes to the null block only, so it leaves no trace in the KV store's owners.
"""

from __future__ import annotations

import numpy as np
import torch

from trtrun.core import PrefillChunk, RoundPlan
from trtrun.engine.runner import Engine


def warm_up(engine: Engine, draft_len: int, max_tokens: int) -> None:
    """Run a prefill, a catch-up, a decode step and a verification of row 0.

    Collective over the engine's tensor-parallel group. The row's table holds no block, so that all it writes goes to
    the null block.

    Args:
        engine: freshly made; no request has run on it.
        draft_len: tokens that rounds will draft; 0 without speculation.
        max_tokens: of a round: no forward here is larger than those that memory was set aside for.
    """
    rows = torch.zeros(1, dtype=torch.int64, device=engine.device)
    # A row of two zero tokens stands in for a request.
    engine.rows.lengths[0] = 2
    longest = engine.rows.token_ids.shape[1] - engine.rows.max_draft_len - 2
    if engine.device.type == "cuda":
        # Kernels are compiled for the sizes of their tiles, and for contexts that are split.
        for length in sorted({min(length, longest, max_tokens) for length in (8, 16, 64)}):
            engine.prefill([PrefillChunk(row=0, start=0, length=length, is_last=False, followed=True)])
        for context in sorted({min(context, longest) for context in (64, 1024)}):
            engine.catch_up(rows, [2], context=context)
    engine.prefill([PrefillChunk(row=0, start=0, length=2, is_last=False, followed=True)])
    engine.catch_up(rows, [2], context=2)
    for step in engine.prepare_steps(engine.tables(rows, 2), rows.unsqueeze(1) + 1):
        engine.decode(step, rows)
    for length in sorted({0, draft_len}):
        plan = RoundPlan(
            round_index=-1,
            dropped_rows=(),
            admissions=(),
            block_updates=np.zeros((0, 3), dtype=np.int32),
            prefill=(),
            decode_rows=np.zeros(1, dtype=np.int32),
            draft_lens=np.array([length], dtype=np.int32),
            catch_up=np.array([2], dtype=np.int32),
            max_context=2 + length,
        )
        drafted = torch.zeros((1, length), dtype=torch.int64, device=engine.device)
        engine.verify_forward(plan, drafted, torch.tensor([length], device=engine.device))
    engine.rows.lengths[0] = 0
