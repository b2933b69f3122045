"""Models for `trtrun init`: what the Hugging Face cache has, and which of it may draft for a target.

A directory is a model that can be run, heads, or neither. It does not know devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.jobs.plan.proposal import bytes_of_weights, fits_heads, has_own_heads, spec_of
from trtrun.configuration.drafting.drafting_methods import NO_DRAFTS
from trtrun.configuration.model_paths import ASSET_PREFIX, find_model, list_cached
from trtrun.errors import TrtrunError
from trtrun.heads.head_reading import find_heads
from trtrun.tokens.text import hash_tokenizer_files
from trtrun.tokens.translation import choose_way

USUAL_SHARE, LARGEST_SHARE = 20, 2
"""A draft model has at most a 20th of the target's bytes where there is one so small, else the smallest that has at
most half."""


@dataclass(frozen=True)
class FoundModel:
    """A model, or heads.

    Attributes:
        name: as a YAML file has it.
        directory: where it is.
        size: bytes of weights.
        heads: the method of heads; None of a model.
    """

    name: str
    directory: Path
    size: int
    heads: str | None = None


@dataclass(frozen=True)
class Drafting:
    """A way to draft for a target.

    Attributes:
        values: sections of a YAML file.
        reason: for people.
    """

    values: Mapping[str, Any]
    reason: str

    @property
    def name(self) -> str:
        """What drafts, in a few words."""
        model = self.values.get("draft", {}).get("model")
        return f"{self.values['speculation']['method']}{f' with {model}' if model else ''}"


def find_models() -> list[FoundModel]:
    """What the cache has that can be run, or that drafts: the largest first."""
    found = []
    for name, directory in list_cached().items():
        heads, size = find_heads(directory), bytes_of_weights(directory)
        if size and (heads is not None or _is_supported(directory)):
            found.append(FoundModel(name, directory, size, heads))
    return sorted(found, key=lambda model: -model.size)


def name_model(name: str, option: str) -> FoundModel:
    """The model that an option names; its name is such that a file in any folder finds it.

    Raises:
        ConfigError: there is none.
    """
    directory = find_model(Path(name), Path.cwd(), option)
    is_path = not name.startswith(ASSET_PREFIX) and (Path.cwd() / Path(name).expanduser()).exists()
    return FoundModel(str(directory) if is_path else name, directory, bytes_of_weights(directory))


def list_draftings(target: FoundModel, models: Sequence[FoundModel]) -> Iterator[Drafting]:
    """Ways to draft for a target, the likeliest to pay first; the last one needs nothing.

    Args:
        target: the model that verifies.
        models: of the cache.
    """
    if target.name == f"{ASSET_PREFIX}target":
        yield _draft_model(f"{ASSET_PREFIX}draft", "It ships with this target.")
    if has_own_heads(target.directory):
        yield Drafting({"speculation": {"method": "mtp"}}, "The target's own files hold heads that draft.")
    for heads in models:
        if heads.heads is not None and _is_for(heads, target):
            values = {"draft": {"model": heads.name}, "speculation": {"method": heads.heads}}
            if fits_heads(target.directory, values):
                yield Drafting(values, "These heads are named for the target, and fit it by their shapes.")
    smaller = [
        model
        for model in reversed(models)
        if model.heads is None and model.size * LARGEST_SHARE <= target.size and _shares_tokenizer(model, target)
    ]
    usual = [model for model in reversed(smaller) if model.size * USUAL_SHARE <= target.size]
    for model in dict.fromkeys([*usual, *smaller]):
        share = f"has {model.size / target.size:.0%} of its bytes"
        yield _draft_model(model.name, f"In the cache; it has the target's tokenizer, and {share}.")
    yield Drafting({"speculation": {"method": "ngram"}}, "Nothing here drafts for the target: the text itself does.")


def _draft_model(name: str, reason: str) -> Drafting:
    return Drafting({"draft": {"model": name}, "speculation": {"method": "draft_target"}}, reason)


def _shares_tokenizer(draft: FoundModel, target: FoundModel) -> bool:
    if "none" in (hash_tokenizer_files(draft.directory), hash_tokenizer_files(target.directory)):
        return False
    return choose_way(target.directory, draft.directory) == "same"


def _is_for(heads: FoundModel, target: FoundModel) -> bool:
    """Whether heads say that they are for the target: by their name, or in their config.json or model card."""
    short = re.sub(r"@.*", "", target.name).rpartition("/")[2].lower()
    if all(word in heads.name.lower() for word in re.findall(r"[a-z]+|[0-9]+", short)):
        return True
    for file in ("config.json", "README.md"):
        try:
            if short in (heads.directory / file).read_text(encoding="utf-8", errors="replace").lower():
                return True
        except OSError:
            continue
    return False


def _is_supported(directory: Path) -> bool:
    """Whether a directory holds a model of a family that is known, by its config.json."""
    try:
        return bool(spec_of(directory, {"speculation": {"method": NO_DRAFTS}}).target)
    except TrtrunError:
        return False
