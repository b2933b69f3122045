"""Makes the linear layers of one rank, and the tensors beside them, of weights that a loader brings. Plans of layers
build with it.

It knows its rank's group. It does not know files, where in the model a weight stands, or what else the process holds.
"""

from __future__ import annotations

import torch

from parallel.communicator import Communicator
from trtrun.attention.backend import AttentionBackend, attention_backend
from trtrun.attention.latents import LatentBackend, latent_backend
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.torch.operations import HeadProducts, Product
from trtrun.kvcache.byte_codes import LARGEST, LEAST_SCALE, MOST_SCALE
from trtrun.kvcache.formats import ByteKV, KVFormat
from trtrun.layers.decoder_layer import RowParallelLinear
from trtrun.layers.experts import Padding
from trtrun.layers.layer_inputs import LayerInputs
from trtrun.linear.layer import AdaptedLayers, Linear
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import Quantization, Tensors
from trtrun.weights.weight import Axis, Weight
from trtrun.weights.weight_loader import WeightLoader

_MADE_UP_MOST = 64.0
"""The largest key or value that made-up scales are for."""


class WeightReader:
    """Builds with the weights of one rank.

    Args:
        loader: of them.
        communicator: of the tensor-parallel group.
        batch_invariant: see `Quantization.apply`.
        kv_format: how the store that attention will meet keeps keys and values.
        adapted: collects the linear layers that may have adapters, which are those of the model's layers; None without.

    Attributes:
        layer_inputs: of the layers that are built; None where they have none.
        padding: of the model's forwards, for layers that ask.
    """

    def __init__(
        self,
        loader: WeightLoader,
        communicator: Communicator,
        batch_invariant: bool,
        kv_format: KVFormat,
        adapted: AdaptedLayers | None = None,
    ) -> None:
        self.device, self.share, self.dtype = loader.device, loader.share, loader.dtype
        self.communicator = communicator
        self._loader = loader
        self._batch_invariant = batch_invariant
        self._kv_format = kv_format
        self._adapted = adapted
        self._backends: dict[int, AttentionBackend] = {}
        self._latents: LatentBackend | None = None
        self.layer_inputs: LayerInputs | None = None
        self.padding = Padding()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._loader.bytes_read

    def close(self) -> None:
        """Close the files and report completion."""
        self._loader.close()

    def release_buffer(self) -> None:
        """Give the packing buffer back; the next packed weight maps another."""
        self._loader.release_buffer()

    def attention(self, head_dim: int) -> AttentionBackend:
        """What attends over heads of a size: the same for all layers, which share its scratch memory."""
        if head_dim not in self._backends:
            self._backends[head_dim] = attention_backend(self.device, self.dtype, head_dim, self._kv_format)
        return self._backends[head_dim]

    def latent_attention(self, width: int) -> LatentBackend:
        """What attends over latents of so many numbers: the same for all layers; errors as of `latent_backend`."""
        if self._latents is None:
            self._latents = latent_backend(self.device, self.dtype, width, self._kv_format)
        return self._latents

    def kv_scales(self, attention: str, keys: Axis) -> torch.Tensor | None:
        """The scales of a layer's keys and values, where its store has none of tokens.

        Args:
            attention: in front of the layer's names.
            keys: their features.

        Returns:
            [2, this rank's KV heads] float32 on the device, numbers of bfloat16, or None.

        Raises:
            CheckpointError: see `load_kv_scales`.
        """
        if not isinstance(self._kv_format, ByteKV) or not self._kv_format.has_layer_scales:
            return None
        heads = keys.units(self.share)
        scales = self._loader.kv_scales(attention, keys.size, heads)
        if scales is None:  # dummy weights have made-up scales
            scales = torch.full((2, len(heads)), _MADE_UP_MOST / LARGEST[self._kv_format.kind])
        return scales.clamp(LEAST_SCALE, MOST_SCALE).to(torch.bfloat16).float().to(self.device)

    def linear(
        self,
        weight: Weight,
        bias: Weight | torch.Tensor | None = None,
        *,
        present: torch.Tensor | None = None,
        is_adapted: bool = True,
    ) -> Linear:
        """A linear layer of `weight` [out, in] and `bias` [out], which may be read already; `present` is the dense
        weight where it is there. What is not of the model's layers has no adapters."""
        cut, held, tensors = weight.cut(self.share), self._loader.held(weight), self._loader.load(weight, present)
        of_bias, invariant = self.tensor(bias) if isinstance(bias, Weight) else bias, self._batch_invariant
        if self._adapted is None or weight.use != "linear" or not is_adapted:
            return Linear(cut.shape, held, tensors, of_bias, batch_invariant=invariant)
        return self._adapted.make(cut, held, tensors, of_bias, self.dtype, batch_invariant=invariant)

    def row_parallel(self, weight: Weight, bias: Weight | None = None) -> RowParallelLinear:
        """A linear layer whose input features are shared out; one rank's product adds the bias itself."""
        if self.share.size == 1:
            return RowParallelLinear(self.linear(weight, bias), None, self.communicator)
        return RowParallelLinear(self.linear(weight), None if bias is None else self.tensor(bias), self.communicator)

    def plain_product(self, weight: Weight, bias: Weight | None = None) -> Product:
        """The product with `weight` [out, in] as it is, on each rank the whole of it, and `bias` [out]."""
        operations, of_bias = operations_of(self.device.type), None if bias is None else self.tensor(bias)
        return operations.product(self.tensor(weight), of_bias, batch_invariant=self._batch_invariant)

    def are_plain(self, *weights: Weight) -> bool:
        """Whether this rank holds weights as they are, and none has adapters."""
        plain = QUANTIZATIONS.get("none")
        return self._adapted is None and all(self._loader.held(weight) == plain for weight in weights)

    def joined_product(self, *weights: Weight) -> Product | None:
        """The product with weights [out, in] of the same inputs, one behind the other, where they `are_plain`; else
        None."""
        if not self.are_plain(*weights):
            return None
        joined = torch.cat([self.tensor(weight) for weight in weights])
        return operations_of(self.device.type).product(joined, None, batch_invariant=self._batch_invariant)

    def wide_product(self, weight: Weight) -> Product:
        """The product with `weight` [out, in] in float32, on each rank the whole of it, of activations as they are."""
        return operations_of(self.device.type).wide_product(self.tensor(weight))

    def head_products(self, weight: torch.Tensor) -> HeadProducts:
        """The product of each head with its matrix of `weight` [heads, out, in], which is copied on CPUs."""
        return operations_of(self.device.type).head_products(weight)

    def dense(self, weight: Weight) -> torch.Tensor:
        """Read `weight` [out, in], whose use is "dense", on to the device in the model's dtype, however files have it;
        errors as of `tensor`. On CPUs the next weight may overwrite it."""
        return self._loader.load(weight)["weight"]

    def expert(self, weight: Weight) -> Tensors:
        """Read `weight` [out, in] on to the device as ranks hold it there: dense in the model's dtype, "weight", or in
        codes; errors as of `tensor`. On CPUs the next weight may overwrite it."""
        return self._loader.load(weight)

    def held(self, weight: Weight) -> Quantization:
        """How a weight is held."""
        return self._loader.held(weight)

    def tensor(self, weight: Weight) -> torch.Tensor:
        """Read `weight` on to the device in the model's dtype, or in float32 where that is its use.

        Raises:
            CheckpointError: it holds NaN or infinite values, or values that overflow the dtype.
        """
        return self._loader.tensor(weight)
