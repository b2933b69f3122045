"""Sections of the YAML file about processes: how ranks are launched, and what `trtrun serve` listens on and allows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trtrun.configuration.device_lists import check_host
from trtrun.errors import shorten, shorten_path


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=())

    @classmethod
    def known_keys(cls) -> list[str]:
        """Keys that may stand in the section, for messages."""
        return list(cls.model_fields)


def _refuse_bool(value: object) -> object:
    """YAML's true and false are no numbers, though Python's are."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


Number = BeforeValidator(_refuse_bool)
"""A number that is not written as true or false."""


def _read_path(value: object) -> object:
    """The path of a file, `~` in it as a shell has it. Refused are what no file system takes, and a text without a
    name, which would mean the folder of the file."""
    if isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError(f"must be the path of a file or directory, not {shorten(value)}")
        try:
            os.fsencode(value)
        except UnicodeEncodeError:
            raise ValueError(f"{shorten(value)} holds half a character, which no path can") from None
        try:
            return str(Path(value).expanduser()) if value.startswith("~") else value
        except RuntimeError:
            line = f"{shorten_path(Path(value))}: there is no such user, or nobody knows its home"
            raise ValueError(line) from None
    return value


FilePath = Annotated[Path, BeforeValidator(_read_path)]


def _check_line(value: str) -> str:
    """One line of printable text: such values become words of command lines and lines of scripts."""
    if not value or not value.isprintable():
        raise ValueError(f"{shorten(value)} must be one line of text")
    return value


