"""From models' names in the YAML file to directories: paths, shipped assets, and names in the Hugging Face cache.

Nothing is downloaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtrun.errors import ConfigError, nearest, shorten, shorten_path, wrap_errors

_WORD = r"(?!\S*--)\w(?:[\w.-]*\w)?"
_SPELLING = re.compile(rf"({_WORD}/{_WORD})(?:@([\w./+-]+))?", re.ASCII)
_FILES = (
    "config.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "tokenizer_config.json",
)
"""Any of which tells where the snapshot of a model, of heads or of a tokenizer is."""
_PREFIX = "models--"
_MOST_SHOWN = 5


@dataclass(frozen=True)
class HubName:
    """A model at Hugging Face.

    Attributes:
        model: `org/name`.
        revision: branch, tag or commit; None for the main branch.
    """

    model: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def download(self) -> str:
        """The command that fetches it."""
        return f"hf download {self.model}" + (f" --revision {self.revision}" if self.revision is not None else "")


def read_hub_name(text: str) -> HubName | None:
    """What `org/name` or `org/name@revision` names; None for what cannot be one."""
    match = _SPELLING.fullmatch(text)
    return None if match is None or ".." in text else HubName(match[1], match[2])


def find_snapshot(name: HubName) -> Path | None:
    """The model directory in this host's cache (HF_HUB_CACHE, HF_HOME); None where the cache does not have it.

    Raises:
        OSError: the cache cannot be read.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in _FILES:
        try:
            found = try_to_load_from_cache(name.model, file, revision=name.revision)
        except HFValidationError:  # no model can be called so
            return None
        if isinstance(found, str):  # else it is not there, or is known not to be at Hugging Face
            return Path(found).parent
    return None


def list_cached() -> dict[str, Path]:
    """The model directories in this host's cache, by the names that find them, in alphabetical order. Of each model
    one: its main branch, else the first of its other branches and tags that is there."""
    from huggingface_hub import constants

    found: dict[str, Path] = {}
    cache = Path(constants.HF_HUB_CACHE)
    for folder in sorted(cache.glob(f"{_PREFIX}*")):
        model = "/".join(folder.name.removeprefix(_PREFIX).split("--"))
        if read_hub_name(model) is None:
            continue
        try:
            refs = sorted(file.name for file in (folder / "refs").glob("*"))
            for name in (HubName(model), *(HubName(model, ref) for ref in refs)):
                snapshot = find_snapshot(name)
                if snapshot is not None:
                    found[str(name)] = snapshot
                    break
        except OSError:  # whose folders cannot be read
            continue
    return found


def describe_absence(name: HubName) -> str:
    """Where a name that was not found has been looked for, what is there instead, and what to do; for a message."""
    from huggingface_hub import constants

    return (
        f"{name} is not in the Hugging Face cache {constants.HF_HUB_CACHE}{_describe_rest(name)}: run "
        f"`{name.download}` on each host, or set HF_HOME or HF_HUB_CACHE to where it is"
    )


def _describe_rest(name: HubName) -> str:
    """What the cache has that may have been meant, in brackets; empty where there is nothing like it."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE)
    try:
        repos = {repo.repo_id: repo for repo in scan_cache_dir(cache).repos if repo.repo_type == "model"}
    except CacheNotFound:
        return ", which does not exist"
    except (OSError, ValueError):  # whose folders cannot be read, or that is a file
        return ", which cannot be read"
    if name.model in repos:
        revisions = [*sorted(repos[name.model].refs), *(found.commit_hash for found in repos[name.model].revisions)]
        more = f" and {len(revisions) - _MOST_SHOWN} more" if len(revisions) > _MOST_SHOWN else ""
        return f" (of it there: {', '.join(revisions[:_MOST_SHOWN])}{more})" if revisions else ""
    if (cache / repo_folder_name(repo_id=name.model, repo_type="model")).is_dir():
        return " (its download has only begun)"
    by_lower_case = {model.lower(): model for model in sorted(repos)}
    near = difflib.get_close_matches(name.model.lower(), by_lower_case, n=1, cutoff=0.7)
    return f" (did you mean '{by_lower_case[near[0]]}'?)" if near else ""


def snapshot_of(directory: Path) -> HubName | None:
    """The model and commit that a directory of the cache is the snapshot of; None for any other directory."""
    folder = directory.parent.parent.name
    words = folder.removeprefix(_PREFIX).split("--")
    if directory.parent.name != "snapshots" or not folder.startswith(_PREFIX) or not all(words):
        return None
    return HubName("/".join(words), directory.name)


def name_of_model(directory: Path) -> str:
    """What people call the model in a directory: `org/name` where it is in the cache, else the directory's own name."""
    snapshot = snapshot_of(directory)
    return directory.name if snapshot is None else snapshot.model


def mend_download(directory: Path, otherwise: str, before: str = "") -> str:
    """What to do about a model directory that lacks files: for a snapshot of the cache its download goes on, with
    `before` in front of it; elsewhere `otherwise`."""
    snapshot = snapshot_of(directory)
    return otherwise if snapshot is None else f"{before}its download is not complete: run `{snapshot.download}`"


def fetch_again(directory: Path, otherwise: str) -> str:
    """What to do about a damaged file of a model directory, as in `mend_download`. `hf download` by itself leaves a
    file that is there as it is."""
    snapshot = snapshot_of(directory)
    return otherwise if snapshot is None else f"run `{snapshot.download} --force-download`"


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
