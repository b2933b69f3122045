"""The section of the YAML file that says how texts are served: addresses, keys, limits, restarts.

It knows names, types and ranges. What they lead to is `launch.serve`'s business.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from trtrun.launch_config import FilePath, Line, Number, Seconds, Section

Port = Annotated[int, Number, Field(ge=0, le=65535)]


class ServerSection(Section):
    """What `trtrun serve` listens on, and what it lets in.

    Attributes:
        host: address that is listened on; a loopback address is reachable from this host alone.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        model_name: what clients call the model; None takes the name of the target's directory.
        api_key_file: one key a line; requests of the APIs need one of them.
        tls_cert, tls_key: PEM files; both or none.
        max_queue: completions that may wait for a row; requests beyond are answered with 429.
        max_streams: requests that may be in work at once, waiting ones among them; the same.
        max_connections: that may be open at once on the HTTP port; a request on one beyond is answered with 503. Over
            gRPC so many calls may be open.
        max_body_bytes: of one request; larger ones are answered with 413.
        max_total_body_bytes: of all requests whose bodies are being read; one beyond is answered with 429.
        request_timeout_s: from a request's arrival to its end.
        exclude_input_in_output: whether whole outputs of Triton's models begin behind the prompt, where a request does
            not say; None where that is so of texts, and not of tokens.
        max_restarts: how often the engine may be started again within `restart_window_s`, before the server ends.
        restart_window_s: seconds over which restarts are counted.
    """

    host: Line = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    model_name: Line | None = None
    api_key_file: FilePath | None = None
    tls_cert: FilePath | None = None
    tls_key: FilePath | None = None
    max_queue: Annotated[int, Number, Field(ge=0, le=1_000_000)] = 256
    max_streams: Annotated[int, Number, Field(ge=1, le=1_000_000)] = 512
    max_connections: Annotated[int, Number, Field(ge=1, le=1_000_000)] = 1024
    max_body_bytes: Annotated[int, Number, Field(ge=1024, le=2**27)] = 2**24
    max_total_body_bytes: Annotated[int, Number, Field(ge=1024, le=2**40)] = 2**28
    request_timeout_s: Seconds = 600.0
    exclude_input_in_output: bool | None = None
    max_restarts: Annotated[int, Number, Field(ge=0, le=1000)] = 3
    restart_window_s: Seconds = 600.0

    @model_validator(mode="after")
    def _check_tls(self) -> ServerSection:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ValueError(f"{missing}: missing: TLS needs server.tls_cert and server.tls_key, both")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> ServerSection:
        taken: dict[int, str] = {}
        for name in ("http_port", "grpc_port", "metrics_port"):
            port = getattr(self, name)
            if port and port in taken:
                raise ValueError(f"{name}: is {port}, as {taken[port]} is: give each a port of its own, or 0")
            taken[port] = name
        return self

    @model_validator(mode="after")
    def _check_bodies(self) -> ServerSection:
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_total_body_bytes: must be at least server.max_body_bytes ({self.max_body_bytes}), not "
                f"{self.max_total_body_bytes}"
            )
        return self
