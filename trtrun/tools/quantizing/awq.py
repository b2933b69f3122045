"""AWQ (arXiv:2306.00978) and scales that change no result.

What feeds a linear layer is divided by scales of its channels, and the layer's weights are multiplied by them, so that
what is hard to round becomes less so. AWQ searches on calibration texts for such scales by the size of activations, and
for ranges of groups, so that rounding weights to 4 bits changes what a layer computes least.

A scale is a^ratio, a the mean size of a channel's activations (equation 5), over a grid of ratios; the loss is the mean
square error of what the parent block puts out. Where the block is one product its error follows from the products of
its inputs alone, E|(W' - W) x|² = tr((W' - W) E[x xᵀ] (W' - W)ᵀ), as does that of each group of a row when its range
is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.experts_plan import ExpertsPlan
from trtrun.tools.quantizing.activations import Devices, Flow, Observer
from trtrun.tools.quantizing.formats import int4_codes, int4_grid, nearest_int4
from trtrun.tools.quantizing.plain_layer import PlainLayer, Weights


@dataclass(frozen=True)
class Pair:
    """What feeds linear layers, and these.

    Attributes:
        site: the inputs of the linear layers; see plain_layer.SITES.
        source: module that makes them: a norm, or a linear layer whose output features they are.
        consumers: the linear layers.
        shape: (heads of keys, query heads for each, features of a head) where each output feature of the source reaches
            the consumers as often as there are query heads for a head of values; None where it does once.
        plain: other modules with these inputs, which are not rounded.
    """

    site: str
    source: str
    consumers: tuple[str, ...]
    shape: tuple[int, int, int] | None = None
    plain: tuple[str, ...] = ()

    def shared(self, channels: Tensor) -> Tensor:
        """Means over what comes of one output feature of the source: channels [in] → [in]."""
        if self.shape is None:
            return channels
        return channels.view(self.shape).mean(1, keepdim=True).expand(self.shape).reshape(-1)

    def of_source(self, scale: Tensor) -> Tensor:
        """A scale [in] that is `shared`, for the source's output features."""
        return scale if self.shape is None else scale.view(self.shape)[:, 0].reshape(-1)


