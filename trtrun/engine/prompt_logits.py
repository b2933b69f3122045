"""Logits of prompts on their way to the host: the target's behind positions of chunks that ask for them.

Logits of few positions exist at a time on the device, whatever the chunk, as where prompts are scored
(prompt_logprobs.py). It knows hidden states, the head and chunks. It does not know who asked, or what becomes of them.
"""

from __future__ import annotations

import torch

from trtrun.engine.prompt_logprobs import positions_at_once
from trtrun.models.decoder import CausalLM


def report_prompts(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor | None:
    """Logits of positions. Collective over the tensor-parallel group.

    Args:
        model: whose head makes them.
        hidden: [positions, hidden] of `CausalLM.forward`, of the reported positions in order.

    Returns:
        [positions, vocab] float32 on the host: from a GPU in pinned memory, where they are once the device has done
        what it was given. None on ranks that read no logits.
    """
    found = None
    at_once = positions_at_once(model.config.vocab_size)
    for start in range(0, len(hidden), at_once):
        part = slice(start, start + at_once)
        logits = model.logits(hidden[part])
        if model.reads_logits:
            if found is None:
                shape = (len(hidden), logits.shape[-1])
                found = torch.empty(shape, dtype=logits.dtype, pin_memory=logits.is_cuda)
            found[part].copy_(logits, non_blocking=True)
    return found
