"""What a checkpoint is to be quantized to. Plain data without torch: the command checks it before anything is loaded,
and what a killed run leaves behind is compared by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtrun.errors import ConfigError, nearest

FORMATS = ("fp8", "fp8_block", "int4_awq", "int8_sq")
KV_CACHES = ("fp8", "int8")
DTYPES = ("float32", "bfloat16", "float16")
CALIBRATED_FORMATS = ("int4_awq", "int8_sq")
"""Formats whose scales follow from activations."""

LAYOUTS = ("compressed-tensors", "modelopt", "trtllm")
"""Layouts of files: two kinds of Hugging Face directories, and TensorRT-LLM's checkpoints, whose bytes are
ModelOpt's."""
MODELOPT_FORMATS = ("fp8", "int4_awq")
"""Formats that the last two have: FP8 with a scale for each tensor and one for its activations, and W4A16_AWQ."""

WORD_PLACES = 8
"""Codes of 4 bits in a word of 32: no group is smaller, and dimensions are multiples of it."""
KERNEL_GROUP = 32
"""Groups of multiples of so many features stay codes on GPUs; others become dense."""


@dataclass(frozen=True)
class QuantizingSettings:
    """How a checkpoint is quantized.

    Attributes:
        format: one of FORMATS.
        kv_cache: one of KV_CACHES, for scales of keys and values; None writes none.
        group_size: input features with one scale, at most (int4_awq).
        samples: texts to calibrate with, at most.
        max_length: tokens of a text, at most; what is longer is cut off.
        held_out_samples: texts to measure on, at most.
        smoothing: how much of the activations' outliers the weights take over, 0 to 1 (int8_sq).
        dtype: of what stays plain; None keeps the checkpoint's.
        tp_size: ranks that the model can be shared out over without cutting a group (int4_awq), and that a checkpoint
            of the layout `trtllm` is cut for.
        layout: one of LAYOUTS.
    """

    format: str
    kv_cache: str | None = None
    group_size: int = 128
    samples: int = 512
    max_length: int = 512
    held_out_samples: int = 32
    smoothing: float = 0.5
    dtype: str | None = None
    tp_size: int = 1
    layout: str = "compressed-tensors"

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that there is not, or outside its range."""
        for option, value, known in (
            ("--format", self.format, FORMATS),
            ("--kv-cache", self.kv_cache, KV_CACHES),
            ("--dtype", self.dtype, DTYPES),
            ("--layout", self.layout, LAYOUTS),
        ):
            if value is not None and value not in known:
                raise ConfigError(f"{option}: unknown value '{value}'{nearest(value, known)}")
        for option, number, least in (
            ("--samples", self.samples, 1),
            ("--max-length", self.max_length, 2),
            ("--held-out-samples", self.held_out_samples, 0),
            ("--tp-size", self.tp_size, 1),
        ):
            if number < least:
                raise ConfigError(f"{option} is {number}: it must be {least} or more")
        if self.group_size < WORD_PLACES or self.group_size % WORD_PLACES:
            raise ConfigError(
                f"--group-size is {self.group_size}: it must be a multiple of {WORD_PLACES}, as {WORD_PLACES} codes "
                "lie in one word"
            )
        if self.layout != LAYOUTS[0] and self.format not in MODELOPT_FORMATS:
            raise ConfigError(
                f"--layout {self.layout} has no --format {self.format}; it has {', '.join(MODELOPT_FORMATS)}"
            )
        if not 0 <= self.smoothing <= 1:
            raise ConfigError(f"--smoothing is {self.smoothing:g}: it must be from 0 to 1")

    @property
    def needs_texts(self) -> bool:
        """Whether it cannot be done without texts."""
        has_static_scales = self.layout != LAYOUTS[0] and self.format == "fp8"
        return self.format in CALIBRATED_FORMATS or self.kv_cache is not None or has_static_scales


def choose_group_size(bounds: Sequence[int], most: int, name: str) -> int:
    """The largest group of `most` input features at most that ends at each of some bounds: a multiple of KERNEL_GROUP,
    if there is one, else of WORD_PLACES.

    Args:
        bounds: where the shares of ranks end, the last of which is the number of input features.
        most: a multiple of WORD_PLACES.
        name: of the matrix.

    Raises:
        ConfigError: there is none of WORD_PLACES features or more.
    """
    divisor = math.gcd(*bounds)
    sizes = (group for unit in (KERNEL_GROUP, WORD_PLACES) for group in range(most - most % unit, 0, -unit))
    found = next((group for group in sizes if divisor % group == 0), None)
    if found is None:
        shares = f", shared out over {len(bounds)} ranks," if bounds[1:] else ""
        raise ConfigError(
            f"{name}: {bounds[-1]} input features{shares} are no multiple of {WORD_PLACES}, as {WORD_PLACES} codes lie "
            f"in one word: use {'fewer ranks, or ' if shares else ''}--format fp8 or int8_sq"
        )
    return found
