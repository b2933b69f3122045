"""Adapters of a server: named by requests of every protocol, loaded and dropped while it runs, and after a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import make_adapter
from servers import ONE_PROCESS, Server, serving, wait_until, write_config

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import load_config

pytestmark = pytest.mark.timeout(300)
PROMPT = "def main("
KEY = {"authorization": "Bearer secret"}
GREEDY = {"max_tokens": 16, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Path:
    """`a`, and below `more` an adapter `b`, one that no engine gets on with, and what lies elsewhere, by a link."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("a", "more/b", "more/stalls"):
        make_adapter(folder / name, pair / "target", rank=4, seed=len(name), strength=0.1)
    (folder / "more" / "outside").symlink_to(folder / "a")
    (folder / "keys").write_text("secret\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def config(folder: Path, pair: Path) -> Path:
    server = {"api_key_file": str(folder / "keys"), "adapter_directory": str(folder / "more")}
    return write_config(
        folder / "serve.yaml", pair, ONE_PROCESS, server=server, adapters={"a": str(folder / "a")},
        adapter_slots={"max_loaded": 2, "max_rank": 4}, scheduler={"max_batch_size": 8}, kv_cache={"max_tokens": 8192},
        launch={"adapter_seconds": 3},
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Server]:
    with serving(config, program=["tests/e2e/serve/programs/stalling_adapter.py"]) as server:
        yield server


@pytest.fixture(scope="module")
def expected(config: Path, folder: Path) -> dict[str | None, str]:
    """Texts by the Python API."""
    with LLM(config=load_config(config)) as llm:
        llm.load_adapter("b", folder / "more" / "b")
        names = (None, "a", "b")
        outputs = llm.generate([PROMPT] * 3, [SamplingParams(max_tokens=16, lora_name=name) for name in names])
    texts = {name: output.completions[0].text for name, output in zip(names, outputs, strict=True)}
    assert len(set(texts.values())) == 3
    return texts


def complete(server: Server, **values: Any) -> Any:
    return server.post("/v1/completions", {"prompt": PROMPT, **GREEDY, **values}, headers=KEY).json()


def models(server: Server) -> list[tuple[str, str | None]]:
    found = server.get("/v1/models", headers=KEY).json()["data"]
    return [(model["id"], model.get("parent")) for model in found]


def change(server: Server, way: str, headers: dict[str, str] = KEY, **values: Any) -> tuple[int, str]:
    answer = server.post(f"/v1/{way}_lora_adapter", values, headers=headers)
    return answer.status_code, answer.text


def in_work(server: Server) -> int:
    found: int = server.get("/status", headers=KEY, timeout=60).json()["queue"]["requests"]
    return found


def test_requests_of_all_protocols_name_an_adapter(server: Server, expected: dict[str | None, str]) -> None:
    assert models(server) == [("pair", None), ("a", "pair")]
    assert server.get("/v1/models/a", headers=KEY).json()["parent"] == "pair"
    for values, model, name in (({}, "pair", None), ({"model": "pair"}, "pair", None), ({"model": "a"}, "a", "a"),
                                ({"lora_name": "a"}, "a", "a")):  # fmt: skip
        answer = complete(server, **values)
        assert (answer["model"], answer["choices"][0]["text"]) == (model, expected[name])
    # Long enough to be read elsewhere, and so are chats.
    assert complete(server, model="a", user="x" * 5000)["choices"][0]["text"] == expected["a"]
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "a", "max_tokens": 2}
    assert server.post("/v1/chat/completions", chat, headers=KEY).json()["model"] == "a"
    for task, name in ((0, None), (1, "a")):
        values = {"text_input": PROMPT, "max_tokens": 16, "lora_task_id": task}
        answer = server.post("/v2/models/ensemble/generate", values, headers=KEY).json()
        assert answer["text_output"] == expected[name]
    assert complete(server, model="c")["error"]["code"] == "model_not_found"
    error = complete(server, lora_name="c")["error"]
    assert 'lora_name: there is no adapter "c"' in error["message"] and error["param"] == "lora_name"
    assert complete(server, model="a", lora_name="c")["error"]["param"] == "lora_name"
    values = {"text_input": PROMPT, "max_tokens": 16, "lora_task_id": 2}
    assert server.post("/v2/models/ensemble/generate", values, headers=KEY).status_code == 400


