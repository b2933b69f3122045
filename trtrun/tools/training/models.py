"""Models to train and to learn from, by transformers' classes.

It knows checkpoints on disk and forwards of whole sequences. It does not know what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from trtrun.errors import CheckpointError, LibraryPanicError, RustLibrary, one_line, shorten_path

logging.set_verbosity_error()
logging.disable_progress_bar()


@dataclass(frozen=True)
class TargetOutput:
    """What the frozen target says of some texts.

    Attributes:
        hidden: [rows, length, hidden] behind the final norm, in the target's dtype.
        head: makes logits of it, as the target does.
        tapped: the residual stream at each boundary that was asked for, as `hidden`.
    """

    hidden: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    tapped: Sequence[torch.Tensor] = ()

    def log_probs(self, vocab_size: int) -> torch.Tensor:
        """[rows, length, vocab_size] float32 over the first tokens of the vocabulary, which both models know."""
        with torch.no_grad():
            return self.head(self.hidden)[..., :vocab_size].float().log_softmax(-1)


class Target:
    """The target: frozen, in the dtype of its checkpoint, or float32 on CPUs, which is exact for bfloat16 weights.

    Args:
        path: of its checkpoint.
        device: to compute on.

    Attributes:
        model: transformers' module.
        vocab_size: of its tokens.

    Raises:
        CheckpointError: transformers cannot load it.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
        self.model = load_model(path, dtype).to(device).eval().requires_grad_(False)
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self._divisor: float = getattr(config, "logits_scaling", None) or 1.0
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)

    def head_weight(self) -> torch.Tensor:
        """[vocabulary, hidden]: what makes logits of hidden states, in the target's dtype."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    def embedding_weight(self) -> torch.Tensor:
        """[vocabulary, hidden]: what stands for tokens, in the target's dtype."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    def read(self, text: torch.Tensor, boundaries: Sequence[int] = ()) -> TargetOutput:
        """Run [rows, length] int64 tokens. Padding behind a row does not change it: the target looks back only.

        Args:
            text: the tokens.
            boundaries: where to tap the residual stream: i is what enters layer i, the number of layers what leaves the
                last one.
        """
        tapped: dict[int, torch.Tensor] = {}

        def tap(boundary: int, _: nn.Module, arguments: tuple[Any, ...]) -> None:
            tapped[boundary] = arguments[0]

        base = self.model.get_decoder()
        with torch.no_grad(), ExitStack() as stack:
            for boundary in boundaries:
                module = base.layers[boundary] if boundary < len(base.layers) else base.norm
                stack.callback(module.register_forward_pre_hook(partial(tap, boundary)).remove)
            hidden = base(input_ids=text, use_cache=False).last_hidden_state
        return TargetOutput(hidden, self._logits, [tapped[boundary] for boundary in boundaries])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output matrix, and what transformers' forward does behind it (Granite, Gemma 2)."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden) / self._divisor
        return logits if self._cap is None else (logits / self._cap).tanh() * self._cap


def tell_modules(model: nn.Module, tell: Callable[[], None]) -> None:
    """Have `tell` called whenever a module of the model has computed, and whenever a gradient of it is there: for those
    who watch whether it gets on."""

    # Functions, which copies of the model share.
    def after_forward(_module: nn.Module, _arguments: Any, _output: Any) -> None:
        tell()

    def after_gradient(_value: torch.Tensor) -> None:
        tell()

    for module in model.modules():
        module.register_forward_hook(after_forward)
    for value in model.parameters():
        if value.requires_grad:
            value.register_post_accumulate_grad_hook(after_gradient)  # type: ignore[no-untyped-call]


def load_model(path: Path, dtype: torch.dtype | str) -> Any:
    """A causal language model.

    Raises:
        CheckpointError: transformers cannot load it.
    """
    try:
        with RustLibrary("safetensors"):
            return AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
    except (LibraryPanicError, OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"transformers cannot load {shorten_path(path)}: {one_line(error)}") from None


def read_config(path: Path) -> dict[str, Any]:
    """What config.json of a checkpoint says, of the model for text where it describes several.

    Raises:
        CheckpointError: transformers does not know the model.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return dict(config.get_text_config().to_dict())
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"transformers cannot read {shorten_path(path)}: {one_line(error)}") from None


def check_attends_to_all(config: dict[str, Any], length: int, name: str) -> None:
    """Raise CheckpointError for attention with a window shorter than the rows: masks of training have none."""
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True) and window < length:
        raise CheckpointError(
            f"{name} attends to a window of {window} tokens, and rows have up to {length}: set --max-length {window}"
        )


def stored_dtype(path: Path) -> torch.dtype:
    """The dtype of a checkpoint's weights: that of config.json, float32 where it names none."""
    value = read_config(path).get("dtype")
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
