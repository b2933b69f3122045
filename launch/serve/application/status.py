"""GET /status: who sits where, what is drafted, how full the engine is, and what has come of it so far; and GET
/metrics, for Prometheus: on a port of its own, and on the API's for whoever looks for it there.

The page reads the status, and so may any program.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launch.serve.engine.messages import Ready, Standing, Status
from launch.serve.frontend.frontend import Frontend
from launch.serve.http.requests import Keys
from parallel.topology import Role
from trtrun import __version__
from trtrun.configuration.drafting.draft_trees import ChoiceTree
from trtrun.configuration.drafting.text_methods import LookaheadSection
from trtrun.configuration.model_paths import name_of_model
from trtrun.start.job_spec import JobSpec


def describe_drafts(spec: JobSpec) -> dict[str, Any]:
    """What `GET /status` tells.

    Returns:
        `draft_nodes`: tokens of a draft of the full draft_len, those beside each other counted, at most.
        `draft_parents`: of a tree of one shape for each of its tokens the one in front of it, -1 for the row's newest;
        None of chains, and of trees whose shape follows from what is drafted.
        `drafts_in_parallel`: whether a draft model makes all of them in one forward.
    """
    section, most = spec.config.speculation, spec.config.draft_len
    size = section.size_of(most)
    paths: Iterable[Sequence[int]] | None = None
    tree = getattr(section, "tree", None)
    if isinstance(tree, ChoiceTree):
        paths = tree.paths
    elif isinstance(section, LookaheadSection):
        paths = section.sizes.tree(most).paths
    return {
        "draft_nodes": size.nodes,
        "draft_parents": _parents(paths, size.nodes) if paths is not None and size.paths > 1 else None,
        "drafts_in_parallel": spec.models.mask_token is not None,
    }


def _parents(paths: Iterable[Sequence[int]], num_nodes: int) -> list[int]:
    parents = [-1] * num_nodes
    for path in paths:
        for before, node in pairwise(path):
            parents[node] = before
    return parents


METRICS_PATH = "/metrics"


def metrics_route(frontend: Frontend, keys: Keys) -> Route:
    """The route of the metrics, for an application.

    Args:
        frontend: whose metrics they are.
        keys: of which requests need one. The API's port may be reached by many, that of the metrics is the operator's.
    """

    async def metrics(request: Request) -> Response:
        keys.check(request)
        status = await frontend.client.ask_status()
        client = frontend.client
        told = frontend.metrics.render(
            client.ready, status, client.standings(), is_hanging=frontend.admission.is_hanging
        )
        return Response(told, media_type=CONTENT_TYPE_LATEST)

    return Route(METRICS_PATH, metrics, methods=["GET"])


FRESH_SECONDS = 0.2
"""How long one answer of the engine serves all who ask: the rounds do not feel how many do."""


class StatusBoard:
    """What the server tells of itself."""

    def __init__(self, frontend: Frontend, spec: JobSpec, keys: Keys, has_template: bool) -> None:
        """Begin to tell.

        Args:
            frontend: of the server.
            spec: of the job that is served.
            keys: one of which is asked for, where there are any: names of hosts are not for everybody.
            has_template: whether chats are answered.
        """
        self._frontend = frontend
        self._config = spec.config
        self._models = _models(spec)
        self._drafts = describe_drafts(spec)
        self._topology = spec.topology
        self._keys = keys
        self._has_template = has_template
        self._asking: asyncio.Task[Status | None] | None = None
        self._asked_at = 0.0
        self._told: tuple[Ready, Status] | None = None

    def routes(self) -> list[Route]:
        """The board's routes, for the application."""
        return [Route("/status", self.status, methods=["GET"])]

    async def status(self, request: Request) -> Response:
        """How the server stands just now."""
        self._keys.check(request)
        return JSONResponse(self._describe(await self._ask()), headers={"cache-control": "no-store"})

    async def _ask(self) -> Status | None:
        """What the engine says, at most `FRESH_SECONDS` old, or what it has last said where it is in a long round; None
        while there is none."""
        now = time.monotonic()
        if self._asking is None or (self._asking.done() and now - self._asked_at > FRESH_SECONDS):
            self._asking, self._asked_at = asyncio.create_task(self._frontend.client.ask_status()), now
        status, ready = await asyncio.shield(self._asking), self._frontend.client.ready
        if ready is not None and status is not None:
            self._told = ready, status
        return self._told[1] if self._told is not None and self._told[0] is ready else None

    def _describe(self, engine: Status | None) -> dict[str, Any]:
        frontend, config = self._frontend, self._config
        admission, totals = frontend.admission, frontend.metrics.totals
        engine_state = "starting" if not admission.is_open else "hanging" if admission.is_hanging else "serving"
        state = "ending" if admission.is_closing else engine_state
        is_draft_lost = engine is not None and bool(engine.totals.get("draft_losses"))
        ready = frontend.client.ready
        return {
            "model": frontend.model_name,
            "version": __version__,
            "state": state,
            "restarts": totals.num_restarts,
            "chat": self._has_template,
            "max_seq_len": ready.limits["max_seq_len"] if ready is not None else None,
            "models": self._models,
            "ranks": self._ranks(is_up=ready is not None, is_draft_lost=is_draft_lost),
            "phases": describe_phases(frontend.client.standings(), with_words=True),
            "speculation": {
                "method": config.speculation.method,
                "draft_len": frontend.draft_len,
                **self._drafts,
                "use_logits": config.speculation.use_logits,
                "is_paced": config.is_paced,
                "drafts_ahead": config.drafts_ahead,
                "vocabulary": config.draft.vocabulary if config.draft is not None else None,
            },
            "queue": {
                "running": engine.num_running if engine is not None else None,
                "waiting": engine.num_waiting if engine is not None else None,
                "max_running": admission.max_running,
                "max_waiting": admission.max_queue,
                "requests": admission.num_requests,
                "max_requests": admission.max_streams,
            },
            "kv_cache": {
                "blocks": engine.num_blocks if engine is not None else None,
                "free_blocks": engine.num_free_blocks if engine is not None else None,
                "usage": engine.kv_usage if engine is not None else None,
            },
            "totals": {
                "tokens": totals.num_tokens,
                "row_rounds": totals.num_row_rounds,
                "draft_tokens": totals.num_draft_tokens,
                "accepted_draft_tokens": totals.num_accepted_draft_tokens,
                "mean_acceptance_length": totals.mean_acceptance_length,
                "draft_hit_rate": engine.draft_hit_rate if engine is not None else None,
            },
        }

    def _ranks(self, is_up: bool, is_draft_lost: bool) -> list[dict[str, Any]]:
        """Every rank: its roles, its host where the job names hosts, its device where it has one, and how it is."""
        ranks = []
        for rank in range(self._topology.world_size):
            roles, slot = self._topology.roles(rank), self._topology.slot(rank)
            is_lost = is_draft_lost and roles == (Role.DRAFT,)
            ranks.append(
                {
                    "rank": rank,
                    "roles": [role.value for role in roles],
                    "host": self._topology.host(rank) or None,
                    "device": slot.device if slot is not None else None,
                    "state": "starting" if not is_up else "lost" if is_lost else "up",
                }
            )
        return ranks


def describe_phases(standings: Sequence[Standing], *, with_words: bool = False) -> list[dict[str, Any]]:
    """Describe in which phase each process of the engine is, and for how long: for anybody, or with words, which may
    have names of adapters, for who has a key."""
    return [
        {"rank": one.rank, "phase": one.phase, "seconds": round(one.seconds, 3)}
        | ({"doing": one.doing, "still_seconds": round(one.still_seconds, 3)} if with_words else {})
        for one in standings
    ]


def _models(spec: JobSpec) -> dict[str, Any]:
    """What each model is called, and how its weights are held: as the YAML file says, or as the checkpoint is
    quantized. A head with a rank of its own stands in the draft's place."""
    config = spec.config
    sections = {"target": config.target, "draft": config.draft if config.draft_devices else None}
    told: dict[str, Any] = {
        role: None
        if section is None
        else {
            "name": name_of_model(section.model),
            "dtype": section.dtype,
            "quantization": spec.model_of(role).quant_method or section.quantization,
        }
        for role, section in sections.items()
    }
    if config.heads is not None and config.heads_apart:
        name = name_of_model(config.heads.model)
        told["draft"] = {"name": name, "dtype": config.target.dtype, "quantization": "none"}
    return told
