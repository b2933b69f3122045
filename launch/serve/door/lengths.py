"""From which length on something is long for the event loop, in which every stream waits.

It knows numbers alone.
"""

from __future__ import annotations

READ_HERE = 1 << 12
"""Bytes of a request that the event loop reads itself: its JSON, its lists, the tokens of its prompt. What is longer is
read in other processes (`reading`)."""

SHORT_BODY = 1 << 16
"""Bytes of a body that is not counted among those that are read at once, and that waits for no longer one."""
