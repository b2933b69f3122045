"""How a checkpoint says that it is quantized: a section of config.json, or ModelOpt's own file beside it.

It knows where that is said. What it means is the business of trtrun.linear.stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtrun.errors import CheckpointError, TrtrunError, shorten
from trtrun.linear.stored import STORED_QUANTIZATIONS, StoredQuantizations
from trtrun.weights.checkpoint import read_json

QUANTIZATION_FILE = "hf_quant_config.json"
"""Where ModelOpt says it; config.json goes before."""


def configuration_bytes(path: Path) -> list[bytes]:
    """What a model directory says of its model, as it stands there: config.json, and ModelOpt's file or nothing.

    Raises:
        OSError: config.json cannot be read.
    """
    beside = path / QUANTIZATION_FILE
    return [(path / "config.json").read_bytes(), beside.read_bytes() if beside.is_file() else b""]


def find_section(path: Path, values: Mapping[str, Any]) -> tuple[str, Any]:
    """The file that says how a checkpoint is quantized, and what it says; nothing where it is not.

    Args:
        path: of the model directory.
        values: of its config.json.

    Raises:
        CheckpointError: ModelOpt's file is damaged.
    """
    section = values.get("quantization_config")
    if section is not None and section != {}:
        return "config.json", section
    beside = read_json(path, QUANTIZATION_FILE, required=False)
    return QUANTIZATION_FILE, {"quant_method": "modelopt", **beside} if beside else None


def read_quantization(path: Path, values: Mapping[str, Any]) -> tuple[str | None, StoredQuantizations | None]:
    """The `quant_method` of a checkpoint, and how it has stored each matrix; two None where it is not quantized.

    Args:
        path: of the model directory.
        values: of its config.json.

    Raises:
        CheckpointError: it is quantized in a way that is not supported.
    """
    file, section = find_section(path, values)
    if section is None:
        return None, None
    if not isinstance(section, dict):
        raise CheckpointError(f"{path / file}: 'quantization_config' must be an object, not {shorten(section)}")
    method = section.get("quant_method", "unknown")
    try:
        if str(method) not in STORED_QUANTIZATIONS:
            raise CheckpointError(
                f"quantized weights ({shorten(method)}) are not supported; known: {', '.join(STORED_QUANTIZATIONS)}, "
                "and models in float32, float16 or bfloat16"
            )
        return method, STORED_QUANTIZATIONS.get(method)(section)
    except TrtrunError as error:
        raise CheckpointError(f"{path / file}: {error}") from None
