"""How scripts start what they measure and try (scripts/harness), and how they end."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.harness.announcements import Addresses, find_leftovers
from scripts.harness.children import ChildError
from scripts.harness.processes import is_alive
from scripts.harness.serving import _find_addresses, serving
from scripts.harness.trials import exiting_clearly, make_parser, play_trial

READY = "trtrun: pair is served at http://host:1, metrics at http://host:2/metrics, gRPC at host:34"
SERVER = f"import signal, sys; print({READY!r}, file=sys.stderr, flush=True); signal.pause()"


@pytest.mark.parametrize("faults", [[], ["one"]])
def test_a_trial_prints_its_figures_last_and_fails_by_its_faults(
    faults: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = make_parser(__doc__, clients=3, ranks=1).parse_args(["--seed", "5"])

    async def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
        assert folder.is_dir() and (given.clients, given.ranks, given.seed, given.config) == (3, 1, 5, None)
        print("on the way")
        return {"faults": faults}

    assert play_trial(run, options) == len(faults)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"faults": faults}


def test_what_a_command_lacks_is_the_last_word_of_a_script() -> None:
    with pytest.raises(SystemExit, match="status 2: no such model"), exiting_clearly():
        raise ChildError("status 2: no such model")


def test_a_server_is_ready_once_its_line_is_whole_and_ends_with_the_block() -> None:
    assert _find_addresses(READY) is None, "the last port may go on"
    with serving([sys.executable, "-S", "-c", SERVER]) as server:
        assert server.addresses == Addresses("pair", "http://host:1", "http://host:2/metrics", "host:34")
        assert is_alive(server.process)
    assert not is_alive(server.process)


def test_one_that_does_not_start_is_told_with_its_own_words() -> None:
    words = [sys.executable, "-S", "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(ChildError, match="did not start:\nno such model"), serving(words):
        pytest.fail("it is not ready")


def test_leftovers_are_rows_and_blocks_that_nobody_asks_for() -> None:
    idle = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0, "vllm:kv_cache_usage_perc": 0.0}
    assert find_leftovers(idle) == []
    assert len(find_leftovers(dict.fromkeys(idle, 0.5))) == 2
