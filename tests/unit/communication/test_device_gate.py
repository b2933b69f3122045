"""A stream that waits for numbers of the host."""

from __future__ import annotations

import random
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


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_in_a_table_is_its_first_answer_for_the_last_numbers_of_lines(seed: int) -> None:
    """Else, and where too many rows have none, the opening's numbers hold; they may be there before the table is."""
    from parallel.transports.device_gate import KEY_NUMBERS, DeviceGate, Question

    device, drawn = torch.device("cuda:0"), random.Random(seed)
    gate, kinds = DeviceGate(device, 3000, most_rows=500, most_in_table=9000), [0, 0, 0]
    for opening in range(60):
        rows, steps, width = drawn.choice((1, 5, 300)), drawn.randrange(1, 6), drawn.randrange(1, 6)
        names, lines = drawn.sample(range(400), rows), drawn.sample(range(400), drawn.choice((1, 5, 300)))
        counts = [drawn.randrange(4) for _ in lines]
        numbers = [[drawn.randrange(2) for _ in range(count)] for count in counts]
        wanted = [drawn.choice((-1, 0, width, width)) for _ in names]
        shape, pool = drawn.choice((1, 40, 1000)), [*lines, *names]
        table = [
            [
                drawn.choice(pool),
                drawn.randrange(3),
                drawn.randrange(2),
                *(drawn.randrange(-9, 99) for _ in range(steps)),
            ]
            for _ in range(shape)
        ]
        answers: list[list[int]] = []
        for name, most in zip(names, wanted, strict=True):
            line = numbers[lines.index(name)] if name in lines else []
            key = [name, len(line) - 1, line[-1]] if line else []
            found = next((entry[KEY_NUMBERS:] for entry in table if entry[:KEY_NUMBERS] == key), [])
            answers.append(found[: max(0, min(most, width))])
        missing = sum(most > 0 and not answer for most, answer in zip(wanted, answers, strict=True))
        fewest = drawn.choice((1, 10, 1000))
        opened = np.array([drawn.randrange(99) for _ in range(rows * (1 + width))], dtype=np.int64)
        places = [lines.index(name) if name in lines else -1 for name in names]
        question = Question(
            torch.tensor(list(zip(names, wanted, places, strict=True))).cuda(),
            torch.tensor(counts).cuda(),
            torch.tensor([(*of_line, -1, -1, -1)[:3] for of_line in numbers]).cuda(),
            width,
            fewest,
        )  # fmt: skip
        kind = 2 if missing and missing >= fewest else drawn.randrange(2)
        if kind == 1:  # there first, whatever a table would say
            gate.open(opening, opened)
        if opening % 2:
            gate.send(opening, np.array(table, dtype=np.int64))
        found_ = gate.enqueue_lookup(opening, question, MOST)
        if kind != 1 and not opening % 2:
            if opening > 0:  # CUDA loads a kernel at its first use, for which it waits
                assert not torch.cuda.current_stream().query()
            gate.send(opening, np.array(table, dtype=np.int64))
        if kind == 2:
            gate.open(opening, opened)
        padded = [[len(answer), *answer, *[0] * (width - len(answer))] for answer in answers]
        assert found_.view(rows, -1).tolist() == (opened.reshape(rows, -1).tolist() if kind else padded), opening
        kinds[kind] += 1
    assert all(kinds), kinds


def test_a_lookup_without_a_table_goes_on_without_one() -> None:
    from parallel.transports.device_gate import DeviceGate, Question

    gate, one = (
        DeviceGate(torch.device("cuda:0"), 10, most_rows=1, most_in_table=20),
        torch.ones(1, dtype=torch.int64).cuda(),
    )
    question = Question(torch.tensor([[4, 2, 0]]).cuda(), one, one.view(1, 1), 2, 1)
    assert gate.enqueue_lookup(0, question, 0.1).tolist() == [0, 0, 0]
    gate.send(1, np.array([[4, 0, 1, 8, 9]], dtype=np.int64))
    assert gate.enqueue_lookup(1, question, MOST).tolist() == [2, 8, 9]
    gate.send(2, np.array([[4, 0, 2, 8, 9]], dtype=np.int64))
    assert gate.enqueue_lookup(2, question, 0.1).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="a table of 25 numbers does not go through a gate for 20"):
        gate.send(3, np.zeros((5, 5), dtype=np.int64))
    with pytest.raises(ValueError, match="2 rows do not go through a gate for 1"):
        gate.enqueue_lookup(3, Question(torch.zeros((2, 3)).cuda(), one, one.view(1, 1), 2, 1), 0.1)
