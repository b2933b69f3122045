"""The sections of the YAML file that bound a round: the paged store of keys and values, and the scheduler.

It knows names, types and ranges. What they lead to is the business of `trtrun.kvcache` and `trtrun.scheduling`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trtrun.configuration.launch_config import Number, Section

MOST_TOKENS = 2**31 - 1
"""Of a round or a request: positions and token counts travel as 32-bit numbers."""

MOST_ROWS = 4096
"""That run at once."""

MOST_STORED_TOKENS = 2**40


class KVCacheSection(Section):
    """The paged store of keys and values.

    Attributes:
        block_size: tokens in a block.
        free_memory_fraction: share of the memory that is left beside the weights and the largest round. Left out: 0.9
            of a GPU, 0.5 of the host.
        max_tokens: tokens to hold, in place of the fraction. No more than all rows can use are kept; where these do
            not fit the start is refused, with the bytes.
        enable_block_reuse: share full verified blocks between requests with the same prefix. Where it is off, layers
            with a sliding window keep what the window and a round need of each row, and no more.
        dtype: how keys and values are kept. `auto`: as the checkpoint was made for, else as the model has them.
            `plain`: as the model has them. `fp8`, `int8`: a byte for each number, for about twice the tokens.
    """

    block_size: Annotated[int, Number, Field(ge=1, le=1024)] = 16
    free_memory_fraction: Annotated[float, Number, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Number, Field(ge=1, le=MOST_STORED_TOKENS)] | None = None
    enable_block_reuse: bool = True
    dtype: str = "auto"


class SchedulerSection(Section):
    """Limits of one round. Those that engines were built with take the place of defaults, and bound what may stand here
    (docs/engines.md).

    Attributes:
        max_batch_size: rows that run at once.
        max_num_tokens: tokens of one round over all rows, prompts and verification together; longer prompts are
            computed in chunks. Left out: more where the drafts of all rows need it.
        max_seq_len: tokens of one request, prompt and output. Left out: the target's context.
        plans_ahead: 1 sends the next plan before the results of the round before are back, so that a GPU has no gap
            between rounds. Left out: 1 on GPUs, else 0. Always 1 while drafting ahead.
        max_waiting: most completions that may wait for a row; a request beyond is refused with the numbers. Left out:
            no limit.
    """

    max_batch_size: Annotated[int, Number, Field(ge=1, le=MOST_ROWS)] = 32
    max_num_tokens: Annotated[int, Number, Field(ge=1, le=MOST_TOKENS)] = 2048
    max_seq_len: Annotated[int, Number, Field(ge=2, le=MOST_TOKENS)] | None = None
    plans_ahead: Annotated[int, Number, Field(ge=0, le=1)] | None = None
    max_waiting: Annotated[int, Number, Field(ge=1)] | None = None
