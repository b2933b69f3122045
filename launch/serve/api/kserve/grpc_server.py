"""The server of the gRPC port, with the frontend's limits, certificate and end.

It does not know calls (`grpc_servicer`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2
from typing_extensions import override

from launch.serve.admission.limits import PARSED_IN_LOOP_BYTES
from launch.serve.api.kserve.grpc_servicer import KServeServicer
from launch.serve.http.connections import HEAD_SECONDS
from launch.serve.http.unix_sockets import KEY, clear, for_this_user
from launch.serve.metrics import FrontendMetrics
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError

MESSAGE_OVERHEAD = 1 << 12
"""Bytes of a message beside what counts as its body: names, shapes, parameters."""

MOST_MESSAGE_BYTES = 1 << 22
"""The most bytes of a message. gRPC's library copies one in the event loop's thread, at a stretch: 16 MiB take it 50
ms."""

END_SECONDS = 0.5
"""Seconds for calls that are still there when the server ends, such as streams without requests."""

PING_SECONDS = 30.0
"""Seconds without a word after which a client with a call at work is asked whether it is there."""

ANSWER_SECONDS = 20.0
"""How long it may take to say so. Hosts that vanish do not close their connections, and calls are counted."""

MOST_CALLS = 256
"""The most calls of one connection; clients keep more back until some are done. What each says of itself takes half a
megabyte."""

_LIBRARY_LOGGER = logging.getLogger("grpc._cython.cygrpc")

IDLE_SECONDS = 300.0
"""How long a connection without a call is kept. Clients connect again by themselves."""


def most_message_bytes(section: ServerSection) -> int:
    """The longest message that is taken: `server.max_body_bytes`, or as much as may be copied at a stretch."""
    return min(section.max_body_bytes, MOST_MESSAGE_BYTES) + MESSAGE_OVERHEAD


_GONE = ("ExecuteBatchError raised in core", "Failed sending error status")
"""How lines of the library's log begin that say no more than that a client went away before its call was over."""


class _WithoutGoneClients(logging.Filter):
    """Keeps these lines out of the log: each client could write as many of them as it liked, with a traceback each."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        super().__init__()
        self._metrics = metrics

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        is_gone = record.getMessage().startswith(_GONE)
        self._metrics.totals.num_calls_cut += is_gone
        return not is_gone


class GrpcServer:
    """The gRPC port or socket, from its making until `finish`.

    Attributes:
        port: that it listens on; 0 where it is a socket.
    """

    def __init__(
        self, servicer: KServeServicer, section: ServerSection, metrics: FrontendMetrics, path: Path | None = None
    ) -> None:
        """Listen; take calls only once it runs.

        Args:
            servicer: answers calls.
            section: port, certificate and limits.
            metrics: count what is cut.
            path: of a socket to listen on in place of the port.

        Raises:
            ConfigError: it cannot listen.
        """
        self._section = section
        self._log_filter = _WithoutGoneClients(metrics)
        _LIBRARY_LOGGER.addFilter(self._log_filter)
        self._finishing = asyncio.Event()
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", most_message_bytes(section)),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a port that is taken is an error
                ("grpc.keepalive_time_ms", round(PING_SECONDS * 1000)),
                ("grpc.http2.ping_timeout_ms", round(ANSWER_SECONDS * 1000)),
                ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
                ("grpc.server_handshake_timeout_ms", round(HEAD_SECONDS * 1000)),
                ("grpc.http2.settings_timeout", round(HEAD_SECONDS * 1000)),
                ("grpc.max_allowed_incoming_connections", section.max_connections),
                ("grpc.max_concurrent_streams", MOST_CALLS),
            ),
            maximum_concurrent_rpcs=section.max_connections,  # a connection may have many calls
        )
        self._server.add_generic_rpc_handlers((_handlers(servicer),))
        self.port = self._listen() if path is None else 0
        if path is not None:
            self._listen_at(path)

    def _listen_at(self, path: Path) -> None:
        # The library removes the file that it has made, at its start and at its end, whosever that is by then.
        made = path.with_suffix(".new")
        clear(path)
        try:
            with for_this_user():
                self._server.add_insecure_port(f"unix:{quote(str(made))}")
            made.rename(path)
        except (OSError, RuntimeError):
            raise ConfigError(f"{KEY}: cannot listen at {path}") from None

    def _listen(self) -> int:
        section = self._section
        host = f"[{section.host}]" if ":" in section.host else section.host
        address = f"{host}:{section.grpc_port}"
        try:
            if section.tls_cert is None or section.tls_key is None:
                port = self._server.add_insecure_port(address)
            else:
                pair = (Path(section.tls_key).read_bytes(), Path(section.tls_cert).read_bytes())
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(
                f"server.host, server.grpc_port: cannot listen on {section.host} port {section.grpc_port}: it is "
                "taken, or not of this host; 0 takes a free one"
            )
        return int(port)

    async def run_here(self) -> None:
        """Answer until `finish`."""
        await self._server.start()
        await self._finishing.wait()
        await self._server.stop(END_SECONDS)
        _LIBRARY_LOGGER.removeFilter(self._log_filter)

    def finish(self) -> None:
        """Take no more calls, and end once those in work have their answers."""
        self._finishing.set()

    def cut(self) -> None:
        """End now: the calls that are left have had their time."""
        self._finishing.set()


def _handlers(servicer: KServeServicer) -> Any:
    """Every call of the protocol's service, handled by the servicer's method of that name."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    handlers = {}
    for method in service.methods:
        # A call with one message is taken as a stream of it, else nothing could be said before it is there.
        make = (
            grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.stream_unary_rpc_method_handler
        )
        # Requests for inference may be long, and their messages are read where that holds up nothing.
        is_bytes = method.input_type.name == "ModelInferRequest"
        handlers[method.name] = make(
            servicer.handler(method.name),
            request_deserializer=None if is_bytes else _reader(GetMessageClass(method.input_type)),
            response_serializer=_write,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _reader(kind: Any) -> Callable[[bytes], Any]:
    """Reads messages of a kind; None are bytes that are no such message, or longer than any has a use for, which the
    servicer refuses."""

    def read(raw: bytes) -> Any:
        if len(raw) > PARSED_IN_LOOP_BYTES:
            return None
        try:
            return kind.FromString(raw)
        except DecodeError:
            return None

    return read


def _write(message: Any) -> bytes:
    """A message as bytes, unless it is that already."""
    raw: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return raw
