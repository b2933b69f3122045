"""How a server inside a Slurm job is reached, as its log tells it and `trtrun status` reads it."""

from __future__ import annotations

import pytest

from launch.jobs.batch.reach import Served, describe_way, find_served, tell_way

JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_SUBMIT_HOST": "login"}
HEADER = "trtrun: 2026-11-20T13:55:57 job 7 on n1, start 1\n"
LINE = "trtrun: my model is served at {}, metrics at http://127.0.0.1:8002/metrics\n"


@pytest.mark.parametrize(
    ("url", "is_loopback", "environment", "way"),
    [
        (
            "http://127.0.0.1:8000",
            True,
            JOB,
            "ssh -N -L 8000:127.0.0.1:8000 -J login n1, and then http://127.0.0.1:8000",
        ),
        ("https://[::1]:81", True, JOB, "ssh -N -L 81:[::1]:81 -J login n1, and then https://127.0.0.1:81"),
        (
            "http://127.0.0.1:80",
            True,
            JOB | {"SLURM_SUBMIT_HOST": "n1"},
            "ssh -N -L 80:127.0.0.1:80 n1, and then http://127.0.0.1:80",
        ),
        (
            "unix:///tmp/a%20b/7.sock",
            True,
            JOB,
            "ssh -N -L 8000:'/tmp/a b/7.sock' -J login n1, and then http://127.0.0.1:8000",
        ),
        ("http://0.0.0.0:8000", False, JOB, "http://n1:8000"),
        ("http://127.0.0.1:8000", True, {}, None),
    ],
)
def test_the_way_from_another_machine(
    url: str, is_loopback: bool, environment: dict[str, str], way: str | None
) -> None:
    assert describe_way(url, is_loopback, environment) == way


def test_the_last_start_counts() -> None:
    way = f"trtrun: {tell_way('ssh -N n1')}\n"
    assert find_served(HEADER) is None
    assert find_served(HEADER + LINE.format("http://a:1") + way) == Served("http://a:1", "ssh -N n1")
    assert find_served(LINE.format("http://a:1")) == Served("http://a:1", None)
    assert find_served(HEADER + LINE.format("http://a:1") + way + HEADER.replace("start 1", "start 2")) is None
