"""Slow, obvious counterparts of trtrun.sampling for its tests: Python floats, one row and position at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch

from trtrun.core.nouns import RowAdmission
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import TokenLists

VOCAB = 23


def seeded(**values: object) -> SamplingParams:
    return SamplingParams.from_mapping({"seed": 1, "max_tokens": 100, **values})


def random_case(generator: random.Random) -> tuple[SamplingParams, list[int], int, tuple, tuple]:
    """Parameters (each off half the time), tokens, num_prompt_tokens, stop ids and bad words of one row."""

    def some(value: object, off: object) -> object:
        return value if generator.random() < 0.5 else off

    length = generator.randint(1, 20)
    tokens = [generator.randrange(6) for _ in range(length)]  # few tokens, so that prefixes match
    words = tuple(tuple(generator.randrange(6) for _ in range(generator.randint(1, 4))) for _ in range(6))
    params = seeded(
        temperature=some(generator.uniform(0.2, 2), 0.0),
        top_k=some(generator.randint(1, VOCAB + 3), 0),
        top_p=some(generator.uniform(0.05, 0.999), 1.0),
        min_p=some(generator.uniform(0.001, 0.4), 0.0),
        min_tokens=some(generator.randint(1, 12), 0),
        repetition_penalty=some(generator.uniform(0.5, 2), 1.0),
        presence_penalty=some(generator.uniform(-2, 2), 0.0),
        frequency_penalty=some(generator.uniform(-2, 2), 0.0),
        logit_bias=some({generator.randrange(VOCAB): generator.uniform(-9, 9) for _ in range(4)}, {}),
    )
    return params, tokens, generator.randint(1, length), some((7, 2, 21), ()), some(words, ())  # type: ignore[return-value]


def admission(
    row: int,
    tokens: Sequence[int],
    sampling: SamplingParams,
    num_prompt_tokens: int | None = None,
    stop_ids: tuple[int, ...] = (),
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
) -> RowAdmission:
    """An admission with what sampling looks at."""
    count = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return RowAdmission(
        row,
        row,
        np.array(tokens, dtype=np.int32),
        count,
        0,
        True,
        sampling,
        TokenLists.of(stop_ids, sampling.logit_bias, bad_word_ids),
    )


def reference_logits(
    logits: Sequence[float],
    tokens: Sequence[int],
    sampling: SamplingParams,
    num_prompt_tokens: int,
    stop_ids: Sequence[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Logits of the token after `tokens`, with every parameter applied; unshifted."""
    out = [float(value) for value in logits]
    output = list(tokens[num_prompt_tokens:])
    for token, value in sampling.logit_bias.items():
        out[token] += value
    for token in set(tokens):
        penalty = sampling.repetition_penalty
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
    for token in set(output):
        out[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    for word in bad_word_ids:
        prefix = list(word[:-1])
        if len(prefix) <= len(tokens) and list(tokens[len(tokens) - len(prefix) :]) == prefix:
            out[word[-1]] = -math.inf
    if len(output) < sampling.min_tokens:
        for token in stop_ids:
            out[token] = -math.inf
    if sampling.temperature == 0:
        return out
    return _filtered([value / sampling.temperature for value in out], sampling)


def _filtered(out: list[float], sampling: SamplingParams) -> list[float]:
    order = sorted(range(len(out)), key=lambda token: (-out[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    best = out[order[0]]
    weights = [math.exp(out[token] - best) for token in order]
    kept, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and sampling.top_p < 1 and reached >= sampling.top_p * sum(weights):
            break
        kept.append(token)
        reached += weight
    kept = [token for token in kept if math.exp(out[token] - best) >= sampling.min_p]
    return [out[token] if token in kept else -math.inf for token in range(len(out))]


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities, in double precision."""
    best = max(logits)
    weights = [math.exp(value - best) for value in logits]
    return [weight / sum(weights) for weight in weights]


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of Pearson's test that `counts` were drawn from `probabilities` (both flattened).

    Cells that expect fewer than 5 are merged into one; a count where the probability is 0 gives p = 0.
    """
    counts, probabilities = counts.flatten().double(), probabilities.flatten().double()
    if bool((counts[probabilities == 0] > 0).any()):
        return 0.0
    expected = probabilities / probabilities.sum() * counts.sum()
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    if float(wanted[-1]) < 5:  # too small to stand alone: join the last large cell
        observed = torch.cat([observed[:-2], observed[-2:].sum()[None]])
        wanted = torch.cat([wanted[:-2], wanted[-2:].sum()[None]])
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((wanted.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
