"""Triton's metrics in Prometheus's text format, written as Triton writes them.

Programs made for it read whole numbers, counters without `_total` behind their names, and a bucket's bound as the last
label; the library writes floats, adds the suffix, and sorts. It knows families and samples, and not what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

_BOUND = "le"


def write_exposition(families: Iterable[Metric]) -> bytes:
    """Families with their samples, a line each."""
    lines = []
    for family in families:
        text = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.type}"]
        lines += map(_write_sample, family.samples)
    return "".join(f"{line}\n" for line in lines).encode()


def _write_sample(sample: Sample) -> str:
    names = sorted(sample.labels, key=lambda name: (name == _BOUND, name))
    labels = ",".join(f'{name}="{_escape(sample.labels[name])}"' for name in names)
    value = float(sample.value)
    number = str(int(value)) if value.is_integer() else repr(value)
    return f"{sample.name}{{{labels}}} {number}" if labels else f"{sample.name} {number}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
