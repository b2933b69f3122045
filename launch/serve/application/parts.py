"""What a server is made of, put together from its configuration: the frontend with its admission, counts and parsers,
and the protocols before it. It starts nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import Route

from launch.serve.admission.control import AdmissionControl
from launch.serve.admission.limits import LogitsLimit
from launch.serve.api.anthropic.api import MessagesApi
from launch.serve.api.kserve.grpc_servicer import KServeServicer
from launch.serve.api.kserve.http_api import KServeHttpApi
from launch.serve.api.kserve.service import KServeService
from launch.serve.api.openai.api import OpenAIApi, error_body
from launch.serve.api.openai.vllm_api import AdapterApi, TokenApi
from launch.serve.application.facts import make_facts, model_name
from launch.serve.application.request_parser import RequestParser
from launch.serve.application.status import StatusBoard, metrics_route
from launch.serve.batches.api import BatchApi
from launch.serve.batches.jobs import RowAnswerer, RowTurns
from launch.serve.batches.runner import BatchRunner
from launch.serve.batches.store import BatchStore, prepare_directory
from launch.serve.engine.adapters import AdapterRegistry
from launch.serve.engine.client import EngineClient
from launch.serve.frontend.adapters import AdapterDesk
from launch.serve.frontend.frontend import Frontend, RequestOptions, ServedModel
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Keys
from launch.serve.metrics import FrontendMetrics
from launch.serve.page.routes import page_routes
from launch.serve.parsing.parsers import Parsers
from trtrun.api.prompts import PromptReader
from trtrun.chats.chat_template import ChatTemplate, read_chat_template
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import hash_tokenizer_files, read_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """Parts of one server.

    Attributes:
        frontend: a request's way.
        parsers: of long requests; not started.
        routes: of the HTTP port.
        servicer: of the gRPC port.
        sampling: the model's, where requests do not say it.
        batches: runs batches; None where the server has no directory for them.
    """

    frontend: Frontend
    parsers: Parsers
    routes: tuple[Route, ...]
    servicer: KServeServicer
    sampling: Mapping[str, Any]
    batches: BatchRunner | None


def make_parts(spec: JobSpec, keys: Keys, engine: EngineClient) -> Parts:
    """The parts, which know each other.

    Raises:
        TrtrunError: the model's configuration, tokenizer or chat template cannot be read, or no parser has the name
            that the section has.
    """
    config, model = spec.config, spec.target
    section = config.server
    directory = config.tokenizer or config.target.model
    tokenizer_hash = hash_tokenizer_files(directory)  # before the reading: whatever comes between shows
    tokenizer = read_tokenizer(directory)
    name = model_name(config)
    if name in config.adapters:
        raise ConfigError(f"adapters.{name}: clients call the model itself so: give the adapter another name")
    admission = AdmissionControl(config.scheduler.max_batch_size, section.max_queue, section.max_streams)
    metrics = FrontendMetrics(name, config.draft_len)
    template = read_chat_template(directory) if tokenizer is not None else None
    _say_unseen_tools(section, template)
    facts = make_facts(spec, tokenizer, template, tokenizer_hash)
    # What the event loop parses itself is no chat: no template is compiled there.
    in_loop = RequestParser(msgspec.structs.replace(facts, template=None, tool_template=None), tokenizer)
    parsers = Parsers(facts, section.max_body_bytes, in_loop)
    frontend = Frontend(
        ServedModel(name, PromptReader(model, tokenizer), tokenizer, config.draft_len),
        admission,
        engine,
        metrics,
        parsers,
        RequestOptions(section.request_timeout_s, section.ping_seconds, section.cache_by_client),
        LogitsLimit(model.vocab_size, section.max_logits_bytes, section.max_total_logits_bytes),
    )
    engine.adapters = AdapterRegistry.of(config.adapters)
    kserve = KServeService(frontend, config.scheduler.max_batch_size, config.kv_cache.block_size)
    bodies = Bodies(section.max_body_bytes, section.max_total_body_bytes)
    chats = OpenAIApi(frontend, keys, bodies)
    batches = _make_batches(section, chats, frontend)
    routes = (
        *chats.routes(),
        *MessagesApi(chats, frontend, keys, bodies).routes(),
        *TokenApi(frontend, keys, bodies).routes(),
        *BatchApi(batches, keys, bodies, name, section.max_batch_file_bytes).routes(),
        *AdapterApi(AdapterDesk.of(frontend, section), keys, bodies).routes(),
        *KServeHttpApi(kserve, keys, bodies).routes(),
        *StatusBoard(frontend, spec, keys, template is not None).routes(),
        *page_routes(),
        metrics_route(frontend, keys),
    )
    return Parts(frontend, parsers, routes, KServeServicer(kserve, keys, bodies), facts.sampling_defaults, batches)


def _make_batches(section: ServerSection, chats: OpenAIApi, frontend: Frontend) -> BatchRunner | None:
    """What runs batches, and tells the metrics of their rows."""
    if section.batch_directory is None:
        return None
    store = BatchStore(prepare_directory(section.batch_directory), section.output_expires_after)
    answerer = RowAnswerer(RowTurns(frontend.admission), chats.answer_row, error_body, section.max_body_bytes)
    runner = BatchRunner(store, answerer)
    frontend.metrics.ask_batch_rows(lambda: (runner.num_running, runner.num_waiting))
    return runner


def _say_unseen_tools(section: ServerSection, template: ChatTemplate | None) -> None:
    """Say what becomes of tools that the model would not see."""
    if template is not None and not template.looks_at_tools:
        told = {"refuse": "refused (server.tools_unseen: ignore passes them over)", "ignore": "passed over"}
        logger.warning(
            "the chat template shows no tools to the model: those that chats offer are %s", told[section.tools_unseen]
        )
