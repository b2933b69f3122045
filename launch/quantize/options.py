"""What `trtrun quantize` was asked for, and what is wrong with that, before torch is imported.

It knows files and directories. It does not know how a checkpoint is quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallel.mpi_rank import find_mpi_rank
from trtrun.configuration.device_lists import parse_devices
from trtrun.configuration.model_paths import find_model
from trtrun.errors import ConfigError
from trtrun.quantizing.directory import check_output
from trtrun.quantizing.settings import QuantizingSettings
from trtrun.quantizing.texts import check_texts_file


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

    def checked(self) -> QuantizeOptions:
        """The same with the model's directory found.

        Raises:
            ConfigError: something is wrong.
        """
        place = find_mpi_rank()
        if place is not None and place.size > 1:
            raise ConfigError("trtrun quantize is one process: start it without mpirun, and name GPUs by --devices 0,1")
        model = find_model(self.model, None, "--model")
        for option, path in (("--calibration", self.calibration), ("--held-out", self.held_out)):
            if path is not None:
                check_texts_file(path, option)
        if self.calibration is None and self.settings.needs_texts:
            what = f"--format {self.settings.format}"
            if self.settings.kv_cache is not None:
                what = f"--kv-cache {self.settings.kv_cache}"
            raise ConfigError(f'{what} needs --calibration FILE.jsonl: texts such as {{"text": "…"}}, one a line')
        if not self.resume:
            check_output(self.output, model, self.force)
        return QuantizeOptions(**{**vars(self), "model": model})


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
