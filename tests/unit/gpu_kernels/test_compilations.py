"""Kernels that Triton makes ready are counted, from the moment on at which anybody asks for its operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")
from triton import knobs

from trtrun.kernels import chooser
from trtrun.kernels.triton.compilation import launches
from trtrun.warmup_misses import WarmupMisses, WarmupMissWatch

Hook = Callable[..., Any]


@pytest.mark.parametrize("other", [None, lambda **told: ["another's", told]], ids=["nobody's", "another's"])
def test_each_kernel_is_counted_once_and_another_hook_is_still_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: Hook | None
) -> None:
    """Triton is played where it calls its hook: a kernel is compiled on GPUs alone."""
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", other)
    monkeypatch.setattr(launches, "watch_compilations", cache(launches.watch_compilations.__wrapped__))
    monkeypatch.setattr(chooser, "triton_works", lambda device_type: device_type == "cuda")
    for _ in range(2):
        chooser.operations_of.__wrapped__("cuda")  # what others of this process have asked for stays as it is
    hook, watch = knobs.runtime.jit_post_compile_hook, WarmupMissWatch()
    assert hook is not None
    told = {"key": "k", "repr": "norm[4]", "is_manual_warmup": False, "already_compiled": False}
    caplog.set_level("DEBUG", logger=launches.__name__)
    assert hook(**told) == (None if other is None else ["another's", told])
    assert watch.take() == WarmupMisses(compilations=1)
    assert caplog.messages == ["ready: norm[4]"], "so that one which a round waited for can be found"