def _check_environment(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{shorten(name)} is no name of an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a zero byte, which no environment can")
        try:
            os.fsencode(value)
        except UnicodeEncodeError:
            raise ValueError(f"the value of {name} holds half a character, which no environment can") from None
    return values


def _environment_text(values: object) -> object:
    """Numbers become text. YAML's true and false do not: what a program wants to read instead is not known."""
    if not isinstance(values, dict):
        raise ValueError("must be a mapping, such as {NCCL_IB_HCA: mlx5}")
    return {
        name: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in values.items()
    }


def _refuse_text(value: object) -> object:
    if isinstance(value, str):
        raise ValueError(
            f'must be a list with each word by itself, such as ["-F", "cluster.conf"], not {shorten(value)}'
        )
    return value


Line = Annotated[str, AfterValidator(_check_line)]
Lines = Annotated[tuple[Line, ...], BeforeValidator(_refuse_text)]
Host = Annotated[str, AfterValidator(check_host)]
Seconds = Annotated[float, Number, Field(gt=0, le=86400)]
Environment = Annotated[dict[str, str], BeforeValidator(_environment_text), AfterValidator(_check_environment)]


class LaunchSection(Section):
    """How the ranks are started, watched and ended.

    Attributes:
        mpi: whose flags mpirun gets: `openmpi` is Open MPI 5, `openmpi4` Open MPI 4; `auto` asks the mpi4py in use.
        mpirun: the mpirun to call. Left out: the one that belongs to the MPI library.
        mpirun_arguments: further arguments of mpirun, behind trtrun's own.
        ssh_arguments: arguments of ssh where hosts are reached by it, such as `["-F", "cluster.conf"]`.
        environment: variables for every rank. Values reach the ranks through mpirun's environment, never through a
            command line that others can read.
        orchestrator_host: the host of rank 0, one that has a device. Left out: the host where the job is started, where
            it has a device, else the target's first.
        start_seconds: from the first rank's start to the first round: meeting, weights, warm-up.
        check_seconds: for `trtrun check`, and for the short check before every run.
        heartbeat_seconds: a rank that is silent for longer, or a round in which no rank gets on for longer, ends the
            job. Steps of a training run have ten times as long to get on.
        adapter_seconds: a rank that loads an adapter, and of which no part comes for longer, ends the job.
        on_draft_loss: whether the job goes on without drafts when it loses a draft rank, where the draft has devices of
            its own and MPI can do that, or ends.
        drain_seconds: how long rows in flight may go on after a signal to end.
        log_directory: one log file for each rank goes there, on the rank's host.
        scheduler: which batch system `trtrun submit` goes to; `auto` is the one that has a section, or whose programs
            are on PATH, Slurm first.
        slurm, pbs: for batch jobs. The commands of `trtrun` read them; the Python API carries them unread.
    """

    mpi: Literal["auto", "openmpi", "openmpi4", "mpich"] = "auto"
    mpirun: FilePath | None = None
    mpirun_arguments: Lines = ()
    ssh_arguments: Lines = ()
    environment: Environment = Field(default_factory=dict)
    orchestrator_host: Host | None = None
    start_seconds: Seconds = 600.0
    check_seconds: Seconds = 60.0
    heartbeat_seconds: Seconds = 60.0
    adapter_seconds: Seconds = 300.0
    on_draft_loss: Literal["continue", "end"] = "continue"
    drain_seconds: Seconds = 30.0
    log_directory: FilePath | None = None
    scheduler: Literal["auto", "slurm", "pbs"] = "auto"
    slurm: dict[str, Any] = Field(default_factory=dict)
    pbs: dict[str, Any] = Field(default_factory=dict)


Port = Annotated[int, Number, Field(ge=0, le=65535)]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


def _check_origin(value: str) -> str:
    """What browsers say that a page comes from: without a path, not even a slash."""
    if value != "*" and not _ORIGIN.fullmatch(value):
        raise ValueError(
            f"{shorten(value)} must be an origin, such as https://chat.example or http://localhost:3000, or *"
        )
    return value


Origin = Annotated[str, AfterValidator(_check_origin)]


class ServerSection(Section):
    """What `trtrun serve` listens on, and what it lets in.

    Attributes:
        host: address that is listened on. A loopback address is reachable from this host alone; one that other hosts
            reach, without keys, is told in one line of warning.
        uds: file of a Unix domain socket, in place of host and ports, that this user alone can open; auto chooses one.
            At most 102 bytes, on a disk of the host's own. `~` and variables, such as `$TMPDIR`, may stand in it.
        http_port: of the APIs and the page; 0 takes a free one.
        grpc_port: of Triton's protocol over gRPC; 0 takes a free one.
        metrics_port: of the metrics for Prometheus; 0 takes a free one.
        name_file: file that says where the server listens, as JSON; a server that is started with the same one, on this
            host or on another that sees it, takes it over and goes on with the requests of the one before.
        model_name: what clients call the model. Left out: the name of the target's directory, or `org/name`.
        api_key_file: one key a line, of printable ASCII characters; requests of the APIs need one of them.
        adapter_directory: directory below which adapters may be loaded from while serving (`/v1/load_lora_adapter`),
            with a key or over `uds`; the same on every host. Left out: none are.
        batch_directory: directory of this server's own for `/v1/files` and `/v1/batches`, which no other user may look
            into; it is made where there is none. Left out: there are neither.
        tls_cert, tls_key: PEM files for all ports, the key without a passphrase; both or none.
        max_queue: completions that may wait for a row, beside `scheduler.max_batch_size` that have one; requests beyond
            are answered with 429.
        max_streams: requests that may be in work at once, waiting ones among them; more are answered with 429.
        max_connections: open at once on the HTTP port; where all have requests, one on a connection beyond is answered
            with 503. Over gRPC so many connections and calls may be open, 256 calls on one connection.
        max_body_bytes: of one request; larger ones are answered with 413. A body has 60 s to arrive. A message over
            gRPC has at most 4194304 bytes.
        max_total_body_bytes: of all bodies longer than 65536 bytes, while they are read and until their requests are in
            work; one beyond is answered with 429.
        max_batch_file_bytes: of one file of `/v1/files`; larger ones are answered with 413.
        output_expires_after: seconds for which the files of a batch's answers are kept, where the batch does not say it
            in a field of this name, and at least for which the batch is told once it is over; null: for ever.
        max_logits_bytes: of the logits that one request may ask for (`return_context_logits`,
            `return_generation_logits`), 4 for each token of the vocabulary at each position; more is answered with 400.
            Beyond the default an answer over gRPC may hold up all streams for longer than 50 ms.
        max_total_logits_bytes: of the logits that all requests in work ask for, each until its client has read its
            answer; one beyond is answered with 429.
        request_timeout_s: from the arrival of a request's body to its end; then 504, or an error in the stream.
        exclude_input_in_output: whether whole outputs of Triton's models begin behind the prompt, where a request does
            not say. Left out: true for the models of text, false for those of tokens without
            `decoder_input_ids`.
        cache_by_client: whether clients share nothing that is kept of their requests. Blocks of equal prompts are
            shared within a client's requests alone, as if each had a `cache_salt`, and past answers and the table of
            token_recycling keep nothing. A client is its key, or without keys its address.
        ping_seconds: after so long without an event a stream has a ping, for proxies that end connections on which
            nothing moves. Left out: never.
        allowed_origins: of web pages whose scripts may ask in a browser, such as `https://chat.example`. `*` for all,
            which lets every page that is open on this host ask a server without keys.
        tool_parser: how the model writes calls of tools: hermes, qwen3_coder, glm45, glm47, minimax_m2, kimi_k2,
            llama3_json, llama_nemotron_json, mistral, deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, gemma4,
            gpt-oss, json (a list of calls), or none. Left out: as its chat template shows.
        reasoning_parser: how it writes what it thinks: qwen3, deepseek_r1, mistral, gemma4, gpt-oss, or none. Left out:
            as its chat template shows.
        generation_config: auto or none: whether sampling that a request does not say is that of the model's
            generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens), as in vLLM;
            also of `trtrun run`, `trtrun chat` and the Python API.
        tools_unseen: what becomes of a chat's tools that its template does not show to the model: refuse, or ignore.
        max_restarts: how often the engine may be started again within `restart_window_s`, before the server ends.
        restart_window_s: seconds over which restarts are counted.
        standby: whether the next engine's processes wait, with all that needs neither weights nor a device done, so
            that requests go on some seconds sooner when an engine ends. They hold host memory, some 0.3 GB a rank on
            CPUs and more with CUDA's libraries, and wake twenty times a second.
    """

    host: Line = "127.0.0.1"
    uds: FilePath | None = None
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    name_file: FilePath | None = None
    model_name: Line | None = None
    api_key_file: FilePath | None = None
    adapter_directory: FilePath | None = None
    batch_directory: FilePath | None = None
    tls_cert: FilePath | None = None
    tls_key: FilePath | None = None
    max_queue: Annotated[int, Number, Field(ge=0, le=1_000_000)] = 256
    max_streams: Annotated[int, Number, Field(ge=1, le=1_000_000)] = 512
    max_connections: Annotated[int, Number, Field(ge=1, le=1_000_000)] = 1024
    max_body_bytes: Annotated[int, Number, Field(ge=1024, le=2**27)] = 2**24
    max_total_body_bytes: Annotated[int, Number, Field(ge=1024, le=2**40)] = 2**28
    max_batch_file_bytes: Annotated[int, Number, Field(ge=1024, le=2**40)] = 200_000_000
    output_expires_after: Annotated[int, Number, Field(ge=3600, le=2**31)] | None = 30 * 86400
    max_logits_bytes: Annotated[int, Number, Field(ge=0, le=2**27)] = 2**25
    max_total_logits_bytes: Annotated[int, Number, Field(ge=0, le=2**40)] = 2**29
    request_timeout_s: Seconds = 600.0
    exclude_input_in_output: bool | None = None
    cache_by_client: bool = False
    ping_seconds: Seconds | None = None
    allowed_origins: tuple[Origin, ...] = ()
    tool_parser: Line | None = None
    reasoning_parser: Line | None = None
    generation_config: Literal["auto", "none"] = "auto"
    tools_unseen: Literal["refuse", "ignore"] = "refuse"
    max_restarts: Annotated[int, Number, Field(ge=0, le=1000)] = 3
    restart_window_s: Seconds = 600.0
    standby: bool = False

    @model_validator(mode="after")
    def _check_tls(self) -> ServerSection:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ValueError(f"{missing}: missing: TLS needs server.tls_cert and server.tls_key, both")
        if self.uds is not None and self.tls_cert is not None:
            raise ValueError("tls_cert: is of ports; what server.uds names leaves no host: leave one of both out")
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> ServerSection:
        if self.adapter_directory is not None and self.api_key_file is None and self.uds is None:
            raise ValueError("api_key_file: missing: whoever may load adapters (server.adapter_directory) needs a key")
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
    def _check_totals(self) -> ServerSection:
        for name in ("body_bytes", "logits_bytes"):
            most, together = getattr(self, f"max_{name}"), getattr(self, f"max_total_{name}")
            if together < most:
                raise ValueError(f"max_total_{name}: must be at least server.max_{name} ({most}), not {together}")
        return self
