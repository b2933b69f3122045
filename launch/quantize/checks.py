"""What `trtrun quantize` checks before torch is imported.

It knows files and directories. It does not know how a checkpoint is quantized.
"""

from __future__ import annotations

from dataclasses import replace

from launch.quantize.options import QuantizeOptions
from parallel.mpi_rank import find_mpi_rank
from trtrun.configuration.model_paths import find_model
from trtrun.errors import ConfigError
from trtrun.tools.quantizing.directory import check_output, is_finished
from trtrun.tools.quantizing.texts import check_texts_file


def check_quantization(options: QuantizeOptions) -> QuantizeOptions:
    """The options with the model's directory found.

    Raises:
        ConfigError: something is wrong.
    """
    place = find_mpi_rank()
    if place is not None and place.size > 1:
        raise ConfigError("trtrun quantize is one process: start it without mpirun, and name GPUs by --devices 0,1")
    model = find_model(options.model, None, "--model")
    for option, path in (("--calibration", options.calibration), ("--held-out", options.held_out)):
        if path is not None:
            check_texts_file(path, option)
    if options.calibration is None and options.settings.needs_texts:
        what = f"--format {options.settings.format}"
        if options.settings.layout != "compressed-tensors" and options.settings.format == "fp8":
            what = f"--layout {options.settings.layout} --format fp8"
        if options.settings.kv_cache is not None:
            what = f"--kv-cache {options.settings.kv_cache}"
        raise ConfigError(f'{what} needs --calibration FILE.jsonl: texts such as {{"text": "…"}}, one a line')
    if options.force or not (options.resume and is_finished(options.output)):
        check_output(options.output, model, options.force)
    return replace(options, model=model)
