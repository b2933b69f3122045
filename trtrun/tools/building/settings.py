"""What an engine is to be: for how many ranks, in which dtype and quantization, for which devices and limits.

It knows values and ranges. It does not know files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trtrun.configuration.engine_directory import Limits
from trtrun.configuration.round_sections import MOST_ROWS, MOST_TOKENS
from trtrun.errors import ConfigError, nearest

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("cuda", "cpu")

_LEAST_SEQ_LEN = 2


@dataclass(frozen=True)
class BuildSettings:
    """See the module.

    Attributes:
        tp_size: ranks.
        dtype: of activations; "auto" takes the checkpoint's.
        quantization: as in the YAML file.
        device: type of the devices that it is for; None for GPUs where there is one here, else CPUs.
        limits: of jobs that run it.
    """

    tp_size: int = 1
    dtype: str = "auto"
    quantization: str = "none"
    device: str | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that there is not, or outside its range."""
        if self.tp_size < 1:
            raise ConfigError(f"--tp is {self.tp_size}: it must be 1 or more")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: unknown value '{self.dtype}'{nearest(self.dtype, DTYPES)}")
        if self.device is not None and self.device not in DEVICES:
            raise ConfigError(f"--device: unknown value '{self.device}'{nearest(self.device, DEVICES)}")
        for name in self.limits.__struct_fields__:
            value = getattr(self.limits, name)
            least = _LEAST_SEQ_LEN if name == "max_seq_len" else 1
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be {least} or more")
            most = MOST_ROWS if name == "max_batch_size" else MOST_TOKENS
            if value is not None and value > most:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be {most} or less")
        rows, tokens = self.limits.max_batch_size, self.limits.max_num_tokens
        width = 1 + (self.limits.max_draft_len or 0)
        if rows is not None and tokens is not None and tokens < rows * width:
            raise ConfigError(
                f"--max-num-tokens is {tokens}, too small to verify {width} tokens of each of {rows} rows: make it "
                f"{rows * width} or more, or --max-batch-size smaller"
            )

    def check_context(self, context: int) -> None:
        """Raise ConfigError where texts may be longer than the model's context."""
        if self.limits.max_seq_len is not None and self.limits.max_seq_len > context:
            raise ConfigError(
                f"--max-seq-len is {self.limits.max_seq_len}, but the model's context is {context} tokens"
            )
