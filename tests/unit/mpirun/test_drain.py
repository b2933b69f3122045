"""A drain that is ordered before anything runs: what comes out of the code that the signal interrupts."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from launch.jobs.mpi.drain import Drain, EndedAtStart


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_an_order_before_the_run_interrupts_it() -> None:
    drain = Drain()
    with pytest.raises(EndedAtStart), drain.listening():
        interrupt()
    assert (drain.cause, drain.has_interrupted) == ("SIGUSR1", True)


def test_an_error_that_native_code_puts_in_its_place_is_no_failure() -> None:
    """Seen once each: safetensors said "could not determine the shape" when the signal came while it read a tensor,
    pydantic "Error building `model` serializer" when it came while a class of settings was imported.
    """
    drain = Drain()
    with pytest.raises(EndedAtStart), drain.listening():
        with suppress(EndedAtStart):
            interrupt()
        raise ValueError("could not determine the shape")


def test_what_fails_once_rows_run_is_told_though_an_order_before_them_was_lost() -> None:
    drain = Drain()
    with pytest.raises(ValueError, match="damaged"), drain.listening():
        with suppress(EndedAtStart):
            interrupt()
        drain.start_running()
        raise ValueError("damaged")


def test_an_error_that_nobody_ordered_stays_what_it_is() -> None:
    drain = Drain()
    with pytest.raises(ValueError, match="damaged"), drain.listening():
        raise ValueError("damaged")


def test_an_order_while_rows_run_is_noted_and_no_error_is_hidden() -> None:
    drain = Drain()
    with pytest.raises(ValueError, match="damaged"), drain.listening():
        drain.start_running()
        interrupt()
        assert drain.cause == "SIGUSR1"
        raise ValueError("damaged")
