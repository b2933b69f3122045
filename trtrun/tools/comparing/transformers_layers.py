"""A model's first layers beside transformers', in float32 on the CPU: which one parts first, and which half of it.

What is compared is the residual stream in front of each layer and behind the last one, and of the first layer that
parts what its attention and its feed-forward layer add. It knows the names that most modeling files of transformers
have for these; where a file has others, the layer alone is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parallel.transports.solo import SoloCommunicator
from trtrun.errors import CheckpointError, ConfigError, one_line
from trtrun.kvcache.row_states import StateSpace
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import shared_of
from trtrun.kvcache.store import KVStore
from trtrun.loading.loading import load_model
from trtrun.models.config import ModelConfig
from trtrun.models.decoder import Taps
from trtrun.weights.weight import Share

MOST_APART = 1e-3
"""Norm of a difference by the norm of what transformers has, from which on it counts: float32 makes some 1e-6 a
layer, a wrong operation 1e-2 and more."""

_BLOCK = 16
_ATTENTION = ("self_attn", "attention", "linear_attn")
_FEED_FORWARD = ("mlp", "block_sparse_moe", "feed_forward")
_HALVES = ("attention", "feed-forward layer")


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        apart: for each boundary, how far the residual stream is apart: in front of layer 0, of layer 1, …, and last
            behind the norm that follows the layers.
        differs: the first boundary that counts as apart; None where none does.
        half: which half of the layer in front of it parts, "attention" or "feed-forward layer"; empty where that is
            not known.
        tensors: in front of the names of that half's tensors.
    """

    apart: tuple[float, ...]
    differs: int | None = None
    half: str = ""
    tensors: str = ""

    @property
    def verdict(self) -> str:
        """What was found, in a line."""
        layers = len(self.apart) - 2
        if self.differs is None:
            return f"{layers} layers are transformers': the residual stream is apart by {max(self.apart):.1e} at most"
        far = f"apart by {self.apart[self.differs]:.1e}"
        if self.differs == 0:
            return f"embedded tokens are {far}: look at model.embed_tokens.weight, and at a factor of embeddings"
        if self.differs == layers + 1:
            return f"behind the last norm tokens are {far}, in front of it not: look at model.norm.weight"
        where = f", in its {self.half} ({self.tensors})" if self.half else ""
        return f"layer {self.differs - 1} is the first that differs{where}: behind it the residual stream is {far}"


def compare(path: Path, config: ModelConfig, num_layers: int, tokens: Sequence[int]) -> Comparison:
    """Run the first layers of a checkpoint on a text, here and in transformers.

    Args:
        path: a Hugging Face directory.
        config: what its config.json says.
        num_layers: that are looked at, at most all; all where layers share keys and values, or have inputs of their
            own.
        tokens: the text, two tokens at least.

    Raises:
        CheckpointError: the weights are not there or not whole, or transformers cannot load them.
        ConfigError: transformers is not installed.
    """
    if config.layer_inputs is not None or any(map(shared_of, config.keeps(Share(0, 1)))):
        num_layers = config.num_layers  # the first ones alone are another model
    num_layers = min(num_layers, config.num_layers)
    own = replace(config, num_layers=num_layers, layers=config.layers[:num_layers])
    expected, halves = _run_transformers(path, num_layers, tokens)
    found, own_halves = _run(path, own, tokens)
    apart = tuple(_distance(*pair) for pair in zip(found, expected, strict=True))
    differs = next((index for index, far in enumerate(apart) if not far < MOST_APART), None)
    if differs is None or not 0 < differs <= num_layers:
        return Comparison(apart, differs)
    pairs = zip(own_halves[differs - 1], halves[differs - 1], strict=True)
    parts = [one is not None and other is not None and not _distance(one, other) < MOST_APART for one, other in pairs]
    if not any(parts):
        return Comparison(apart, differs)
    plan, half = config.layers[differs - 1], parts.index(True)
    name = getattr(getattr(plan, ("attention", "mlp")[half], None), "name", f"model.layers.{differs - 1}")
    return Comparison(apart, differs, _HALVES[half], name)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


