"""The drafting methods. Importing this package registers every one of them."""

from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.drafters import (
    dflash,
    draft_target,
    eagle_heads,
    lookahead,
    medusa,
    ngram,
    suffix,
    token_recycling,
)

__all__ = [
    "DRAFTERS",
    "Drafter",
    "DrafterContext",
    "dflash",
    "draft_target",
    "eagle_heads",
    "lookahead",
    "medusa",
    "ngram",
    "suffix",
    "token_recycling",
]
