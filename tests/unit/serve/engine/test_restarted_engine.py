"""An engine that is started again: with the room of the first, the same files, and whose ends are counted. Processes
are played: what they say over the socket is what engines say, and they compute nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_messages import LIMITS, run
from played_engines import KILLED, Play, Played, Process, dying, read, serve

from launch.exit_codes import ExitCode, FailedError
from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.engine import keeper as engine_keeper
from launch.serve.engine.messages import Ended, Ready
from launch.serve.engine.restarted_engine import describe_return
from trtrun import __version__
from trtrun.configuration.model_paths import ASSETS

ROOM = (LIMITS.num_blocks - 1) * LIMITS.block_size


Check = Callable[[Played], Coroutine[Any, Any, None]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The shipped target, in files of its own."""
    for file in (ASSETS / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def with_engines(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    """Have processes played, and check what comes of them. What `check` raises ends the engine."""

    def play(
        plays: Sequence[Play], check: Callable[[Played], Coroutine[Any, Any, None]], max_restarts: int = 3
    ) -> Played:
        played = Played(model, plays, max_restarts)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", played.start)
        monkeypatch.setattr(engine_keeper, "RETRY_SECONDS", 0.25)

        async def work() -> None:
            try:
                await check(played)
            finally:
                await played.engine.close()

        run(work())
        return played

    return play


def test_later_engines_have_the_room_of_the_first(with_engines: Callable[..., Played]) -> None:
    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        assert await read(played.ask()) == [0, 1, 7]
        assert [process.room for process in played.processes] == [None, ROOM]
        assert played.processes[1].heard[0].generated == {0: (0, 1), 1: (0, 1)}
        await played.engine.close()
        assert await keeping == ExitCode.DONE

    with_engines([dying(2), serve], check)


def test_an_engine_that_is_up_again_says_what_the_seconds_went_to(with_engines: Callable[..., Played]) -> None:
    async def refuse(process: Process) -> int:
        return ExitCode.REFUSED

    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        assert await read(played.ask()) == [0, 7]
        (line,) = played.news  # none of the first start
        after, _, phases = line.removeprefix("the engine is up again after ").partition(" s: ")
        assert float(after) > 0.4, "since the end of the last one that was up, with the waits behind two that were not"
        assert phases.startswith("until its ranks ran ")
        await played.engine.close()
        assert await keeping == ExitCode.DONE

    with_engines([dying(1), refuse, refuse, serve], check)


def test_seconds_of_a_return_have_names() -> None:
    phases = {"weights": 3.0, "all kernels once, graphs": 1.5}
    ready = Ready(version="1", config_hash="h", limits={}, start_seconds=7.5, start_phases=phases)
    told = "until its ranks ran 5.5; imports and meeting 3.0; weights 3.0; all kernels once, graphs 1.5"
    assert describe_return(13.0, ready) == f"the engine is up again after 13.0 s: {told}"


def test_an_engine_that_finds_no_room_is_started_again_later_and_at_last_ends_the_server(
    with_engines: Callable[..., Played],
) -> None:
    async def refuse(process: Process) -> int:
        return ExitCode.REFUSED  # it has said why: what the first one had does not fit

    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        assert await read(played.ask()) == [0, 7]
        assert len(played.processes) == 3 and played.processes[2].room == ROOM
        assert "status 2; it is started again in 0.25 s (2 of 3" in played.lines[1]
        inbox = played.ask()
        with pytest.raises(FailedError, match="ended with status 2, and was started again 3 of 3"):
            await keeping
        with pytest.raises(Refusal, match="the server ends"):
            await inbox.take()

    async def serve_once(process: Process) -> int:
        await process.come_up()
        request = await process.hear()
        assert request is not None
        await process.tell(request, 7, "length")
        await process.hear()
        return KILLED

    with_engines([dying(1), refuse, serve_once, refuse], check)


def test_who_closes_while_an_engine_has_to_wait_does_not_wait(
    with_engines: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(process: Process) -> int:
        return ExitCode.REFUSED

    async def check(played: Played) -> None:
        monkeypatch.setattr(engine_keeper, "RETRY_SECONDS", 1e6)
        keeping = asyncio.create_task(played.keep())
        played.ask()
        while len(played.lines) < 2:
            await asyncio.sleep(0)
        await played.engine.close()
        await keeping
        assert len(played.processes) == 2

    with_engines([dying(), refuse], check)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_blocks": 20}, r"started again with other limits \(num_blocks\): start the server again"),
        (
            {"files": {}},
            "the files of the target's model and the tokenizer and the models of rank 1",
        ),
        ({"config_hash": "h"}, "the configuration has changed while it was served"),
        ({"version": "0"}, f"trtrun was {__version__} when the server started, and the engine is 0"),
    ],
)
def test_another_engine_ends_the_server_and_gets_no_request(
    with_engines: Callable[..., Played], changes: dict[str, Any], line: str
) -> None:
    async def change(process: Process) -> int:
        await process.come_up(**changes)
        assert await process.hear() is None
        await asyncio.Event().wait()
        return 0

    async def check(played: Played) -> None:
        played.ask()
        with pytest.raises(FailedError, match=line):
            await played.keep()
        assert not played.processes[1].heard

    with_engines([dying(), change], check)


@pytest.mark.parametrize("name", ["*.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_files_that_change_in_their_place_end_the_server(
    with_engines: Callable[..., Played], model: Path, name: str
) -> None:
    async def change(process: Process) -> int:
        file = next(model.glob(name), model / name)
        if file.suffix == ".safetensors":  # as large as before, and not one that looks older
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            (model / "new").write_bytes(content)
            (model / "new").replace(file)
        else:
            file.write_text(json.dumps(json.loads(file.read_text()) | {"more": 1}) if file.exists() else "{}")
        return await serve(process)

    async def check(played: Played) -> None:
        inbox = played.ask()
        what = "tokenizer" if name == "tokenizer.json" else "target's model"
        with pytest.raises(FailedError, match=f"the files of the {what} have changed while they were served"):
            await played.keep()
        assert [delta.token_ids for _, delta in await inbox.take()] == [(0,), (0,)]
        assert not played.processes[1].heard

    with_engines([dying(1), change], check)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_request_that_ends_engines_alone_is_refused_and_counts_for_nothing(
    with_engines: Callable[..., Played], num_prompts: int
) -> None:
    """Each of them ends two engines, and one restart is allowed."""

    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        for number in range(3):
            with pytest.raises(Refusal, match="ended 2 times in a row while it had this request") as caught:
                await played.ask(num_prompts).take()
            assert caught.value.kind is Kind.FAILED and len(played.processes) <= 2 * number + 3
        assert await read(played.ask()) == [7]
        assert len(played.processes) == 7 and not keeping.done()

    with_engines([*[dying()] * 6, serve], check, max_restarts=1)


def test_an_engine_that_ends_without_a_request_ends_the_server(with_engines: Callable[..., Played]) -> None:
    async def die(process: Process) -> int:
        await process.come_up()
        return KILLED

    async def check(played: Played) -> None:
        with pytest.raises(FailedError, match="started again 2 of 2"):
            await played.keep()
        assert len(played.processes) == 3

    with_engines([die], check, max_restarts=2)


def test_a_request_that_gets_a_token_of_each_engine_is_refused_where_it_has_used_up_the_restarts(
    with_engines: Callable[..., Played],
) -> None:
    async def check(played: Played) -> None:
        asyncio.create_task(played.keep()).add_done_callback(lambda _: None)
        inbox = played.ask()
        tokens: list[int] = []
        with pytest.raises(Refusal, match="ended 3 times while it had this request alone"):
            while True:
                tokens += [token for _, delta in await inbox.take() if delta.index == 0 for token in delta.token_ids]
        assert tokens == [0, 0, 0]
        assert await read(played.ask()) == [7]

    with_engines([*[dying(1)] * 3, serve], check, max_restarts=2)


def test_ends_with_others_in_work_count(with_engines: Callable[..., Played]) -> None:
    async def check(played: Played) -> None:
        played.ask()
        played.ask()
        with pytest.raises(FailedError, match="started again 1 of 1"):
            await played.keep()

    with_engines([dying()], check, max_restarts=1)


def test_one_of_many_that_ends_engines_is_found_and_the_others_go_on(with_engines: Callable[..., Played]) -> None:
    """The second of four: behind two engines they are tried one at a time."""
    bad = "request 1"

    async def die_of_it(process: Process) -> int:
        await process.come_up()
        requests = itertools.count()
        while (request := await process.hear()) is not None:
            if request.request_id == bad:
                return KILLED
            if len(played_by_now) > 2:
                await process.tell(request, 7, "length")
            next(requests)
        return ExitCode.DONE

    played_by_now: list[Process] = []

    async def check(played: Played) -> None:
        nonlocal played_by_now
        played_by_now = played.processes
        keeping = asyncio.create_task(played.keep())
        inboxes = [played.ask() for _ in range(4)]
        with pytest.raises(Refusal, match="ended 3 times in a row"):
            await inboxes[1].take()
        for number in (0, 2, 3):
            assert await read(inboxes[number]) == [7]
        third = [request.request_id for request in played.processes[2].heard]
        assert third == ["request 0", bad]
        # The others have got on since, so it was the request: none of the three ends counts.
        assert played.engine._limit.engines == [] and not keeping.done()

    with_engines([die_of_it], check)


def test_a_request_that_a_later_engine_does_not_take_is_the_servers_fault(with_engines: Callable[..., Played]) -> None:
    async def refuse(process: Process) -> int:
        await process.come_up()
        while (request := await process.hear()) is not None:
            process.send(Ended(request_id=request.request_id, error="too long"))
        return ExitCode.DONE

    async def check(played: Played) -> None:
        asyncio.create_task(played.keep()).add_done_callback(lambda _: None)
        for kind in (Kind.FAILED, Kind.INVALID):
            inbox = played.ask()
            with pytest.raises(Refusal, match="too long") as caught:
                await inbox.take()
            assert caught.value.kind is kind

    with_engines([dying(), refuse], check)
