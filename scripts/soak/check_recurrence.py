#!/usr/bin/env python3
"""How far gated delta nets are from a plain loop in float64, by the length of a text.

    python scripts/soak/check_recurrence.py [--device cuda:0] [--tokens 1000,8192,30000] [--values 4] [--state float32]

Heads of 128 numbers with random weights and inputs in float32, one row, in chunks of 4,096 tokens. The last line is
JSON: of each length the largest error of states and of what tokens read, each as a part of the largest number there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trtrun.kernels.chooser import operations_of
from trtrun.kernels.torch.delta_net import LEAST_SQUARES, DeltaNetWeights
from trtrun.kvcache.row_states import RowStates, StateSpace
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import STATE_BYTES, RecurrentState, StateDtype

KERNEL, SIZE, CHUNK = 4, 128, 4096


def make_weights(values: int, device: torch.device) -> DeltaNetWeights:
    """Of `values` heads, two for each key head."""
    torch.manual_seed(1)
    keys = max(1, values // 2)
    channels = (2 * keys + values) * SIZE
    return DeltaNetWeights(
        keys,
        values,
        SIZE,
        SIZE,
        key_of_value=(torch.arange(values) * keys // values).to(device),
        convolution=(torch.randn(KERNEL, channels) / 2).to(device),
        fading=(torch.randn(values) / 2 - 2).exp().to(device),
        fading_bias=(torch.randn(values) - 2).to(device),
        norm=torch.ones(SIZE, device=device),
        epsilon=1e-6,
    )


def batch_of(positions: torch.Tensor) -> AttentionBatch:
    """The only row at positions [tokens]."""
    tables = torch.ones((1, 1), dtype=torch.int64, device=positions.device)
    return AttentionBatch([AttentionSegment(0, 1, len(positions), tables, positions.unsqueeze(0))], 1 << 20)


def go_through(
    weights: DeltaNetWeights, made: torch.Tensor, rates: torch.Tensor, dtype: StateDtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read, [tokens, values * SIZE], and the matrices behind the last token, by the product's kernels; states
    are kept in a dtype."""
    device, tokens = made.device, len(made)
    parts = (KERNEL - 1, weights.channels), (weights.values, SIZE, SIZE)
    spec = RecurrentState(parts, ((weights.channels,), (weights.values,), (weights.values,)), num_narrow=1)
    states = RowStates({0: spec}, StateSpace(1, 1, True, dtype=dtype), 2, device)
    states.announce(np.array([[0, 0, 1]]))
    states.begin([(0, 0, 0)])
    net, found = operations_of(device.type).delta_net(weights), []
    for start in range(0, tokens, CHUNK):
        part = slice(start, min(start + CHUNK, tokens))
        of_rows = states.of_batch(batch_of(torch.arange(part.start, part.stop, device=device)))
        found.append(net(made[part], rates[part], states.layers[0], of_rows))
    # A state stays one token behind: one more is fed, so that all before have gone through it.
    behind = states.of_batch(batch_of(torch.full((1,), tokens, device=device)))
    net(made[:1], rates[:1], states.layers[0], behind)
    matrix = states.layers[0].states[1][0]
    return torch.cat(found), matrix if device.type == "cpu" else matrix.transpose(1, 2)


def loop(weights: DeltaNetWeights, made: torch.Tensor, rates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64, on the CPU."""
    made, rates, taps = made.cpu().double(), rates.cpu().double(), weights.convolution.cpu().double()
    keys, values = weights.keys * SIZE, weights.values
    inputs = torch.cat((torch.zeros(KERNEL - 1, weights.channels).double(), made[:, : weights.channels]))
    mixed = sum(inputs[tap : tap + len(made)] * taps[tap] for tap in range(KERNEL))
    assert isinstance(mixed, torch.Tensor)
    mixed = mixed * mixed.sigmoid()
    of_key = weights.key_of_value.cpu()
    query, key = (part.reshape(len(made), -1, SIZE) for part in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
    query, key = (part / (part.square().sum(2, keepdim=True) + LEAST_SQUARES).sqrt() for part in (query, key))
    query, key, value = query[:, of_key] / SIZE**0.5, key[:, of_key], mixed[:, 2 * keys :].reshape(-1, values, SIZE)
    corrects, fades = rates[:, :values].sigmoid(), rates[:, values:] + weights.fading_bias.cpu().double()
    keeps = (-weights.fading.cpu().double() * torch.nn.functional.softplus(fades)).exp()
    matrix, read = torch.zeros(values, SIZE, SIZE).double(), torch.empty(len(made), values, SIZE).double()
    for token in range(len(made)):
        matrix *= keeps[token].view(-1, 1, 1)
        change = (value[token] - torch.einsum("hkv,hk->hv", matrix, key[token])) * corrects[token].unsqueeze(1)
        matrix += key[token].unsqueeze(2) * change.unsqueeze(1)
        read[token] = torch.einsum("hkv,hk->hv", matrix, query[token])
    normed = read / (read.square().mean(2, keepdim=True) + weights.epsilon).sqrt()
    gates = made[:, weights.channels :].view_as(normed)
    return (normed * gates * gates.sigmoid()).flatten(1), matrix


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", default="1000,8192,30000")
    parser.add_argument("--state", default="float32", choices=STATE_BYTES, help="kv_cache.state_dtype")
    parser.add_argument("--values", type=int, default=4, help="value heads")
    options = parser.parse_args()
    device, results = torch.device(options.device), {}
    weights = make_weights(options.values, device)
    for tokens in map(int, options.tokens.split(",")):
        generator = torch.Generator().manual_seed(tokens)
        widths = weights.channels + options.values * SIZE, 2 * options.values
        made, rates = (torch.randn(tokens, width, generator=generator).to(device) for width in widths)
        pairs = zip(go_through(weights, made, rates, options.state), loop(weights, made, rates), strict=True)
        errors = [((one.cpu().double() - other).abs().max() / other.abs().max()).item() for one, other in pairs]
        results[str(tokens)] = {"read": errors[0], "state": errors[1]}
        print(f"{tokens} tokens: states {errors[1]:.1e}, what is read {errors[0]:.1e}", flush=True)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
