"""GET /status beside an engine that answers, is in a long round, and is lost."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_messages import LIMITS, run
from quantized_checkpoints import make_pair
from starlette.requests import Request

from launch.serve.admission.control import AdmissionControl
from launch.serve.application import status as board
from launch.serve.application.status import StatusBoard
from launch.serve.engine.messages import Ready, Standing, Status
from launch.serve.frontend.frontend import Frontend
from launch.serve.http.requests import Keys
from launch.serve.metrics import FrontendMetrics
from trtrun.configuration.config import make_config
from trtrun.start.job_spec import JobSpec

READY = Ready(version="1", config_hash="h", limits=asdict(LIMITS))
STATUS = Status(num_running=3, num_waiting=2, num_free_blocks=8, num_blocks=32, totals={})


class Engine:
    """Says what it is given to say."""

    def __init__(self) -> None:
        self.ready: Ready | None = READY
        self.status: Status | None = STATUS
        self.num_asked = 0

    def standings(self) -> list[Standing]:
        return [
            Standing(rank=0, phase="idle", doing="idle after round 7", seconds=2.0, still_seconds=0.5),
            Standing(rank=1, phase="adapters", doing="in loading adapter 'x'", seconds=3.0, still_seconds=1.0),
        ]

    async def ask_status(self) -> Status | None:
        self.num_asked += 1
        await asyncio.sleep(0)
        return self.status


def make_board(engine: Engine, draft: str = "draft", **sections: Any) -> StatusBoard:
    config = make_config(
        {
            "target": {"model": "asset:target", "devices": ["cpu:1"]},
            "draft": {"model": f"asset:{draft}", "devices": ["cpu:0"]},
            **sections,
        }
    )
    frontend = SimpleNamespace(
        client=engine,
        admission=AdmissionControl(4, 8, 8, is_open=True),
        metrics=FrontendMetrics("pair", 4),
        model_name="pair",
        draft_len=4,
    )
    return StatusBoard(cast(Frontend, frontend), JobSpec(config), Keys(()), False)


async def ask(asked: StatusBoard) -> dict[str, Any]:
    answer = await asked.status(Request({"type": "http", "headers": []}))
    told: dict[str, Any] = json.loads(bytes(answer.body))
    return told


def test_a_long_round_leaves_the_numbers_as_they_were_and_a_lost_engine_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board, "FRESH_SECONDS", -1.0)  # ask each time

    async def check() -> None:
        engine = Engine()
        asked = make_board(engine)
        first = await ask(asked)
        assert first["phases"][1] == {
            "rank": 1, "phase": "adapters", "seconds": 3.0, "doing": "in loading adapter 'x'", "still_seconds": 1.0,
        }  # fmt: skip
        assert first["queue"]["running"] == 3 and first["kv_cache"]["usage"] == 0.75
        assert {rank["state"] for rank in first["ranks"]} == {"up"}
        engine.status = None
        assert await ask(asked) == first
        engine.ready = None
        lost = await ask(asked)
        assert lost["queue"]["running"] is None and lost["kv_cache"]["usage"] is None
        assert {rank["state"] for rank in lost["ranks"]} == {"starting"}
        engine.ready = Ready(version="1", config_hash="h", limits=asdict(LIMITS))  # the next one
        assert (await ask(asked))["queue"]["running"] is None

    run(check())


def test_a_head_with_a_device_of_its_own_is_told_on_its_rank() -> None:
    async def check() -> None:
        told = await ask(make_board(Engine(), "eagle3", speculation={"method": "eagle3"}))
        assert [(rank["roles"], rank["device"]) for rank in told["ranks"]] == [
            (["orchestrator"], None),
            (["draft"], "cpu:0"),
            (["target"], "cpu:1"),
        ]
        assert told["models"]["draft"]["name"] == "eagle3" and told["speculation"]["drafts_ahead"]

    run(check())


def test_the_engine_is_asked_once_for_all_who_look() -> None:
    async def check() -> None:
        engine = Engine()
        asked = make_board(engine)
        await asyncio.gather(*(ask(asked) for _ in range(20)))
        assert engine.num_asked == 1

    run(check())


def test_a_quantized_checkpoint_is_told_as_one(tmp_path: Path) -> None:
    quantized, _ = make_pair(tmp_path, "awq")
    config = make_config({"target": {"model": str(quantized), "devices": ["cpu:0"]}, "speculation": {"method": "none"}})
    assert board._models(JobSpec(config))["target"]["quantization"] == "awq"
