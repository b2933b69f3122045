"""Files and batches by OpenAI's own client: uploaded, run, killed in the midst and gone on with, cancelled, by key."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import ONE_PROCESS, PATIENCE, Server, serving, wait_until, write_config

from launch.batch.complete import complete_rows
from launch.batch.input import InputRows
from launch.batch.journal import RowJournal
from trtrun import LLM

pytestmark = pytest.mark.timeout(400)
PROMPTS = [f"def number_{number}(" for number in range(16)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
FIRST = {"authorization": "Bearer first"}
OWN = ("id", "created", "metrics")
WRONG: dict[str, dict[str, Any]] = {
    "unknown field": {"prompt": "x", "temprature": 1},
    "streamed": {"prompt": "x", "stream": True},
}


def row(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def client_of(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, timeout=PATIENCE, max_retries=0)


def upload(client: openai.OpenAI, *rows: str) -> str:
    content = "\n".join(rows).encode()
    return client.files.create(file=("rows.jsonl", content), purpose="batch").id


def begin(client: openai.OpenAI, file_id: str, **others: Any) -> str:
    endpoint = others.pop("endpoint", "/v1/completions")
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **others).id


def wait_for(client: openai.OpenAI, batch_id: str, status: str) -> Any:
    def ask() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status == status else None

    return wait_until(ask, f"a batch that is {status}")


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def told_of(line: Any) -> tuple[int, Any]:
    """Status and body of a line, without what is of no two answers."""
    body = {name: value for name, value in line["response"]["body"].items() if name not in OWN}
    return line["response"]["status_code"], body


def rows_of_run(llm: LLM, folder: Path, rows: list[str]) -> dict[str, tuple[int, Any]]:
    """What `trtrun run` writes for the same rows."""
    prompts, output = folder / "prompts.jsonl", folder / "out.jsonl"
    prompts.write_text("\n".join(rows))
    inputs = InputRows((), prompts)
    journal = RowJournal(str(output), inputs, resume=False)
    complete_rows(llm, inputs, journal, lambda: None)
    journal.close()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return {line["custom_id"]: told_of(line) for line in lines}


def test_a_batch_goes_on_behind_a_kill_and_belongs_to_its_key(pair: Path, tmp_path: Path, llm: LLM) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    directory = tmp_path / "batches"
    config = write_config(
        tmp_path / "serve.yaml", pair, ONE_PROCESS, scheduler={"max_batch_size": 2}, kv_cache={"max_tokens": 4096},
        server={"api_key_file": str(tmp_path / "keys"), "batch_directory": str(directory)},
    )  # fmt: skip
    rows = [row(prompt, prompt=prompt, model="pair", **GREEDY) for prompt in PROMPTS]
    rows += [row(name, **body) for name, body in WRONG.items()]
    server = Server(config).wait_ready()
    try:
        client = client_of(server, "first")
        file_id = upload(client, *rows)
        expiry = {"anchor": "created_at", "seconds": 3600}
        batch_id = begin(client, file_id, metadata={"whose": "mine"}, output_expires_after=expiry)
        assert oct(directory.stat().st_mode & 0o777) == "0o700"

        def some_are_done() -> Any:
            batch = client.batches.retrieve(batch_id)
            return batch if batch.request_counts and batch.request_counts.completed >= 2 else None

        before = wait_until(some_are_done, "rows that are done")
        with pytest.raises(openai.BadRequestError, match="is the input of"):
            client.files.delete(file_id)
        # In the midst: others are in work.
        assert before.status == "in_progress" and before.request_counts.total == len(rows)
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait_ended()
    finally:
        server.end()
    (work,) = directory.glob("batches/*.output")
    done = [json.loads(line) for line in work.read_bytes().splitlines()[:-1]]
    assert 2 <= len(done) + 1 < len(PROMPTS)

    with serving(config) as server:
        client, other = client_of(server, "first"), client_of(server, "second")
        batch = wait_for(client, batch_id, "completed")
        assert batch.request_counts.completed == len(PROMPTS) and batch.request_counts.failed == len(WRONG)
        assert batch.metadata == {"whose": "mine"} and batch.in_progress_at <= batch.completed_at
        found = lines_of(client, batch.output_file_id)
        assert {line["custom_id"]: line["id"] for line in done}.items() <= {
            name: line["id"] for name, line in found.items()
        }.items()
        written = rows_of_run(llm, tmp_path, rows)
        assert {name: told_of(line) for name, line in found.items()} == {name: written[name] for name in PROMPTS}
        assert {status for status, _ in written.values()} == {200, 400}
        wrong = lines_of(client, batch.error_file_id)
        assert {name: told_of(line) for name, line in wrong.items()} == {name: written[name] for name in WRONG}
        assert "did you mean 'temperature'" in wrong["unknown field"]["response"]["body"]["error"]["message"]
        assert client.files.retrieve(batch.output_file_id).expires_at <= time.time() + 3600

        # Another key sees none of it, by whatever way.
        assert other.batches.list().data == [] and other.files.list().data == []
        for ask in (
            lambda: other.batches.retrieve(batch_id),
            lambda: other.batches.cancel(batch_id),
            lambda: other.files.content(file_id),
            lambda: other.files.delete(batch.output_file_id),
            lambda: begin(other, file_id),
            lambda: client.files.retrieve("..%2Flock"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()

        # Chats; and a request of somebody else is not kept waiting by a batch.
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "ignore_eos": True}
        chats = upload(other, *(row(f"{number}", "/v1/chat/completions", **chat) for number in range(8)))
        second = begin(other, chats, endpoint="/v1/chat/completions")
        wait_until(lambda: server.metrics().get('trtrun:batch_rows{state="running"}') or None, "a running batch")
        server.post("/v1/completions", {"prompt": "x", **GREEDY}, headers=FIRST).raise_for_status()
        assert other.batches.retrieve(second).status == "in_progress"
        assert other.batches.cancel(second).status in ("cancelling", "cancelled")
        cancelled = wait_for(other, second, "cancelled")
        left = lines_of(other, cancelled.error_file_id)
        assert {line["error"]["code"] for line in left.values()} == {"batch_cancelled"}
        assert len(left) + cancelled.request_counts.completed == 8

        # Responses: as trtrun run answers them.
        response = row("response", "/v1/responses", input="x", temperature=0, max_output_tokens=8)
        third = wait_for(client, begin(client, upload(client, response), endpoint="/v1/responses"), "completed")
        (answer,) = lines_of(client, third.output_file_id).values()
        status, body = rows_of_run(llm, tmp_path, [response])["response"]
        assert (answer["response"]["status_code"], status) == (200, 200)
        assert answer["response"]["body"]["output"][0]["content"] == body["output"][0]["content"]

        # A file with a wrong line is no batch.
        wrong_file = upload(client, rows[0], "{", rows[0], row("x", "/v1/chat/completions"))
        failed = wait_for(client, begin(client, wrong_file), "failed")
        assert [(error.line, error.code) for error in failed.errors.data] == [
            (2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "invalid_url"),
        ]  # fmt: skip
        assert [one.id for one in client.batches.list(limit=1)] == [failed.id, third.id, batch_id]
        assert client.files.delete(file_id).deleted

        # The end of the server does not wait for a batch.
        begin(client, upload(client, *rows))
        wait_until(lambda: server.metrics().get('trtrun:batch_rows{state="running"}') or None, "a running batch")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_ended() == 0
        assert not [line for line in server.lines if "in work have" in line]
