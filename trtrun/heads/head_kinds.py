"""Tells which drafting method the heads of a directory are for, from names and shapes of tensors: for messages, where a
directory stands beside another method.

It does without torch.
"""

from __future__ import annotations

from pathlib import Path

from trtrun.errors import CheckpointError
from trtrun.heads.eagle_tensors import find_method, sort_names
from trtrun.heads.heads import MEDUSA_FILE
from trtrun.weights.checkpoint import Checkpoint


def tell_heads(path: Path, method: str | None = None) -> str | None:
    """What to say of a directory with heads of a method that is not `method`, without its name; None where it has no
    such heads, as far as it shows."""
    if (path / MEDUSA_FILE).is_file():
        found: str | None = "medusa"
    else:
        try:
            files = Checkpoint(path, what="heads")
            found = find_method(files, sort_names(files))
        except CheckpointError:
            return None
    if found is None or found == ("dflash" if method == "dspark" else method):
        return None
    return f"it has heads that draft by method {found}: set speculation.method to that"
