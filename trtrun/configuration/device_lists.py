"""How a configuration names devices: on this host, on named hosts, or as counts.

It turns what the YAML holds into names such as "cuda:0" or "node1/cuda:0". It does not know which hosts exist: counts
stay counts here, and whoever knows the allocation (the launcher) replaces them by names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trtrun.errors import shorten

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""A host's name or IPv4 address. It reaches command lines, so nothing else is let through."""

_NUMBERS = 1_000_000  # of devices on a host: 0 to 999999

COUNT_KEYS = ("nodes", "gpus_per_node", "cpus_per_node")

MOST_DEVICES = 4096
"""Of one engine: no model has as many heads to share out, and a misprint must not fill the memory."""


def is_counts(value: object) -> bool:
    """Whether a `devices` value counts devices (`{nodes: 2, gpus_per_node: 4}`) instead of naming them."""
    if not isinstance(value, Mapping):
        return False
    # A misspelt count must not pass for a host of that name.
    return any(key in COUNT_KEYS or str(key).endswith("_per_node") for key in value)


def parse_devices(value: object) -> tuple[str, ...]:
    """Return the devices of a `devices` value, in tensor-parallel order.

    Args:
        value: a device, a list of them, or a mapping of hosts to either. A bare number is a GPU.

    Returns:
        "cuda:N" or "cpu:N", each with "HOST/" before it where hosts are named.

    Raises:
        ValueError: something that is no device, a device twice, or counts, which only a launcher can fill in.
    """
    if is_counts(value):
        raise ValueError("counts of nodes and GPUs are filled in by the trtrun command; name the devices here")
    devices: tuple[str, ...] = ()
    if isinstance(value, Mapping):
        for host, items in value.items():
            check_host(host)
            devices += tuple(f"{host}/{device}" for device in _parse_list(items, f"{host}: "))
    else:
        devices = _parse_list(value, "")
    if not devices:
        raise ValueError('the list is empty: name at least one device, such as [0] or ["cpu:0"]')
    check_number(len(devices))
    seen: set[str] = set()
    for device in devices:
        if device in seen:
            raise ValueError(f"{device} stands more than once: one device is one slot")
        seen.add(device)
    return devices


def check_number(devices: int) -> None:
    """Raise ValueError for more devices than one engine can have."""
    if devices > MOST_DEVICES:
        raise ValueError(f"{shorten(devices)} devices are more than the {MOST_DEVICES} that one engine may have")


def is_same_host(one: str, other: str) -> bool:
    """Whether two names are one host's: they are equal, or one is the other up to its first dot."""
    if one == other:
        return bool(one)
    short = one.partition(".")[0]
    if short.isdecimal() or short != other.partition(".")[0]:  # of two addresses, no part is a name
        return False
    return one == short or other == short


def check_host(host: object) -> str:
    """Return a host's name.

    Raises:
        ValueError: it is not one.
    """
    if not isinstance(host, str) or not HOST.fullmatch(host):
        raise ValueError(f"{shorten(host)} is no host: write a host name or an IPv4 address")
    return host


def host_of(device: str) -> str:
    """The host of a device's name; empty where none is named."""
    return device.rpartition("/")[0]


def kind_of(device: str) -> str:
    """ "cuda" or "cpu"."""
    return device.rpartition("/")[2].partition(":")[0]


def _parse_list(value: object, where: str) -> tuple[str, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_parse_device(item, where) for item in items)


def _parse_device(value: object, where: str) -> str:
    """Return the device in its one spelling."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _NUMBERS:
        return f"cuda:{value}"
    host, slash, name = value.rpartition("/") if isinstance(value, str) else ("", "", "")
    match = re.fullmatch(r"(cuda|cpu)(?::(0|[1-9][0-9]{0,5}))?", name)
    if match is None or (slash and where):
        raise ValueError(
            f'{where}{shorten(value)} is no device: write a number or "cuda:0" for a GPU, "cpu:0" for a CPU slot'
        )
    prefix = f"{check_host(host)}/" if slash else ""
    return f"{prefix}{match[1]}:{match[2] or 0}"
