"""Times trtrun's kernels on the CPU, in bfloat16 or float32, beside what runs without them:
products of oneDNN or torch, torch's attention, experts one by one, gated delta nets in plain torch.

    python scripts/bench/bench_cpu_kernels.py [--threads 2] [--hidden 1024] [--rows 1,6,32] [--context 128]
                                        [--dtype float32] [--experts 64,256,512,8] [--nets 16,16,128]

Weights are streamed from memory, as in decoding: each product goes through so many of them that no cache holds them.
All take turns within each repeat; times are medians. "int8" and "fp8" are the own products with weights of 8 bits, of
which half as many bytes come out of memory, where the processor multiplies bfloat16. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from trtrun.kernels.arguments import AttentionCall

# isort: off
import trtrun  # noqa: F401  before torch, which reads how its threads wait when it loads
import numpy as np
import torch
# isort: on

from trtrun.attention.backend import GatherAttention
from trtrun.kernels.cpu.attention import NativeAttention
from trtrun.kernels.cpu.experts import NativeExperts
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, processor_kind
from trtrun.kernels.cpu.matmul import BlockedFp8Matmul, BlockedInt8Matmul, BlockedMatmul
from trtrun.kernels.cpu.onednn_matmul import OneDnnMatmul, can_pack
from trtrun.kernels.cpu.operations import CpuOperations
from trtrun.kernels.torch import fp8
from trtrun.kernels.torch.delta_net import DeltaNetWeights, TorchDeltaNet
from trtrun.kernels.torch.experts import HostExperts, choose_experts
from trtrun.kernels.torch.integers import quantize_int8
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.kvcache.row_states import RowStates, StateSpace
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import RecurrentState, like_layers
from trtrun.kvcache.store import KVStore

CPU = torch.device("cpu")
STREAMED_BYTES = 400_000_000
"""Of weights, and half of it in 8 bits: several times what a cache holds."""
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 64, 16


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call, one after the other in every repeat; the first repeat does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def time_products(
    features: int, inputs: int, rows: list[int], repeats: int, dtype: torch.dtype
) -> list[dict[str, object]]:
    """One entry for each number of rows: microseconds a product and gigabytes of weight a second."""
    count = max(2, STREAMED_BYTES // (features * inputs * dtype.itemsize))
    weights = [torch.randn(features, inputs).to(dtype) for _ in range(count)]
    products: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
        "own": [BlockedMatmul(weight, None) for weight in weights],
    }
    if can_pack(torch.device("cpu"), dtype):
        products["onednn"] = [OneDnnMatmul(weight, None, batch_invariant=True) for weight in weights]
    else:
        products["torch"] = [TorchOperations().product(weight, None, batch_invariant=True) for weight in weights]
    if dtype is torch.bfloat16 and processor_kind() == MULTIPLIES_BFLOAT16:
        integers, codes = (
            [quantize_int8(weight) for weight in weights],
            [fp8.quantize(weight) for weight in weights],
        )
        products["int8"] = [BlockedInt8Matmul(tensors["codes"], tensors["scale"], None) for tensors in integers]
        products["fp8"] = [
            BlockedFp8Matmul(tensors["codes"], tensors["scale"], None, rounds_activations=True) for tensors in codes
        ]
    entries: list[dict[str, object]] = []
    for number in rows:
        x = torch.randn(number, inputs).to(dtype)
        calls = {name: lambda made=made, x=x: [product(x) for product in made] for name, made in products.items()}
        seconds = {name: value / count for name, value in in_turns(calls, repeats).items()}
        entry: dict[str, object] = {"features": features, "inputs": inputs, "rows": number}
        for name, value in seconds.items():
            entry[f"{name}_us"] = round(value * 1e6, 1)
            entry[f"{name}_gb_per_s"] = round(
                features * inputs * (1 if name in ("int8", "fp8") else dtype.itemsize) / value / 1e9, 1
            )
        entries.append(entry)
        print(
            f"product {features} x {inputs}, {number} rows: "
            + ", ".join(f"{k} {v}" for k, v in list(entry.items())[3:])
        )
    return entries


def time_attention(queries: int, context: int, repeats: int, dtype: torch.dtype) -> dict[str, object]:
    """Microseconds of a layer's attention, rotation included: `queries` positions of a row behind `context` tokens."""
    blocks = -(-(context + queries) // BLOCK_SIZE)
    tables, positions = torch.arange(1, blocks + 1).view(1, -1), torch.arange(context, context + queries).view(1, -1)
    fused = torch.randn(queries, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    query_key, value = fused.split((HEADS + KV_HEADS, KV_HEADS), dim=1)
    angles = (torch.rand(2, queries, 1, HEAD_DIM) * 2 - 1).to(dtype).unbind()
    calls = {}
    for name, backend in (("own", NativeAttention(HEAD_DIM, dtype)), ("torch", GatherAttention())):
        layer = KVStore(like_layers(1, KV_HEADS, HEAD_DIM), blocks + 1, BLOCK_SIZE, dtype, torch.device("cpu")).layer(0)
        batch = AttentionBatch([AttentionSegment(0, 1, queries, tables, positions)], BLOCK_SIZE)
        calls[name] = lambda backend=backend, layer=layer, batch=batch: [
            backend.forward(AttentionCall(query_key, value, angles, layer, batch, 0.125, None)) for _ in range(10)
        ]
    seconds = in_turns(calls, repeats)
    entry: dict[str, object] = {"context": context, "queries": queries}
    entry |= {f"{name}_us": round(value / 10 * 1e6, 1) for name, value in seconds.items()}
    print(f"attention, {context} tokens, {queries} queries: own {entry['own_us']} us, torch {entry['torch_us']} us")
    return entry


def time_experts(shape: list[int], rows: list[int], repeats: int, dtype: torch.dtype) -> list[dict[str, object]]:
    """One entry for each number of rows: microseconds a layer of experts, together and one by one."""
    count, features, hidden, chosen = shape
    operations = CpuOperations()
    activate = partial(operations.activate_and_multiply, activation="silu")
    layers = []
    for _ in range(max(1, STREAMED_BYTES // (3 * count * features * hidden * dtype.itemsize))):
        sizes = ((2 * features, hidden), (hidden, features))
        products = [[BlockedMatmul(torch.randn(size).to(dtype), None) for _ in range(count)] for size in sizes]
        layers.append((NativeExperts(*products, activate), HostExperts(*products, activate)))
    entries: list[dict[str, object]] = []
    for number in rows:
        x = torch.randn(number, hidden).to(dtype)
        choices = [choose_experts(torch.randn(number, count), chosen, renormalises=True) for _ in layers]
        calls = {
            name: lambda kind=kind, x=x, choices=choices: [
                layer[kind](x, choice) for layer, choice in zip(layers, choices, strict=True)
            ]
            for kind, name in enumerate(("own", "apart"))
        }
        seconds = {name: value / len(layers) for name, value in in_turns(calls, repeats).items()}
        entry: dict[str, object] = {"experts": shape, "rows": number}
        entry |= {f"{name}_us": round(value * 1e6, 1) for name, value in seconds.items()}
        entries.append(entry)
        print(f"experts {shape}, {number} rows: own {entry['own_us']} us, one by one {entry['apart_us']} us")
    return entries


def time_delta_nets(shape: list[int], rows: list[int], repeats: int, dtype: torch.dtype) -> list[dict[str, object]]:
    """One entry for each number of rows that get a token each, and for a prompt of 256 tokens: microseconds a layer."""
    keys, values, size = shape
    channels = (2 * keys + values) * size
    weights = DeltaNetWeights(
        keys, values, size, size, torch.arange(values) * keys // values, torch.randn(4, channels) / 2,
        (torch.randn(values) / 2 - 2).exp(), torch.randn(values) - 2, torch.ones(size, dtype=dtype), 1e-6,
    )  # fmt: skip
    spec = RecurrentState(((3, channels), (values, size, size)), ((channels,), (values,), (values,)))
    operations, entries = CpuOperations(), list[dict[str, object]]()
    nets = {"own": operations.delta_net(weights), "torch": TorchDeltaNet(weights, operations)}
    for number, tokens in (*((number, 1) for number in rows), (1, 256)):
        states = {name: RowStates({0: spec}, StateSpace(number, 1, True), 1 + number, CPU) for name in nets}
        for of_net in states.values():
            of_net.announce(np.array([[row, 0, 1 + row] for row in range(number)]))
            of_net.begin([(row, 0, 0) for row in range(number)])
        made = torch.randn(number * tokens, channels + values * size).to(dtype)
        rates, tables = torch.randn(number * tokens, 2 * values).to(dtype), torch.arange(1, 1 + number).unsqueeze(1)
        begins = dict.fromkeys(nets, 0)

        def forward(name: str) -> torch.Tensor:
            positions = (begins[name] + torch.arange(tokens)).expand(number, tokens)  # noqa: B023
            segment = AttentionSegment(0, number, tokens, tables, positions)  # noqa: B023
            begins[name] += tokens  # noqa: B023
            found = states[name].of_batch(AttentionBatch([segment], 1 << 30))  # noqa: B023
            return nets[name](made, rates, states[name].layers[0], found)  # noqa: B023

        seconds = in_turns({name: partial(forward, name) for name in nets}, repeats)
        entry: dict[str, object] = {"delta_net": shape, "rows": number, "tokens": tokens}
        entry |= {f"{name}_us": round(value * 1e6, 1) for name, value in seconds.items()}
        entries.append(entry)
        print(f"delta net {shape}, {number} rows of {tokens}: own {entry['own_us']} us, torch {entry['torch_us']} us")
    return entries


def numbers(text: str) -> list[int]:
    """Numbers of at least 1, with commas between; errors as of `positive`."""
    return [positive(part) for part in text.split(",")]


def positive(text: str) -> int:
    """A number of at least 1.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 1")
    return int(text)


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument(
        "--hidden", type=positive, default=1024, help="the products are those of a layer with 4 times as many features"
    )
    parser.add_argument("--rows", type=numbers, default="1,6,32", help="numbers of rows, with commas between")
    parser.add_argument("--experts", type=numbers, default="64,256,512,8", help="count, features, hidden, chosen")
    parser.add_argument("--nets", type=numbers, default="16,16,128", help="heads of keys, of values, their numbers")
    parser.add_argument("--context", type=positive, default=128, help="tokens that attention looks back on")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=positive, default=9)
    options = parser.parse_args()
    if options.hidden % 2:
        parser.error(f"argument --hidden: {options.hidden} is odd; the kernels take pairs of input features")
    if processor_kind() is None:
        print("bench_cpu_kernels.py: the kernels need AVX2, libgomp and llvmlite", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    shapes = [
        (8 * options.hidden, options.hidden),
        (options.hidden, 4 * options.hidden),
        (options.hidden, options.hidden),
    ]
    products = [entry for shape in shapes for entry in time_products(*shape, options.rows, options.repeats, dtype)]
    attention = [time_attention(queries, options.context, options.repeats, dtype) for queries in options.rows]
    experts = time_experts(options.experts, options.rows, options.repeats, dtype)
    nets = time_delta_nets(options.nets, options.rows, options.repeats, dtype)
    found = {"products": products, "attention": attention, "experts": experts, "delta_nets": nets}
    print(json.dumps({"processor": processor_kind(), "threads": options.threads, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
