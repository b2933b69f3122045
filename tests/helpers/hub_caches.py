"""Makes Hugging Face caches as `hf download` leaves them: refs, snapshots of links, blobs."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "f" * 40


def fill_cache(cache: Path, model: str, directory: Path, ref: str | None = "main", commit: str = COMMIT) -> Path:
    """Put a model directory into a cache.

    Args:
        cache: what HF_HUB_CACHE names, made if it is not there.
        model: `org/name`.
        directory: whose files are copied.
        ref: branch or tag that names the commit; None names it by no ref.
        commit: of the snapshot.

    Returns:
        The snapshot.
    """
    folder = cache / repo_folder_name(repo_id=model, repo_type="model")
    snapshot = folder / "snapshots" / commit
    for made in (folder / "blobs", snapshot):
        made.mkdir(parents=True, exist_ok=True)
    if ref is not None:
        name_commit(cache, model, ref, commit)
    for file in directory.iterdir():
        blob = folder / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def name_commit(cache: Path, model: str, ref: str, commit: str) -> None:
    """Write a ref, whether or not its commit is there."""
    file = cache / repo_folder_name(repo_id=model, repo_type="model") / "refs" / ref
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(commit, encoding="utf-8")
