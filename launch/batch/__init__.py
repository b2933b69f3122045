"""`trtrun run` and `trtrun merge`: rows of prompts in, rows of completions out, and going on after an interruption."""
