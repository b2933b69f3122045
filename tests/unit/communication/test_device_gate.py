"""A stream that waits for numbers of the host."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from gpus import needs_gpu

pytestmark = needs_gpu
MOST = 60.0


def test_what_is_behind_a_gate_waits_and_has_its_numbers() -> None:
    from parallel.transports.device_gate import DeviceGate

    gate, event = DeviceGate(torch.device("cuda:0"), 2000), torch.cuda.Event()
    for opening, count in enumerate((1, 1, 700, 2000, 3)):
        numbers = np.arange(count, dtype=np.int64) - count // 2
        if opening == 0:  # CUDA loads a kernel at its first use, for which it waits
            gate.open(opening, numbers)
        doubled = gate.enqueue(opening, count, MOST) * 2
        event.record()
        assert opening == 0 or not event.query()
        gate.open(opening, numbers)
        assert doubled.tolist() == (2 * numbers).tolist()


def test_a_gate_may_be_open_before_the_stream_is_there() -> None:
    from parallel.transports.device_gate import DeviceGate

    gate = DeviceGate(torch.device("cuda:0"), 10)
    gate.open(2**31 - 1, np.array([5, -(2**31), 2**31 - 1], dtype=np.int64))
    assert gate.enqueue(2**31 - 1, 3, MOST).tolist() == [5, -(2**31), 2**31 - 1]
    assert gate.enqueue(2**31, 0, MOST).tolist() == []
    with pytest.raises(ValueError, match="11 numbers do not go through a gate for 10"):
        gate.enqueue(2**31, 11, MOST)


def test_a_stream_goes_on_without_a_host_that_says_nothing() -> None:
    from parallel.transports.device_gate import DeviceGate

    gate = DeviceGate(torch.device("cuda:0"), 10)
    began = time.monotonic()
    gate.open(0, np.array([7, 7, 7], dtype=np.int64))
    assert gate.enqueue(1, 3, 0.1).tolist() == [0, 0, 0]
    assert time.monotonic() - began >= 0.1
