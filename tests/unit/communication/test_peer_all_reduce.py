"""What is handed to the kernels over peer memory, and that they compile. GPUs show what they do (tests/ranks)."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpus import needs_gpu

from parallel.transports import peer_all_reduce
from parallel.transports.peer_all_reduce import ALIGNMENT, MOST_RANKS, THREADS, Layout, PeerAllReduce, kernel_source


class FakeDriver:
    """Keeps what is launched, with the arguments that lie behind the pointers at that moment."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launchKernel(self, kernel: int, *shape_and_rest: int) -> None:
        *shape, shared, stream, places, extra = shape_and_rest
        name = KERNELS[kernel]
        pointers = (ctypes.c_void_p * arguments_of(name)).from_address(places)
        values = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        if name[1] == torch.bfloat16 and values[1] == 6000:
            ones = torch.ones(3000, dtype=torch.bfloat16)
            ctypes.memmove(values[0], ones.data_ptr(), 6000)
        self.launched.append((name, shape, shared, stream, extra, values))


KERNELS = {
    1 + index: (kind, dtype)
    for index, (kind, dtype) in enumerate(
        (kind, dtype) for kind in ("one_shot", "two_shot") for dtype in (torch.float32, torch.float16, torch.bfloat16)
    )
}


def arguments_of(name: tuple[str, torch.dtype]) -> int:
    """Parameters of a kernel, from its source."""
    (parameters,) = re.findall(rf"{name[0]}_##name\((.*?), OTHERS_ARGUMENTS\)", kernel_source())
    (others,) = re.findall(r"#define OTHERS_ARGUMENTS \\\n *(.*)", kernel_source())
    return len(parameters.split(",")) + len(others.split(","))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, MOST_RANKS])
def test_kernels_get_their_arguments_in_order(ranks: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if early else (8, 9))
    begun_early: list[int] = []

    def launch_early(kernel: int, blocks: int, threads: int, stream: int, arguments: int) -> None:
        begun_early.append(kernel)
        driver.launchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, 0)

    monkeypatch.setattr(peer_all_reduce, "launch_early", launch_early)
    handles = {name: handle for handle, name in KERNELS.items()}
    monkeypatch.setattr(peer_all_reduce, "_compile", lambda layout, device: (None, handles))
    monkeypatch.setattr(peer_all_reduce.importlib, "import_module", lambda name: SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    layout = Layout.of(ranks)
    others = tuple(1000 + step for step in range(1, ranks))
    memory: Any = SimpleNamespace(own=1000, others=others)
    sums = PeerAllReduce(memory, layout, 1, torch.device("cuda", 1))
    message = torch.zeros(3001, dtype=torch.bfloat16)
    sums.one_shot(message)
    sums.two_shot(message.float())
    sums.one_shot(message[1:])  # begins where no vector does
    addresses = [1000, *others, *[0] * (MOST_RANKS - ranks)]
    one, two, copied = driver.launched
    assert one[:5] == (("one_shot", torch.bfloat16), [2, 1, 1, THREADS, 1, 1], 0, 77, 0)
    assert one[5] == [message.data_ptr(), 6002, 1, *addresses]
    blocks, chunk = layout.two_shot_shape(12004)
    assert two[:5] == (("two_shot", torch.float32), [blocks, 1, 1, THREADS, 1, 1], 0, 77, 0)
    assert two[5][1:] == [12004, chunk, 1, *addresses]
    assert copied[5][0] % ALIGNMENT == 0 != message[1:].data_ptr() % ALIGNMENT
    assert copied[5][1:] == [6000, 1, *addresses]
    assert len(begun_early) == (3 if early else 0)
    assert (message == 1).tolist() == [False, *[True] * 3000], "the copy's sums come back"


@needs_gpu  # CuPy and NVRTC are installed where there is one
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("ranks", [2, 3, MOST_RANKS])
def test_the_kernels_compile(ranks: int, architecture: int) -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:  # of the loader's own kinds
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    words = [f"-D{name}={value}" for name, value in Layout.of(ranks).definitions().items()]
    program = nvrtc.createProgram(kernel_source(), "peer_all_reduce.cu", (), ())
    nvrtc.compileProgram(program, ["-std=c++17", f"-arch=compute_{architecture}", "-ftz=true", *words])
    code = nvrtc.getPTX(program).decode()
    for kind in ("one_shot", "two_shot"):
        for name in ("float32", "float16", "bfloat16"):
            assert f".entry {kind}_{name}(" in code
    assert ".ftz" not in code  # CuPy asks for it, and it would lose subnormal numbers
    assert "multimem" not in code
    assert code.count("griddepcontrol.wait") == (6 if architecture >= 90 else 0)
