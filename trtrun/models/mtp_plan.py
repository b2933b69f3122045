"""The plan of a layer for multi-token prediction (MTP), which the files of some models have behind the layers of the
model: of a token's hidden state and the embedding of the next one it makes the hidden state of that one (DeepSeek-V3,
arXiv:2412.19437).

It names tensors. It does not know what is drafted with them (heads/mtp_layouts.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from trtrun.models.decoder_plan import DecoderPlan
from trtrun.models.layer_plan import NormPlan


@dataclass(frozen=True)
class MTPPlan:
    """The first MTP layer of a model.

    Attributes:
        embedding_norm, hidden_norm: of the two that are joined.
        joining: name of the weight [hidden, 2 * hidden] that makes one state of both, the embedding first.
        layer: a layer like the model's.
        final_norm: behind it, in front of the model's own vocabulary head.
    """

    embedding_norm: NormPlan
    hidden_norm: NormPlan
    joining: str
    layer: DecoderPlan
    final_norm: NormPlan

    @classmethod
    def of_layer(cls, name: str, layer: DecoderPlan) -> MTPPlan:
        """The layer `name`, such as "model.layers.46", with the tensors of DeepSeek-V3 beside those of a layer. Copies
        of embedding and vocabulary head, which files have there, too, are left in them."""
        shape = layer.attention.shape

        def norm(own: str) -> NormPlan:
            return NormPlan(f"{name}.{own}", shape.hidden_size, shape.rms_norm_eps)

        return cls(norm("enorm"), norm("hnorm"), f"{name}.eh_proj.weight", layer, norm("shared_head.norm"))
