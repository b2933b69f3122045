"""Reads what a `trtrun serve` says of itself: the line with its addresses, and its metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

_READY = re.compile(r"trtrun: (\S+) is served at (\S+), metrics at (\S+), gRPC at (\S+)$")


@dataclass(frozen=True)
class Addresses:
    """Where a server listens.

    Attributes:
        model: what clients call the model.
        url: of the HTTP port, or `unix:///PATH`.
        metrics_url: of the metrics themselves; their path alone where that is a socket's.
        grpc_address: HOST:PORT, or `unix:PATH`.
    """

    model: str
    url: str
    metrics_url: str
    grpc_address: str


def read_addresses(line: str) -> Addresses | None:
    """The addresses that a line tells; None where it is another line."""
    ready = _READY.match(line)
    return None if ready is None else Addresses(*ready.groups())


def read_metrics(text: str) -> dict[str, float]:
    """Every sample by its name, without the label of the model."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[re.sub(r'model_name="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")] = float(value)
    return found


def is_idle(metrics: dict[str, float]) -> bool:
    """Whether an engine is up, and nothing runs or waits."""
    busy = metrics["vllm:num_requests_running"] or metrics["vllm:num_requests_waiting"]
    return bool(metrics["trtrun:engine_up"]) and not busy


def find_leftovers(metrics: dict[str, float]) -> list[str]:
    """What an engine still holds that nobody asks for; a line each."""
    found = []
    if metrics["vllm:num_requests_running"] or metrics["vllm:num_requests_waiting"]:
        found.append("rows run that nobody asks for")
    if metrics["vllm:kv_cache_usage_perc"]:
        found.append(f"KV blocks are held by nobody: {metrics['vllm:kv_cache_usage_perc']:.4f} of all")
    return found
