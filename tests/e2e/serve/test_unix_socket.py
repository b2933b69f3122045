"""A server on a socket that is a file: every protocol's real client is answered there, and no port is open."""

from __future__ import annotations

import signal
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import openai
import tritonclient.grpc
from forked_commands import running_processes
from servers import ONE_PROCESS, PATIENCE, Server, write_config

from launch.chat.client import ChatClient
from trtrun import LLM, SamplingParams


def processes_below(process: int) -> list[int]:
    """A process and all that it has started."""
    children, _ = running_processes()
    found = [process]
    for above in found:
        found += children.get(above, [])
    return found


def inodes(kind: str) -> set[str]:
    """Sockets of a kind that somebody may connect to."""
    rows = [line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A" or kind.startswith("udp")}


def sockets_of(process: int) -> set[str]:
    links = [str(file.readlink()) for file in Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def test_all_clients_are_answered_and_nobody_else(pair: Path, tmp_path: Path, llm: LLM) -> None:
    config = write_config(tmp_path / "run.yaml", pair, ONE_PROCESS, kv_cache={"max_tokens": 4096})
    server = Server(config, "--uds", "$PLACE/a b.sock", environment={"PLACE": str(tmp_path)})
    try:
        server.wait_ready()
        path = unquote(urlsplit(server.url).path)
        assert path == str(tmp_path / "a b.sock") and server.grpc_address.endswith("/a%20b.sock.grpc")
        assert [Path(name).stat().st_mode & 0o777 for name in (path, f"{path}.grpc")] == [0o600, 0o600]

        open_to_all = set().union(*(inodes(kind) for kind in ("tcp", "tcp6", "udp", "udp6")))
        below = processes_below(server.process.pid)
        assert len(below) > 1 and not open_to_all & set().union(*map(sockets_of, below))

        text = llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=8))[0].completions[0].text
        transport = httpx.HTTPTransport(uds=path)
        with (
            httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE) as http,
            openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http) as client,
        ):
            answer = client.completions.create(model="pair", prompt="def main(", temperature=0, max_tokens=8)
            stream = client.completions.create(
                model="pair", prompt="def main(", temperature=0, max_tokens=8, stream=True
            )
            assert answer.choices[0].text == "".join(chunk.choices[0].text for chunk in stream) == text
            assert 'generation_tokens_total{model_name="pair"} 16.0' in http.get("/metrics").text
        with tritonclient.grpc.InferenceServerClient(server.grpc_address) as grpc:
            assert grpc.is_model_ready("ensemble")
        chat = ChatClient(server.url)
        chat.look()
        pieces = chat.answer([{"role": "user", "content": "x"}], {"temperature": 0, "max_tokens": 4})
        assert chat.model == "pair" and sum(len(piece.origins) for piece in pieces) == 4

        other = Server(config, "--uds", path)
        assert other.wait_ended() == 2 and other.lines == [
            f"trtrun: server.uds: a server answers at {path}: end it, or name another path"
        ]
        server.process.send_signal(signal.SIGHUP)  # its terminal is closed
        assert server.wait_ended() == 0 and [file.name for file in tmp_path.iterdir()] == ["run.yaml"]
    finally:
        server.end()