def norm_pairs(plan: DecoderPlan) -> Sequence[Pair]:
    """Norms and the linear layers behind them."""
    assert plan.input_norm is not None and plan.post_attention_norm is not None, "others are not known"
    behind_input = tuple(f"{plan.attention.name}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    behind_attention = tuple(name for _, gate, up, _ in _gated_blocks(plan) for name in (gate, up))
    plain: tuple[str, ...] = ()
    if isinstance(plan.mlp, ExpertsPlan):
        routers = [weight for weight in plan.mlp.weights() if weight.use == "plain"]
        plain = tuple(part.name.removesuffix(".weight") for weight in routers for part in weight.parts)
    return (
        Pair("attention", plan.input_norm.name, behind_input),
        Pair("mlp", plan.post_attention_norm.name, behind_attention, plain=plain),
    )


def linear_pairs(plan: DecoderPlan) -> Sequence[Pair]:
    """Linear layers whose output features are the inputs of others, but for what is between without mixing channels."""
    attention, shape = plan.attention.name, plan.attention.shape
    per_head = (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    return (
        Pair("output", f"{attention}.v_proj", (f"{attention}.o_proj",), per_head),
        *(Pair(site, up, (down,)) for site, _, up, down in _gated_blocks(plan)),
    )


def _gated_blocks(plan: DecoderPlan) -> Sequence[tuple[str, str, str, str]]:
    """The site of down, and the modules gate, up and down, of the feed-forward layer or of each of its experts."""
    mlp, usual = plan.mlp, ("gate_proj", "up_proj", "down_proj")
    if not isinstance(mlp, ExpertsPlan):
        assert isinstance(mlp, GatedMLPPlan), "others are not known"
        return [("down", *(f"{mlp.name}.{name}" for name in usual))]  # type: ignore[list-item]
    names = (mlp.names.gate, mlp.names.up, mlp.names.down)
    found = [
        (f"down.{expert}", *(f"{mlp.name}.{name.format(expert)}" for name in names))
        for expert in range(mlp.num_experts)
    ]
    shared = [] if mlp.shared is None else [("down.shared", *(f"{mlp.shared.name}.{name}" for name in usual))]
    return [*found, *shared]  # type: ignore[list-item]


def fold(weights: Weights, pair: Pair, scale: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer with a scale folded in.

    Args:
        weights: float32.
        pair: where.
        scale: [in] float32, positive, and `shared`.
        dtype: in which norms are stored: what their rounding changes is made up for by the consumers.
    """
    found = dict(weights)
    name = f"{pair.source}.weight"
    if weights[name].dim() == 1:  # a norm
        before, after = weights[name], (weights[name] / scale).to(dtype).float()
        is_fine = (after != 0) & after.isfinite()
        found[name] = torch.where(is_fine, after, before)
        scale = torch.where(is_fine, before / torch.where(is_fine, after, 1.0), 1.0)
    else:
        of_source = pair.of_source(scale)
        found[name] = weights[name] / of_source.unsqueeze(1)
        bias = f"{pair.source}.bias"
        if bias in weights:
            found[bias] = weights[bias] / of_source
    for consumer in (*pair.consumers, *pair.plain):
        found[f"{consumer}.weight"] = weights[f"{consumer}.weight"] * scale
    return found


def smooth(weights: Weights, pair: Pair, largest: Tensor, strength: float) -> Tensor:
    """SmoothQuant's scale (arXiv:2211.10438, equation 4): max|X|^strength / max|W|^(1 - strength), 1 for channels
    without any activation or weight.

    Args:
        weights: float32.
        pair: where.
        largest: [in] float32: the largest activation of each channel.
        strength: alpha.
    """
    of_weights = torch.stack([weights[f"{name}.weight"].abs().amax(0) for name in pair.consumers]).amax(0)
    scale = largest.pow(strength) / of_weights.pow(1 - strength)
    return torch.where((largest > 0) & (of_weights > 0), scale, 1.0).clamp(min=1e-5)


NUM_RATIOS = 20
"""Ratios of the grid: 0, 0.05, … 0.95. With 0 nothing is scaled."""

RANGES = tuple(1 - step / 40 for step in range(20))
"""Shares of the whole range that groups' ranges are cut to: 1, 0.975, … 0.525."""

LEAST_TOKENS = 16
"""Tokens that a search needs: what an expert makes of fewer says little of it."""

_LEAST_SCALE = 1e-4
_NUMBERS_AT_ONCE = 1 << 24
"""Numbers of a matrix whose ranges are searched at once."""

Loss = Callable[[Tensor], float]
"""A scale [in] of a pair's channels → the error that rounding makes then."""


@dataclass(frozen=True)
class Awq:
    """The search in one layer.

    Attributes:
        layers: the plain layer in each slot.
        masters: its weights there, float32.
        devices: of the slots.
        seen: in the layer, with products.
        hidden: what enters the layer.
        group_size: by the last name of a module.
        dtype: of scales and norms in files.
        is_symmetric: whether there are no zero points.
    """

    layers: Sequence[PlainLayer]
    masters: Sequence[Weights]
    devices: Devices
    seen: Observer
    hidden: Flow
    group_size: Callable[[str], int]
    dtype: torch.dtype
    is_symmetric: bool = False

    def run(self) -> tuple[Weights, dict[str, float]]:
        """The layer's weights with scales folded in and ranges cut, float32 in the first slot, for rounding to nearest;
        and the ratio for each site. Sites that saw few tokens have none, and weights behind them stay as they are."""
        plan = self.layers[0].plan
        inputs_norm, behind_norm = norm_pairs(plan)
        scales: list[tuple[Pair, Tensor]] = []
        ratios: dict[str, float] = {}

        def search(pair: Pair, loss: Loss) -> None:
            ratios[pair.site], scale = self._search(pair, loss)
            scales.append((pair, scale))

        attended = self.hidden.map(lambda slot, x: self.layers[slot].norm(plan.input_norm, x))
        search(inputs_norm, self._block_loss(inputs_norm, attended, PlainLayer.attention))
        normed = self._mlp_inputs(attended)
        del attended
        search(behind_norm, self._block_loss(behind_norm, normed, PlainLayer.mlp))
        for pair in linear_pairs(plan):
            if self.seen.count(pair.site) >= LEAST_TOKENS:
                search(pair, self._product_loss(pair))
        weights = self.masters[0]
        for pair, scale in scales:
            weights = fold(weights, pair, scale, self.dtype)
        return self._cut_ranges(weights, dict((pair.site, scale) for pair, scale in scales)), ratios

    def _mlp_inputs(self, attended: Flow) -> Flow:
        """What gate_proj and up_proj get."""
        found = Flow(self.devices)
        for index in range(len(attended)):
            layer = self.layers[self.devices.slot(index)]
            hidden = self.hidden[index] + layer.attention(attended[index])
            found.append(layer.norm(layer.plan.post_attention_norm, hidden))
        return found

    def _search(self, pair: Pair, loss: Loss) -> tuple[float, Tensor]:
        """The ratio with the least loss, and its scale; the first of several."""
        sizes = pair.shared(self.seen.mean_size(pair.site))
        best: tuple[float, float, Tensor] | None = None
        for step in range(NUM_RATIOS):
            scale = sizes.pow(step / NUM_RATIOS).clamp(min=_LEAST_SCALE)
            scale = scale / (scale.max() * scale.min()).sqrt()
            found = loss(scale)
            if best is None or found < best[0]:
                best = found, step / NUM_RATIOS, scale
        assert best is not None
        return best[1], best[2]

    def _rounded(self, weight: Tensor, name: str, scale: Tensor) -> Tensor:
        """What weights are that are scaled, rounded and scaled back, float32."""
        scaled = weight * scale
        return nearest_int4(scaled, self.group_size(name), self.dtype, self.is_symmetric).div_(scale)

    def _block_loss(self, pair: Pair, inputs: Flow, block: Callable[[PlainLayer, Tensor], Tensor]) -> Loss:
        """The error of what a block of the layer puts out."""
        expected = inputs.map(lambda slot, x: block(self.layers[slot], x))

        def loss(scale: Tensor) -> float:
            changed = []
            for slot, layer in enumerate(self.layers):
                own = scale.to(self.devices.slots[slot])
                rounded = {}
                for name in (f"{name}.weight" for name in pair.consumers):
                    rounded[name] = self._rounded(self.masters[slot][name], name, own).to(self.devices.dtype)
                changed.append(layer.with_weights(rounded))
            errors = []
            for index in range(len(inputs)):
                found = block(changed[self.devices.slot(index)], inputs[index])
                errors.append((found.float() - expected[index].float()).square().sum(dtype=torch.float64))
            return sum(float(error) for error in errors)

        return loss

    def _product_loss(self, pair: Pair) -> Loss:
        """The error of one product, from the products of its inputs."""
        (consumer,) = pair.consumers
        name = f"{consumer}.weight"
        weight, products = self.masters[0][name], self.seen.products(pair.site)

        def loss(scale: Tensor) -> float:
            difference = self._rounded(weight, name, scale) - weight
            return float(((difference @ products) * difference).sum(dtype=torch.float64))

        return loss

    def _cut_ranges(self, weights: Weights, scales: Mapping[str, Tensor]) -> Weights:
        """Weights with the range of each group of each row cut to where its error is least. Queries and keys keep
        theirs, as their products are not what the loss looks at (AWQ's own rule)."""
        plan = self.layers[0].plan
        found = dict(weights)
        for pair in (*norm_pairs(plan), *linear_pairs(plan)):
            if pair.site not in scales:
                continue
            names = [name for name in pair.consumers if not name.endswith(("q_proj", "k_proj"))]
            scale = scales[pair.site]
            products = self.seen.products(pair.site) / scale / scale.unsqueeze(1)
            for name in (f"{name}.weight" for name in names):
                size = self.group_size(name)
                places = torch.arange(len(scale) // size, device=products.device)
                blocks = torch.unflatten(torch.unflatten(products, 1, (-1, size)), 0, (-1, size))[places, :, places]
                weight, step = weights[name], max(1, _NUMBERS_AT_ONCE // len(scale))
                parts = [weight[row : row + step] for row in range(0, len(weight), step)]
                found[name] = torch.cat(
                    [cut_ranges(part, blocks, size, self.dtype, self.is_symmetric) for part in parts]
                )
        return found


def cut_ranges(weight: Tensor, products: Tensor, size: int, dtype: torch.dtype, is_symmetric: bool) -> Tensor:
    """weight [out, in] float32 with each group's numbers cut to the range that rounds best.

    Args:
        weight: [out, in] float32.
        products: [groups, size, size] float32: means of x xᵀ of each group's inputs.
        size: of a group.
        dtype: of scales.
        is_symmetric: whether there are no zero points.
    """
    groups = torch.unflatten(weight, 1, (-1, size))
    largest = groups.abs().amax(-1, keepdim=True)
    best, best_error = groups, torch.full_like(largest.squeeze(-1), torch.inf)
    for share in RANGES:
        most = largest * share
        cut = groups.clamp(-most, most)
        scale, zero = int4_grid(cut, dtype, is_symmetric)
        difference = int4_codes(cut, scale, zero).sub_(zero).mul_(scale).sub_(groups)
        error = torch.einsum("ogi,gij,ogj->og", difference, products, difference)
        is_better = error < best_error
        best = torch.where(is_better.unsqueeze(-1), cut, best)
        best_error = torch.where(is_better, error, best_error)
    return best.flatten(1)