def test_who_may_load_what(server: Server) -> None:
    assert change(server, "load", {}, lora_name="b", lora_path="b")[0] == 401
    for path in ("../a", "/etc", ".", "outside", "nowhere", "a\0b", str(Path(server.url).absolute())):
        status, line = change(server, "load", lora_name="b", lora_path=path)
        assert status == 400 and "there is no directory" in line, path
    for name in ("a", "pair", "", " b", "b\n"):
        assert change(server, "load", lora_name=name, lora_path="b")[0] == 400
    assert change(server, "load", lora_name="b", lora_path="b", lora_pth="b")[0] == 400
    assert change(server, "unload", lora_name="b")[0] == 404
    assert change(server, "load", lora_name="b")[0] == 400
    assert models(server) == [("pair", None), ("a", "pair")]


def test_a_load_that_stands_still_is_named_and_ends_the_engine_and_no_request(
    server: Server, expected: dict[str | None, str]
) -> None:
    """Rounds go on beside it; the next engine does not try it again."""
    with ThreadPoolExecutor(2) as pool:
        stalled = pool.submit(change, server, "load", lora_name="z", lora_path="stalls")

        def complete_on() -> list[Any]:
            answers = []
            while not stalled.done():
                answers.append(complete(server, lora_name="a"))
            return answers

        completed = pool.submit(complete_on)

        def loading() -> dict[str, Any] | None:
            told = server.get("/status", headers=KEY, timeout=60).json()["phases"]
            return next((one for one in told if one["phase"] == "adapters"), None)

        assert wait_until(loading, "the load")["doing"] == "in loading adapter 'z'"
        assert "adapters" in [one["phase"] for one in server.get("/health").json()["phases"]]
        with suppress(httpx.ReadTimeout):  # a client that gives up while it waits: nothing of it is left
            server.post("/v1/load_lora_adapter", {"lora_name": "w", "lora_path": "b"}, headers=KEY, timeout=0.5)
        status, line = stalled.result()
    assert status == 500 and "the engine hangs: it stands still in loading adapter 'z' for longer than 3 s" in line
    texts = [answer["choices"][0]["text"] for answer in completed.result() if "choices" in answer]
    assert set(texts) == {expected["a"]}
    wait_until(lambda: server.get("/health").is_success or None, "an engine")
    assert server.wait_idle()["trtrun:engine_restarts_total"] == 1
    assert models(server) == [("pair", None), ("a", "pair")]


def test_an_adapter_is_loaded_survives_the_engine_and_is_dropped(
    server: Server, folder: Path, expected: dict[str | None, str]
) -> None:
    status, line = change(server, "load", lora_name="b", lora_path=str(folder / "more" / "b"))
    assert (status, line) == (200, "Success: LoRA adapter 'b' added successfully.")
    assert models(server)[2:] == [("b", "pair")]
    assert complete(server, model="b")["choices"][0]["text"] == expected["b"]
    status, line = change(server, "load", lora_name="c", lora_path="b")
    assert status == 400 and "no slot is free" in line
    engine = server.engine()
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        answers = {name: pool.submit(complete, server, lora_name=name) for name in expected}
        wait_until(lambda: in_work(server) == len(answers) or None, "requests in work")
        os.kill(engine, signal.SIGKILL)
    for name, answer in answers.items():
        assert answer.result()["choices"][0]["text"] == expected[name]
    assert change(server, "unload", lora_name="b")[0] == 200
    assert complete(server, model="b")["error"]["code"] == "model_not_found"
    assert change(server, "unload", lora_name="a")[0] == 200
    assert models(server) == [("pair", None)]
    assert change(server, "load", lora_name="a", lora_path="b")[0] == 200
    assert complete(server, model="a")["choices"][0]["text"] == expected["b"]
