"""One decoder layer from its tensors to those of the quantized checkpoint, and what that changes.

It knows a layer's plan, a format, and hidden states that enter the layer. It does not know files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trtrun.errors import CheckpointError, ConfigError
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.linear.quantization.base import STORED_QUANTIZATIONS, StoredQuantizations, TensorSlice
from trtrun.linear.stored.layout import StoredLinear
from trtrun.models.config import ModelConfig
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.models.experts_plan import ExpertsPlan
from trtrun.tools.quantizing.activations import Devices, Flow, LargestKeys, Observer
from trtrun.tools.quantizing.awq import Awq, fold, linear_pairs, norm_pairs, smooth
from trtrun.tools.quantizing.formats import (
    FP8_MOST,
    INT8_MOST,
    Format,
    find_format,
    quantization_config,
    round_fp8_static,
    round_fp8_tensor,
)
from trtrun.tools.quantizing.plain_layer import PlainLayer, Weights, known_plans
from trtrun.tools.quantizing.settings import (
    CALIBRATED_FORMATS,
    LAYOUTS,
    WORD_PLACES,
    QuantizingSettings,
    choose_group_size,
)
from trtrun.weights.weight import Share

_QUANTIZED = ("linear", "expert")
"""Uses of weights that are quantized."""

_KV_MOST = {"fp8": FP8_MOST, "int8": float(INT8_MOST)}


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer of the quantized checkpoint.

    Attributes:
        tensors: by name, on the host.
        notes: for the report: errors, scales, ratios.
    """

    tensors: Mapping[str, Tensor]
    notes: Mapping[str, Any]