Halves = list[tuple[torch.Tensor | None, torch.Tensor | None]]
"""What attention and the feed-forward layer of each layer make, [tokens, hidden]; None where it is not known."""


class _Kept:
    """A part of a layer, whose last result is kept."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.made: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, x: Any) -> torch.Tensor:
        made: torch.Tensor = self._part(x)
        self.made = made.clone()
        return made


def _watch(layer: Any) -> list[_Kept | None]:
    """Have a layer keep what its halves make, where it has the usual parts."""
    attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
    halves: list[_Kept | None] = [None, None]
    if attention is not None and hasattr(attention, "output"):
        halves[0] = attention.output = _Kept(attention.output)
    if mlp is not None:
        halves[1] = layer.mlp = _Kept(mlp)
    return halves


def _run(path: Path, config: ModelConfig, tokens: Sequence[int]) -> tuple[list[torch.Tensor], Halves]:
    """The residual stream at each boundary, [tokens, hidden], and the halves of each layer."""
    device, count = torch.device("cpu"), len(tokens)
    model, _ = load_model(path, config, SoloCommunicator(), device, torch.float32)
    blocks = -(-count // _BLOCK)
    store = KVStore(model.keeps, 1 + blocks, _BLOCK, torch.float32, device, state_space=StateSpace(1, 1, True))
    watched = [_watch(layer) for layer in model._layers]
    positions, tables = torch.arange(count), torch.arange(1, 1 + blocks).unsqueeze(0)
    batch = AttentionBatch([AttentionSegment(0, 1, count, tables, positions.unsqueeze(0))], _BLOCK)
    boundaries = (*range(config.num_layers), config.num_layers, config.num_layers + 1)
    taps = Taps(boundaries, torch.empty((count, len(boundaries), config.hidden_size)))
    model.forward(torch.tensor(tokens), positions, batch, store, taps=taps)
    made = [[None if half is None else half.made for half in halves] for halves in watched]
    return list(taps.kept.unbind(1)), [(one, other) for one, other in made]


def _run_transformers(path: Path, num_layers: int, tokens: Sequence[int]) -> tuple[list[torch.Tensor], Halves]:
    """The same of transformers."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging as told
    except ImportError:
        raise ConfigError("transformers is not installed: pip install 'trtrun[train]'") from None
    told.set_verbosity_error()  # about the layers that are left out
    told.disable_progress_bar()
    try:
        described = AutoConfig.from_pretrained(path)
        text = described.get_text_config()
        text.num_hidden_layers = num_layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:num_layers]
        model = AutoModelForCausalLM.from_pretrained(
            path, config=described, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    except Exception as error:  # whatever transformers has to say
        raise CheckpointError(f"{path}: transformers cannot load it: {one_line(error)}") from error
    layers, norm = _layers_of(model), []
    kept: list[list[torch.Tensor | None]] = [[None, None] for _ in layers]
    for layer, halves in zip(layers, kept, strict=True):
        for half, names in enumerate((_ATTENTION, _FEED_FORWARD)):
            part = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
            if part is not None:
                part.register_forward_hook(_keep(halves, half))
    layers[-1].register_forward_hook(lambda module, given, made: norm.append(_first(made)))
    with torch.inference_mode():
        states = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
    streams = [*states[:num_layers], norm[-1], states[-1]]
    return [stream[0] for stream in streams], [(one, other) for one, other in kept]


def _layers_of(model: Any) -> Sequence[Any]:
    """The decoder layers of a model of transformers."""
    found = [module for name, module in model.named_modules() if name.split(".")[-1] == "layers"]
    texts = [module for module in found if any(hasattr(module[0], name) for name in _ATTENTION)] if found else []
    if not texts:
        raise CheckpointError(f"{type(model).__name__} of transformers has no layers that are known here")
    layers: Sequence[Any] = max(texts, key=len)
    return layers


def _keep(halves: list[torch.Tensor | None], half: int) -> Any:
    def hook(module: Any, given: Any, made: Any) -> None:
        halves[half] = _first(made)[0].reshape(-1, _first(made).shape[-1]).clone()

    return hook


def _first(made: Any) -> torch.Tensor:
    tensor: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return tensor
