"""What `trtrun quantize` was asked for. Plain data, quick to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtrun.configuration.device_lists import parse_devices
from trtrun.errors import ConfigError
from trtrun.tools.quantizing.settings import QuantizingSettings


@dataclass(frozen=True)
class QuantizeOptions:
    """Files, devices and settings.

    Attributes:
        model: the plain checkpoint.
        output: the directory to make.
        calibration: file of texts to calibrate with; None without.
        held_out: file of texts to measure on; None takes a share of the other.
        devices: such as "cuda:0"; none takes the first GPU, or the CPU where there is none.
        resume: whether a checkpoint that is finished already is fine.
        force: whether what is there may be lost.
        settings: of the quantization.
    """

    model: Path
    output: Path
    calibration: Path | None
    held_out: Path | None
    devices: tuple[str, ...]
    resume: bool
    force: bool
    settings: QuantizingSettings


def parse_device_names(text: str | None) -> tuple[str, ...]:
    """Devices between commas, such as "cuda:0,cuda:1" or "0,1"; none of None.

    Raises:
        ConfigError: there is no such device.
    """
    if text is None:
        return ()
    names = [int(name) if name.strip().isdecimal() else name.strip() for name in text.split(",")]
    try:
        devices = parse_devices(names)
    except ValueError as error:
        raise ConfigError(f"--devices {text}: {error}") from None
    if len({device.partition(":")[0] for device in devices}) > 1:
        raise ConfigError(f"--devices {text}: GPUs and CPUs do not work together here: name devices of one kind")
    return devices
