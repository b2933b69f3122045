"""What the paths of a configuration name: a directory, a file, a shipped model, a model in the Hugging Face cache.

It knows where to look, and in which order. It does not know whether a directory holds a model (`trtrun.models`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trtrun.configuration.hub_cache import describe_absence, find_snapshot, read_hub_name
from trtrun.errors import ConfigError, nearest, shorten, shorten_path, wrap_errors

ASSETS = Path(__file__).resolve().parents[1] / "assets"
"""The small trained models that ship with the package, in a directory each."""

ASSET_NAMES = ("target", "draft", "medusa", "eagle3", "pard_draft")
"""A target, and what was trained to draft for it: a draft model, Medusa heads, an EAGLE-3 head, a parallel draft."""

ASSET_PREFIX = "asset:"


def find_model(path: Path, base: Path | None, where: str) -> Path:
    """The absolute directory that `path`, a shipped model or a name in the Hugging Face cache is.

    Args:
        path: as the user has written it.
        base: directory that relative paths are looked for in, before the working directory.
        where: source and key, for messages.

    Raises:
        ConfigError: one line: there is none.
    """
    text = str(path)
    if text.startswith(ASSET_PREFIX):
        name = text.removeprefix(ASSET_PREFIX)
        if name not in ASSET_NAMES:
            choices = [ASSET_PREFIX + item for item in ASSET_NAMES]
            raise ConfigError(f"{where}: unknown asset {shorten(text)}{nearest(text, choices)}")
        path = ASSETS / name
        if not path.is_dir():
            raise ConfigError(f"{where}: {text} is not in this installation ({path} is missing): install trtrun again")
        return path
    return _find(path, base, where, Path.is_dir, "is a file: name the model's directory", "directory", in_cache=True)


def find_file(path: Path, base: Path | None, where: str) -> Path:
    """The absolute file that `path` names; otherwise like `find_model`."""
    return _find(path, base, where, Path.is_file, "is no file: name a file of texts", "file")


def _find(
    path: Path,
    base: Path | None,
    where: str,
    fits: Callable[[Path], bool],
    misfit: str,
    kind: str,
    in_cache: bool = False,
) -> Path:
    """The absolute path of what `path` names, beside the configuration or in the working directory, and `fits`; then
    `in_cache`, where it may be a name. Else what is there is a `misfit`, or there is no such `kind`."""
    try:
        path = path.expanduser()
    except RuntimeError:
        raise ConfigError(f"{where}: {shorten_path(path)}: there is no such user, or nobody knows its home") from None
    places = [path] if path.is_absolute() else [place / path for place in (base, Path.cwd()) if place is not None]
    try:
        for place in places:
            if fits(place):
                return place.resolve()
        is_there = any(place.exists() for place in places)
    except OSError as error:
        raise ConfigError(f"{where}: {shorten_path(path)} cannot be read: {error.strerror}") from None
    if is_there:
        raise ConfigError(f"{where}: {shorten_path(path)} {misfit}")
    name = read_hub_name(str(path)) if in_cache else None
    with wrap_errors(f"{where}: {path} in the Hugging Face cache", ConfigError):
        snapshot = find_snapshot(name) if name is not None else None
    if snapshot is not None:
        return snapshot.resolve()
    looked = " and ".join(shorten_path(place) for place in dict.fromkeys(places))
    absence = f"; and {describe_absence(name)}" if name is not None else ""
    raise ConfigError(f"{where}: no such {kind}: {looked}{absence}")
