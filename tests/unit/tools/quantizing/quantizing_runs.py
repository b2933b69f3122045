"""What the tests of quantization share: texts of random tokens, a run in this process, and tensors of its directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trtrun.tools.quantizing.activations import Devices
from trtrun.tools.quantizing.checkpoint_quantizer import CheckpointQuantizer
from trtrun.tools.quantizing.settings import QuantizingSettings
from trtrun.tools.quantizing.texts import CalibrationTexts

CPU = torch.device("cpu")
ON_CPU = Devices((CPU,), torch.float32)


def random_texts(count: int, seed: int = 0, vocabulary: int = 199, length: int = 24) -> list[tuple[int, ...]]:
    """Texts of up to `length` tokens, some of the same length."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [length - index % 3 for index in range(count)]
    return [tuple(torch.randint(vocabulary, (size,), generator=generator).tolist()) for size in sizes]


def texts_of(samples: int = 6, held_out: int = 3, **more: Any) -> CalibrationTexts:
    """Of both kinds."""
    return CalibrationTexts(random_texts(samples, 1, **more), random_texts(held_out, 2, **more), "random")


def quantize(
    source: Path,
    output: Path,
    texts: CalibrationTexts | None = None,
    slots: Sequence[torch.device] = (CPU,),
    **settings: Any,
) -> list[dict[str, Any]]:
    """Quantize a checkpoint in this process; returns the lines of the report."""
    wanted = QuantizingSettings(**{"format": "int4_awq", "group_size": 32, **settings})
    quantizer = CheckpointQuantizer(source, output, wanted, texts_of() if texts is None else texts, slots)
    quantizer.begin(is_forced=False)
    quantizer.run(lambda done, total: None, lambda: False)
    return [json.loads(line) for line in (output / "quantization_report.jsonl").read_text().splitlines()]


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by the index or of one file."""
    files = sorted(directory.glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}
