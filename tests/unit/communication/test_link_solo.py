"""The link, the control plane and the groups of a job of one process, and waiting: all without MPI."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from parallel.control import ControlPlane, Report
from parallel.errors import CommunicatorError, ControlPlaneError, LinkError, TopologyError
from parallel.groups import open_groups
from parallel.link import Link
from parallel.topology import Topology
from parallel.transports.solo import SoloCommunicator
from parallel.waiting import wait_until

SOLO = Topology.from_devices(["cpu:0"], ["cpu:0"])


def draft(
    rows: int, draft_len: int, probability_rows: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, lens = torch.randint(0, vocab, (rows, draft_len)), torch.randint(0, draft_len + 1, (rows,))
    return tokens, lens, torch.rand(probability_rows, draft_len, vocab)


def test_a_draft_reaches_the_same_process_without_a_copy() -> None:
    link = Link(SOLO, 0, None)
    tokens, lens, probs = draft(3, 4, 2, 11)
    link.send_draft(tokens, lens, probs)
    received, received_lens, received_probs = link.receive_draft(3, 4, 2, 11)
    assert received is tokens
    assert received_lens is lens
    assert received_probs is probs


def test_drafts_keep_their_order() -> None:
    link = Link(SOLO, 0, None)
    first, second = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
    lens = torch.zeros(1, dtype=torch.int64)
    link.send_draft(first, lens)
    link.send_draft(second, lens)
    assert link.receive_draft(1, 2, 0, 5) == (first, lens, None)
    assert link.receive_draft(1, 2, 0, 5) == (second, lens, None)


def test_a_leader_of_both_engines_sends_its_verdict_nowhere_and_receives_none() -> None:
    link = Link(SOLO, 0, None)
    link.send_verdict(torch.ones(2, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(LinkError, match="its own verification"):
        link.receive_verdict(2, 5)


@pytest.mark.parametrize("shapes", [(2, 4, 2, 11), (3, 5, 2, 11), (3, 4, 1, 11), (3, 4, 0, 11), (3, 4, 2, 12)])
def test_a_draft_of_another_shape_than_the_plan_is_refused(shapes: tuple[int, int, int, int]) -> None:
    link = Link(SOLO, 0, None)
    link.send_draft(*draft(3, 4, 2, 11))
    with pytest.raises(LinkError, match="the plan's draft has shapes"):
        link.receive_draft(*shapes)


def test_wrong_dtypes_dimensions_and_order_are_refused() -> None:
    link = Link(SOLO, 0, None)
    tokens, lens = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(LinkError, match="before it has sent"):
        link.receive_draft(1, 1, 0, 2)
    with pytest.raises(LinkError, match="tokens must have 2 dimensions"):
        link.send_draft(torch.zeros(3, 4), lens)
    with pytest.raises(LinkError, match="draft_lens must have 1 dimensions"):
        link.send_draft(tokens, tokens)
    with pytest.raises(LinkError, match="draft_probs must have 3 dimensions"):
        link.send_draft(tokens, lens, torch.zeros(3, 4))


def test_only_workers_with_a_communicator_of_the_right_size_have_an_end() -> None:
    topology = Topology.from_devices(["cpu:0"], ["cpu:1"])
    with pytest.raises(LinkError, match="holds no device"):
        Link(topology, 0, None)
    with pytest.raises(LinkError, match="over the 2 workers"):
        Link(topology, 1, None)


def test_each_end_refuses_what_is_the_others() -> None:
    topology = Topology((Topology.from_devices(["cpu:0"], ["cpu:1"]).slots[1],))  # the target alone, seen as rank 2
    link = Link(topology, 2, None)
    with pytest.raises(LinkError, match="the draft leader is rank None"):
        link.send_draft(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(LinkError, match="given no drafts"):
        link.receive_draft(1, 1, 0, 2)


def test_groups_of_one_process_are_solo() -> None:
    groups = open_groups(None, SOLO, torch.device("cpu"))
    for communicator in (groups.draft, groups.target, groups.workers):
        assert isinstance(communicator, SoloCommunicator)
    groups.close()
    assert open_groups(None, Topology.from_devices([], ["cpu:0"]), torch.device("cpu")).draft is None


def test_groups_need_the_world_of_their_topology() -> None:
    with pytest.raises(TopologyError, match="need 3 ranks"):
        open_groups(None, Topology.from_devices(["cpu:0"], ["cpu:1"]), torch.device("cpu"))


def test_solo_refuses_messages_and_foreign_dtypes() -> None:
    solo = SoloCommunicator()
    with pytest.raises(CommunicatorError):
        solo.send(torch.ones(1), 0)
    with pytest.raises(CommunicatorError, match="complex64"):
        solo.all_reduce(torch.ones(1, dtype=torch.complex64))


def test_a_control_plane_of_one_process_hands_plans_and_reports_over() -> None:
    control = ControlPlane(None, SOLO)
    assert control.gather_start({"host": "a"}) == [{"host": "a"}]
    assert control.broadcast_start({"blocks": 4}) == {"blocks": 4}
    control.warm_up()
    plan = bytearray(b"plan 1")
    control.publish(plan)
    plan[:] = b"reused"
    control.publish(b"plan 2")
    assert control.receive() == b"plan 1"
    control.report(b"result", kind=3)
    assert control.receive() == b"plan 2"
    assert control.collect() == Report(0, b"result", 3)
    assert control.collect(timeout=0) is None
    with pytest.raises(ControlPlaneError, match="has not sent itself"):
        control.receive()
    control.shut_down()
    assert control.receive() is None
    assert control.is_shut_down
    assert control.receive() is None
    control.close()


def test_abort_in_one_process_prints_one_line_and_exits(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        ControlPlane(None, SOLO).abort("ValueError: two\nlines")
    assert ending.value.code == 1
    assert capfd.readouterr().err == (
        "trtrun: orchestrator+draft+target rank 0 (cpu:0) failed: ValueError: two lines\n"
    )


def test_a_job_of_one_process_never_starts_mpi() -> None:
    program = """
import sys, torch
from parallel.control import ControlPlane
from parallel.groups import open_groups
from parallel.link import Link
from parallel.topology import Topology
topology = Topology.from_devices(["cpu:0"], ["cpu:0"])
ControlPlane(None, topology).warm_up()
Link(topology, 0, open_groups(None, topology, torch.device("cpu")).workers)
sys.exit("mpi4py" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_waiting_tries_until_true_or_until_the_time_is_up() -> None:
    tries = iter([False] * 40 + [True])
    assert wait_until(lambda: next(tries))
    assert next(tries, None) is None
    assert not wait_until(lambda: False, timeout=0)
    assert not wait_until(lambda: False, timeout=0.01)
