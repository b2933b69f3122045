"""The columns of the two tables that hold the sampling parameters of rows on a device.

`numbers` is [rows, 6] float32 and `integers` [rows, 4] int64. It knows no row; what fills the tables is
sampling/row_sampling.py, and what reads them there or in a kernel asks here where.
"""

from __future__ import annotations

NUM_NUMBERS = 6
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY = range(NUM_NUMBERS)
"""Temperature 0 is a greedy row; top_p of 1 and log_min_p of -inf are off."""

NUM_INTEGERS = 4
SEED, TOP_K, NUM_PROMPT, FIRST_STOP = range(NUM_INTEGERS)
"""top_k of 0 is off. FIRST_STOP is the first position at which min_tokens lets the text end."""