class LayerQuantizer:
    """Quantizes the layers of one model.

    Args:
        config: of the model.
        settings: what to.
        devices: where.
        dtype: of what stays plain, and of scales.
        longest: tokens of the longest text.

    Attributes:
        config: `quantization_config` of the checkpoint.
        stored: what that says of each matrix.

    Raises:
        ConfigError: layers of this kind, or of these sizes, cannot be quantized so.
    """

    def __init__(
        self,
        config: ModelConfig,
        settings: QuantizingSettings,
        devices: Devices,
        dtype: torch.dtype,
        longest: int,
    ) -> None:
        self._settings, self._devices, self._dtype = settings, devices, dtype
        self._format = find_format(settings)
        _check_experts(config, settings)
        self._sizes = _choose_sizes(config, settings, self._format)
        self.config = quantization_config(self._format, self._sizes, settings.kv_cache, ["lm_head", *_routers(config)])
        self.stored: StoredQuantizations = STORED_QUANTIZATIONS.get(self.config["quant_method"])(self.config)
        self._rotaries = []
        for slot in devices.slots:
            rotary = RotaryEmbedding(config.rope, config.head_dim, devices.dtype, slot)
            rotary.reserve(longest)
            self._rotaries.append(rotary)

    @property
    def rounds_activations(self) -> bool:
        """Whether the format asks for it."""
        return self._format.rounding is not None or self._format.has_static_scales

    def plain(self, plan: DecoderPlan, weights: Weights) -> list[PlainLayer]:
        """The layer in each slot."""
        copies = self._devices.copies(weights, self._devices.dtype)
        return [PlainLayer(plan, copy, rotary) for copy, rotary in zip(copies, self._rotaries, strict=True)]

    def quantized(self, plan: DecoderPlan, tensors: Mapping[str, Tensor]) -> list[PlainLayer]:
        """The layer with the numbers that the tensors of the quantized checkpoint stand for, in each slot."""
        weights = {}
        for weight in plan.weights():
            for part in weight.parts:
                stored = self.stored(part.name) if weight.use in _QUANTIZED else None
                if stored is None:
                    weights[part.name] = tensors[part.name]
                    continue
                assert isinstance(stored, StoredLinear)
                whole = TensorSlice(part.name, part.shape, tuple(map(range, part.shape)))
                slices = stored.layout.slices(whole)
                device = self._devices.slots[0]
                read = {
                    end: tensors[it.name].reshape(it.shape).to(device)
                    for end, it in slices.items()
                    if it.name in tensors
                }
                weights[part.name] = stored.layout.form(whole, read).dequantize()
        return self.plain(plan, weights)

    def rounding(self, layers: Sequence[PlainLayer], tensors: Mapping[str, Tensor]) -> list[PlainLayer]:
        """Layers that round activations, too, as the format asks for, with what is stored for that."""
        by_token = self._format.rounding
        if by_token is not None:
            return [replace(layer, rounding=lambda site, inputs: by_token(inputs)) for layer in layers]
        found = []
        for layer, slot in zip(layers, self._devices.slots, strict=True):
            scales = {
                site: tensors[f"{names[0]}.input_scale"].to(slot) for site, names in inputs_of(layer.plan).items()
            }
            rounding = partial(_round_by_site, scales)
            found.append(replace(layer, rounding=rounding))
        return found

    def quantize(self, plan: DecoderPlan, weights: Weights, hidden: Flow) -> tuple[QuantizedLayer, Flow]:
        """Quantize a layer.

        Args:
            plan: of the layer.
            weights: its tensors, float32 in the first slot.
            hidden: what enters it; empty without texts.

        Returns:
            The layer, and what leaves the plain one.
        """
        notes: dict[str, Any] = {}
        layers = self.plain(plan, weights)
        seen = Observer(self._devices, with_products=self._settings.format == "int4_awq")
        is_seen = self._settings.format in CALIBRATED_FORMATS or self._format.has_static_scales
        watches = [seen.watch(slot) for slot in range(len(layers))]
        expected = hidden.map(
            lambda slot, x: layers[slot].forward(x, watches[slot]) if is_seen else layers[slot].forward(x)
        )
        rounded = self._prepare(plan, layers, weights, seen, hidden, notes)
        tensors = self._store(plan, rounded)
        if self._format.has_static_scales:
            tensors |= _input_scales(plan, seen)
        quantized = self.quantized(plan, tensors)
        if len(hidden):
            largest = [LargestKeys() for _ in quantized]
            found = hidden.map(lambda slot, x: quantized[slot].forward(x, largest[slot].watch))
            notes["error"] = relative_error(hidden, expected, found)
            if self.rounds_activations:
                rounding = self.rounding(quantized, tensors)
                found = hidden.map(lambda slot, x: rounding[slot].forward(x))
                notes["error_with_rounded_activations"] = relative_error(hidden, expected, found)
            if self._settings.kv_cache is not None:
                used = largest[: len(hidden)]
                tensors |= self._kv_scales(plan, [it.result() for it in used], notes)
        return QuantizedLayer(tensors, notes), expected

    def _prepare(
        self,
        plan: DecoderPlan,
        layers: Sequence[PlainLayer],
        weights: Weights,
        seen: Observer,
        hidden: Flow,
        notes: dict[str, Any],
    ) -> Weights:
        """What is to be rounded to nearest."""
        if self._settings.format == "int8_sq":
            for pair in norm_pairs(plan):
                scale = smooth(weights, pair, seen.largest(pair.site), self._settings.smoothing)
                weights = fold(weights, pair, scale, self._dtype)
        if self._settings.format == "int4_awq":
            symmetric = self._format.is_symmetric
            masters = [weights, *self._devices.copies(weights)[1:]]
            search = Awq(layers, masters, self._devices, seen, hidden, self._size_of, self._dtype, symmetric)
            weights, notes["ratios"] = search.run()
            few = [pair.consumers[0] for pair in linear_pairs(plan) if pair.site not in notes["ratios"]]
            notes |= {"rounded_to_nearest": few} if few else {}
        return weights

    def _size_of(self, name: str) -> int:
        return self._sizes[name.removesuffix(".weight").rpartition(".")[2]]

    def _store(self, plan: DecoderPlan, weights: Weights) -> dict[str, Tensor]:
        """All tensors of the layer as files have them, on the host."""
        found: dict[str, Tensor] = {}
        for weight in plan.weights():
            values = [weights[part.name] for part in weight.parts]
            for part, value in zip(weight.parts, values, strict=True):
                if weight.use not in _QUANTIZED:
                    found[part.name] = value.to(self._dtype).cpu()
                    continue
                if self._format.round is not None:
                    made = self._format.round(value, self._size_of(part.name), self._dtype)
                else:
                    together = values if part.name.startswith(plan.attention.name) else [value]
                    made = round_fp8_tensor(value, torch.stack([it.abs().amax() for it in together]).amax())
                module = part.name.removesuffix("weight")
                found |= {f"{module}{end}": tensor.cpu().contiguous() for end, tensor in made.items()}
        for name, value in found.items():
            if value.dtype.is_floating_point and not bool(value.float().isfinite().all()):
                raise CheckpointError(
                    f"{name} has numbers that are not finite in {self._dtype}: choose another --dtype"
                )
        return found

    def _kv_scales(
        self, plan: DecoderPlan, largest: Sequence[tuple[float, float]], notes: dict[str, Any]
    ) -> dict[str, Tensor]:
        """One scale for the keys of the layer, and one for its values."""
        assert self._settings.kv_cache is not None
        most = _KV_MOST[self._settings.kv_cache]
        found = {}
        for index, name in enumerate(("k_scale", "v_scale")):
            value = max(it[index] for it in largest) / most
            scale = torch.tensor([value or 1.0], dtype=torch.float32)
            found[f"{plan.attention.name}.{name}"] = scale
            notes[name] = float(f"{float(scale):.4g}")
        return found


