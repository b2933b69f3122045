"""Makes docs/configuration.md from the sections of the YAML file: their keys, types, defaults and docstrings.

    python scripts/dev/make_configuration_docs.py

It knows pydantic's JSON schemas and how docstrings list attributes. What a key means is in the docstring of its
section. tests/unit/configuration/test_configuration_docs.py fails where the file is not what this makes.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from launch.jobs.pbs.section import PbsSection
from launch.jobs.slurm.section import ContainerSection, SlurmSection
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.configuration.drafting.speculation_section import HybridOptions, SpeculationSection, SuffixOptions
from trtrun.configuration.engine_sections import (
    AdapterSlotsSection,
    DraftSection,
    HeadsSection,
    KVCacheSection,
    ModelSection,
    SchedulerSection,
)
from trtrun.configuration.process_sections import LaunchSection, Section, ServerSection
from trtrun.linear.quantization import QUANTIZATIONS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

SECTIONS: tuple[tuple[tuple[str, ...], type[Section]], ...] = (
    (("target", "draft"), ModelSection),
    (("draft",), DraftSection),
    (("draft",), HeadsSection),
    (("adapter_slots",), AdapterSlotsSection),
    (("speculation",), SpeculationSection),
    (("kv_cache",), KVCacheSection),
    (("scheduler",), SchedulerSection),
    (("server",), ServerSection),
    (("launch",), LaunchSection),
    (("launch.slurm",), SlurmSection),
    (("launch.slurm.container",), ContainerSection),
    (("launch.pbs",), PbsSection),
)
"""Where each section stands in the file, and its class. Methods have sections of their own behind `speculation`."""

SHARED: tuple[tuple[str, type[Section]], ...] = (
    ("Looking texts up", SuffixOptions),
    ("A model and texts", HybridOptions),
)
"""Options that several methods have, which stand once, each behind those before it."""

VALUES = {
    "devices": "list or mapping",
    "eagle_choices": "list or name",
    "eagle3_layers_to_capture": "list of whole numbers",
    "lookahead_config": "list of three whole numbers",
    "medusa_choices": "list or name",
    "method": ", ".join(f"`{name}`" for name in METHODS),
    "quantization": ", ".join(f"`{name}`" for name in QUANTIZATIONS),
}
"""By key: values of which the type does not tell enough."""

PREAMBLE = """\
<!-- Made by scripts/dev/make_configuration_docs.py from the sections' own docstrings: change those, and run it again.
-->

# The YAML file

What a job runs, where, and how. `trtrun plan --config run.yaml` shows what becomes of it. Only `target.model` and
`target.devices` are needed, and a `draft` where the method drafts with a model.

- Any key can be set on the command line: `--set speculation.draft_len=8`. The value is read as YAML.
- An unknown key is refused with the nearest known one. A key without a default may be left out.
- The file is plain YAML of at most 1 MiB. Dates and times are texts, a key stands once, `<<` merges nothing.

[launch.md](launch.md#devices) has all forms of `devices`, [serve.md](serve.md#options) the limits of `server`.
Templates are in [launch/configs](../launch/configs).
"""

_ATTRIBUTE = re.compile(r" {4}(\w+(?:, \w+)*): (.*)")
_NUMBERS = {"integer": "whole number", "number": "number"}
_WORDS = {"array": "list", "object": "mapping", "string": "text", "boolean": "`true`, `false`"}


def split_docstring(section: type[Section]) -> tuple[str, dict[str, str]]:
    """What a section's docstring says of it as a whole, in paragraphs, and of each attribute."""
    before, _, after = inspect.cleandoc(section.__doc__ or "").partition("\n\nAttributes:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in after.splitlines():
        found = _ATTRIBUTE.fullmatch(line)
        if found:
            names = found[1].split(", ")
        for name in names:
            meanings[name] = found[2] if found else f"{meanings[name]} {line.strip()}"
    paragraphs = (" ".join(paragraph.split()) for paragraph in before.split("\n\n"))
    return "\n\n".join(textwrap.fill(paragraph, 120, break_on_hyphens=False) for paragraph in paragraphs), meanings


def describe_values(schema: Mapping[str, Any]) -> str:
    """What may stand at a key, in words."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    kind = kinds[0]
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    if "type" not in kind:
        return "section"
    if kind["type"] in _NUMBERS:
        return _NUMBERS[kind["type"]] + _describe_range(kind)
    return "path" if kind.get("format") == "path" else _WORDS[kind["type"]]


def _describe_range(kind: Mapping[str, Any]) -> str:
    """The bounds of a number. pydantic spells them in its own way where a validator stands before the number's."""
    least, most = kind.get("minimum", kind.get("ge")), kind.get("maximum", kind.get("le"))
    above = kind.get("exclusiveMinimum", kind.get("gt"))
    if above is not None:
        return f" above {above}, to {most:g}"
    if least is None:
        return ""
    return f" from {least} on" if most is None else f", {least} to {most}"


def describe_default(section: type[Section], name: str) -> str:
    """What holds where a key is left out, as YAML would have it; nothing where the meaning says it."""
    field = section.model_fields[name]
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, Section):
        return ""
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def describe_keys(places: tuple[str, ...], section: type[Section], names: list[str]) -> Iterator[str]:
    """The table of some of a section's keys; those that follow each other and have all else in common share a row.

    Raises:
        KeyError: the docstring of the section says nothing of one.
    """
    properties, meanings = section.model_json_schema()["properties"], split_docstring(section)[1]
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"

    def describe(name: str) -> tuple[str, str, str]:
        values = VALUES.get(name) or describe_values(properties[name])
        return values, describe_default(section, name), meanings[name]

    for described, sharing in groupby(names, describe):
        keys = ", ".join(f"`{place}.{name}`" if place else f"`{name}`" for name in sharing for place in places)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (keys, *described))} |"


def describe_section(places: tuple[str, ...], section: type[Section]) -> Iterator[str]:
    """A section's part of the docs, with its methods' where there are some."""
    above = {name for _, other in SECTIONS if other in section.__mro__[1:] for name in other.model_fields}
    names = [name for name in section.model_fields if name not in above]
    yield f"\n## {' and '.join(f'`{place}`' for place in places)}\n"
    yield f"{split_docstring(section)[0]}\n"
    yield from describe_keys(places, section, names)
    if section is not SpeculationSection:
        return
    shared = {name for _, options in SHARED for name in options.model_fields}
    for method in {method.section: method for method in METHODS.values()}.values():
        bases = [other.section for other in METHODS.values() if other.section in method.section.__mro__[1:]]
        told = {*names, *shared, *(name for base in bases for name in base.model_fields)}
        own = [name for name in method.section.model_fields if name not in told]
        if own or method.section is not SpeculationSection:  # one without keys of its own has something to say, too
            yield f"\n{split_docstring(method.section)[0]}" + ("\n" if own else "")
        if own:
            yield from describe_keys(places, method.section, own)
    for title, options in SHARED:
        own = [name for name in options.model_fields if name in shared]
        shared -= set(own)
        yield f"\n### {title}\n\n{split_docstring(options)[0]}\n"
        yield from describe_keys(places, options, own)


def make_docs() -> str:
    """The whole of docs/configuration.md."""
    lines = [PREAMBLE, "## The whole file\n", *describe_keys(("",), RuntimeConfig, RuntimeConfig.known_keys())]
    for places, section in SECTIONS:
        lines += describe_section(places, section)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCS.write_text(make_docs(), encoding="utf-8")
