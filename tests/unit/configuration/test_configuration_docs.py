"""docs/configuration.md: it is what scripts/dev/make_configuration_docs.py makes of the sections, and every key is
told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.dev.make_configuration_docs import DOCS, SECTIONS, describe_keys, make_docs, split_docstring
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.configuration.process_sections import Number, Section


def sections_below(section: type[Section]) -> Iterator[type[Section]]:
    """The sections that a section holds, its own fields' and theirs."""
    for field in section.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield kind
                yield from sections_below(kind)


def test_the_docs_are_what_the_sections_make() -> None:
    assert DOCS.read_text(encoding="utf-8") == make_docs(), "run scripts/dev/make_configuration_docs.py"


def test_every_section_is_shown() -> None:
    assert set(sections_below(RuntimeConfig)) <= {section for _, section in SECTIONS}


@pytest.mark.parametrize(
    "section",
    [RuntimeConfig, *(section for _, section in SECTIONS), *(method.section for method in METHODS.values())],
    ids=lambda section: section.__name__,
)
def test_a_docstring_names_no_key_that_is_not_there(section: type[Section]) -> None:
    assert set(split_docstring(section)[1]) <= set(section.model_fields)


class Lamps(Section):
    """Where it is light.

    Attributes:
        first, second: one | or the other,
            whichever is there.
        names: whose.
        power: of all.
    """

    first: Annotated[int, Number, Field(ge=1, le=9)] | None = None
    second: Annotated[float, Field(gt=0, le=1)] = 0.5
    names: tuple[str, ...] = ()
    power: Annotated[int, Field(ge=0)] = 3
    dark: bool = False


def test_values_defaults_and_meanings_become_rows() -> None:
    assert split_docstring(Lamps)[0] == "Where it is light."
    rows = list(describe_keys(("lamps",), Lamps, ["first", "second", "names", "power"]))[2:]
    assert rows == [
        "| `lamps.first` | whole number, 1 to 9 |  | one \\| or the other, whichever is there. |",
        "| `lamps.second` | number above 0, to 1 | `0.5` | one \\| or the other, whichever is there. |",
        "| `lamps.names` | list | `[]` | whose. |",
        "| `lamps.power` | whole number from 0 on | `3` | of all. |",
    ]


def test_a_key_of_which_the_docstring_says_nothing_is_a_defect() -> None:
    with pytest.raises(KeyError, match="dark"):
        list(describe_keys(("lamps",), Lamps, ["dark"]))