def inputs_of(plan: DecoderPlan) -> dict[str, tuple[str, ...]]:
    """The linear layers by the site where they get their inputs."""
    return {pair.site: pair.consumers for pair in (*norm_pairs(plan), *linear_pairs(plan))}


def _input_scales(plan: DecoderPlan, seen: Observer) -> dict[str, Tensor]:
    """A scale for the activations of each matrix, by the largest that was seen."""
    found: dict[str, Tensor] = {}
    for site, names in inputs_of(plan).items():
        scale = (seen.largest(site).amax() / FP8_MOST).cpu()
        found |= {f"{name}.input_scale": torch.where(scale > 0, scale, 1.0) for name in names}
    return found


def _round_by_site(scales: Mapping[str, Tensor], site: str, inputs: Tensor) -> Tensor:
    return round_fp8_static(inputs, scales[site])


def _check_experts(config: ModelConfig, settings: QuantizingSettings) -> None:
    """Raise ConfigError where a model has experts, and the layout has one scale for what each of them is given."""
    has_experts = any(isinstance(plan.mlp, ExpertsPlan) for plan in known_plans(config))
    if has_experts and settings.layout != LAYOUTS[0]:
        raise ConfigError(
            f"{config.architecture} has experts, which --layout {settings.layout} is not for: use --layout {LAYOUTS[0]}"
        )


def _routers(config: ModelConfig) -> list[str]:
    """Modules of layers of experts that are no experts, which stay plain."""
    plans = [plan.mlp for plan in known_plans(config) if isinstance(plan.mlp, ExpertsPlan)]
    weights = [weight for plan in plans for weight in plan.weights() if weight.use == "plain"]
    return [part.name.removesuffix(".weight") for weight in weights for part in weight.parts]


def _choose_sizes(config: ModelConfig, settings: QuantizingSettings, made: Format) -> dict[str, int]:
    """The size of groups by the last name of each module that is quantized; ModelOpt has one for all."""
    found: dict[str, int] = {}
    for plan in known_plans(config):
        for weight in plan.weights():
            for part in weight.parts if weight.use in _QUANTIZED else ():
                features, inputs = part.shape
                if made.has_groups and features % WORD_PLACES:
                    raise ConfigError(
                        f"{part.name}: {features} output features are no multiple of {WORD_PLACES}, as zero points lie "
                        f"{WORD_PLACES} in one word: use --format fp8 or int8_sq"
                    )
                name = part.name.removesuffix(".weight").rpartition(".")[2]
                if not made.has_groups:
                    found[name] = settings.group_size
                else:
                    bounds = [part.axes[1].held(Share(rank, settings.tp_size)).stop for rank in range(settings.tp_size)]
                    bounds = bounds if part.is_output else [inputs]
                    size = choose_group_size(bounds, settings.group_size, part.name)
                    # Experts may have fewer inputs than other layers with a matrix of that name.
                    found[name] = math.gcd(found.get(name, size), size)
    if made.has_groups and not made.weights:
        return dict.fromkeys(found, math.gcd(*found.values()))
    return found


def relative_error(before: Flow, expected: Flow, found: Flow) -> float:
    """|found - expected| / |expected - before| over all tokens: the error of what a layer adds."""
    wrong = whole = 0.0
    for index in range(len(expected)):
        right = expected[index].float()
        wrong += float((found[index].float() - right).square().sum(dtype=torch.float64))
        whole += float((right - before[index].float()).square().sum(dtype=torch.float64))
    return round_figure(math.sqrt(wrong / whole)) if whole else 0.0


def round_figure(value: float) -> float:
    """Four digits, for reports."""
    return float(f"{value:.4g}")
