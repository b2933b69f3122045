"""The drafting methods. Importing this package registers every one of them."""

from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.drafters import assistant, dflash, eagle_heads, lookahead, medusa, token_recycling
from trtrun.speculation.drafters import draft_model as draft_target
from trtrun.speculation.drafters import lookup as ngram
from trtrun.speculation.drafters import lookup as suffix

__all__ = [
    "DRAFTERS",
    "Drafter",
    "DrafterContext",
    "assistant",
    "dflash",
    "draft_target",
    "eagle_heads",
    "lookahead",
    "medusa",
    "ngram",
    "suffix",
    "token_recycling",
]
