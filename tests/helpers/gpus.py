"""Marks for what runs on GPUs alone. Without any there is one reason to skip, whatever a test would need of one."""

from __future__ import annotations

import pytest
import torch

NO_GPU = "needs an NVIDIA GPU"
HAS_GPU = torch.cuda.is_available()
_CAPABILITY = torch.cuda.get_device_capability() if HAS_GPU else (0, 0)


def lacking(what: str) -> str:
    """Why a test is skipped that needs `what` of GPUs."""
    return f"needs {what}" if HAS_GPU else NO_GPU


def needs(there: bool, what: str) -> pytest.MarkDecorator:
    """A mark for tests that are skipped unless `what` they need of GPUs is there."""
    return pytest.mark.skipif(not there, reason=lacking(what))


needs_gpu = needs(HAS_GPU, "an NVIDIA GPU")
needs_two_gpus = needs(torch.cuda.device_count() > 1, "two NVIDIA GPUs")
needs_hopper = needs(_CAPABILITY == (9, 0), "an NVIDIA GPU of compute capability 9.0")
needs_fp8 = needs(_CAPABILITY >= (8, 9), "an NVIDIA GPU of compute capability 8.9 or more")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
