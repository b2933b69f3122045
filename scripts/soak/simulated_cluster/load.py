"""Requests of the shape of a public trace, by a fixed seed, and the server that each goes to.

Lengths and arrivals are those of Azure's LLM inference trace of conversations, November 2023 (Splitwise, ISCA 2024;
github.com/Azure/AzurePublicDataset, 19,366 requests in 3,502 s): these quantiles, 5.53 requests a second, and counts of
seconds, 10 seconds and minutes that vary as those of a Poisson process whose rate has a squared coefficient of
variation of about 0.05. Their prompts hold the conversation so far, and half of the requests go on with one:
LMSYS-Chat-1M has two turns a conversation (arXiv:2309.11998). How long people wait between turns is assumed. It knows
no server.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from typing import NamedTuple

import numpy as np

SHARES = (0, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 0.999, 1)
PROMPT_TOKENS = (2, 181, 207, 387, 396, 403, 703, 1020, 1071, 1130, 1189, 1315, 2735, 4083, 4142, 6212, 14050)
OUTPUT_TOKENS = (7, 41, 54, 77, 85, 91, 103, 129, 177, 384, 395, 400, 424, 451, 601, 954, 1000)
"""Of a request, by the share of requests that have no more."""

RATE = 5.53
"""Requests a second of the whole trace."""

_RATE_SHAPE, _RATE_SECONDS = 20.0, 10.0
"""Of the Gamma distribution that the rate is drawn from, with a mean of 1, and how long it then stays."""

_GOES_ON = 0.5
_PATIENCE = 60.0
"""How often a request belongs to a conversation that is there, and seconds until nobody goes on with one."""

_TRIES = 16
_ACCEPTANCE = (8.0, 2.0)
"""Of the Beta distribution of how likely a request's draft tokens are accepted: 0.8 on the mean, some 5 tokens a round
of 10 drafted ones."""


class Arrival(NamedTuple):
    """One request.

    Attributes:
        time: seconds since the beginning.
        session: number of its conversation, whose tokens follow from it.
        num_prompt_tokens, num_output_tokens: of it; a prompt begins with all of the conversation before.
        acceptance: how likely a draft token is accepted if those before it were.
    """

    time: float
    session: int
    num_prompt_tokens: int
    num_output_tokens: int
    acceptance: float


def make_arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Requests at so many a second on the mean, in order of time."""
    generator, choices = np.random.default_rng(seed), random.Random(seed)
    starts = np.arange(0, seconds, _RATE_SECONDS).tolist()
    # Drawn first, so that of one seed all rates rise and fall alike.
    factors = generator.gamma(_RATE_SHAPE, 1 / _RATE_SHAPE, len(starts)).tolist()
    times: list[float] = []
    for start, factor in zip(starts, factors, strict=True):
        length = min(_RATE_SECONDS, seconds - start)
        times += sorted((start + generator.random(generator.poisson(rate * factor * length)) * length).tolist())
    prompts, outputs = (
        np.interp(generator.random(len(times)), SHARES, lengths).astype(int).tolist()
        for lengths in (PROMPT_TOKENS, OUTPUT_TOKENS)
    )
    acceptances = generator.beta(*_ACCEPTANCE, len(times)).tolist()
    arrivals: list[Arrival] = []
    ended = deque[int]()  # places of the last turns of conversations, some of which were gone on with
    latest: dict[int, int] = {}
    for place, (time, prompt, output, acceptance) in enumerate(zip(times, prompts, outputs, acceptances, strict=True)):
        while ended and arrivals[ended[0]].time < time - _PATIENCE:
            ended.popleft()
        session = len(latest)
        for _ in range(_TRIES if ended and choices.random() < _GOES_ON else 0):
            before = arrivals[ended[choices.randrange(len(ended))]]
            context = before.num_prompt_tokens + before.num_output_tokens
            if arrivals[latest[before.session]] is before and context < prompt:
                session = before.session
                break
        latest[session] = place
        ended.append(place)
        arrivals.append(Arrival(time, session, prompt, output, acceptance))
    return arrivals


def route(arrivals: list[Arrival], num_servers: int) -> list[list[Arrival]]:
    """The requests of each server: all of a conversation go to the same one, by a hash of its number."""
    routed: list[list[Arrival]] = [[] for _ in range(num_servers)]
    for arrival in arrivals:
        # Not a checksum: those of numbers in a row are spread more evenly than chance would.
        name = hashlib.blake2b(str(arrival.session).encode(), digest_size=8).digest()
        routed[int.from_bytes(name, "little") % num_servers].append(arrival)
    return routed


def session_tokens(session: int, count: int) -> list[int]:
    """The first `count` tokens of a conversation, prompts and outputs alike."""
    tokens: list[int] = np.random.default_rng(session).integers(0, 32000, count).tolist()
    return tokens
