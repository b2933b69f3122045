"""Made-up MTP layers for tests, in the files of a family's target: by the layer of transformers.

At position i it reads the embedding of the token at i + 1 beside the normed end of the target at i; behind the text,
beside what it left itself. There is no cache: each token that is drafted takes the whole text anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from eagle3_heads import Eagle3
from own_drafters import hidden_states
from pipelines import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor

_OF_QWEN = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "mtp_block.": "mtp.layers.0.",
    "post_norm.": "mtp.norm.",
}
_LIKE_DEEPSEEK = ("deepseek_v3", "glm4_moe")
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *_LIKE_DEEPSEEK)


class MTPHead:
    """A random layer for a target of one of FAMILIES.

    Attributes:
        layer: transformers' own.
    """

    def __init__(self, target: Path, seed: int = 3) -> None:
        from transformers.modeling_layers import MtpLayer

        reference = Reference(target)
        self._model, config = reference.model, copy.deepcopy(reference.model.config)
        decoder = self._model.model
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        index = getattr(config, "first_k_dense_replace", 0)
        with torch.random.fork_rng():
            self.layer: Any = MtpLayer(config, type(decoder.layers[0]), type(decoder.norm), index).eval()
        self._names = {**_OF_QWEN}
        if config.model_type in _LIKE_DEEPSEEK:
            name = f"model.layers.{config.num_hidden_layers}."
            self._names = {part: f"{name}{part}" for part in ("enorm.", "hnorm.", "eh_proj.")}
            self._names |= {"mtp_block.": name, "post_norm.": f"{name}shared_head.norm."}
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in self.layer.state_dict().items():
                made = torch.randn(value.shape, generator=generator)
                if value.dim() > 1:
                    value.copy_(made * 1.5 * value.shape[-1] ** -0.5)
                else:
                    is_plain_norm = "norm" in name and config.model_type in _LIKE_DEEPSEEK
                    value.copy_(0.1 * made + is_plain_norm)

    @torch.no_grad()
    def write(self, target: Path) -> None:
        """Put it into the target's file, rounded as that is, beside what files have there that nobody reads."""
        file = target / "model.safetensors"
        weights = load_file(file)
        dtype = weights["model.embed_tokens.weight"].dtype
        for own, value in self.layer.state_dict().items():
            part = next(part for part in self._names if own.startswith(part))
            stored = value if own.endswith("e_score_correction_bias") else value.to(dtype)
            value.copy_(stored)
            weights[self._names[part] + own.removeprefix(part)] = stored.contiguous()
        if "mtp.fc.weight" not in weights:
            for copied in ("shared_head.head", "embed_tokens"):
                weights[self._names["mtp_block."] + f"{copied}.weight"] = torch.zeros(203, 64, dtype=dtype)
        save_file(weights, file, {"format": "pt"})

    @torch.inference_mode()
    def states(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """[n, hidden] that the next step and the target's head read, of tokens [n] beside hidden [n, hidden]."""
        count = len(tokens)
        embedded = self._model.get_input_embeddings()(torch.tensor([list(tokens)]))
        positions = torch.arange(count).unsqueeze(0)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = self._model.model.rotary_emb(embedded, position_ids=positions)
        found: Tensor = self.layer(embedded, hidden.unsqueeze(0), angles, mask, positions, None)
        return found[0]

    def fuse(self, states: Tensor) -> Tensor:
        """[n, hidden] of the target's states [n, boundaries, hidden]: the last is normed."""
        return states[:, -1]

    @torch.inference_mode()
    def logits(self, states: Tensor, vocab_size: int) -> Tensor:
        """[n, V] of states [n, hidden]."""
        found: Tensor = self._model.get_output_embeddings()(states)
        return found

    draft = Eagle3.draft

    @torch.no_grad()
    def learn(self, target: Path, texts: Iterable[Sequence[int]]) -> None:
        """Make it say, from embedding and hidden state alone and by least squares, what these texts go on with."""
        reference, listed = Reference(target), [list(text) for text in texts]
        layer = self.layer
        for name, value in layer.state_dict().items():
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                value.zero_()
        layer.post_norm.load_state_dict(reference.model.model.norm.state_dict())
        read, wanted = [], []
        for text in listed:
            hidden = hidden_states(reference, text)[:, -2:]
            embedded = self._model.get_input_embeddings()(torch.tensor(text[1:]))
            read.append(torch.cat((layer.enorm(embedded), layer.hnorm(hidden[:-1, 1])), dim=1))
            wanted.append(hidden[1:, 0])  # what enters the final norm
        solution = torch.linalg.lstsq(torch.cat(read), torch.cat(wanted), driver="gelsd").solution
        layer.eh_proj.weight.copy_(solution.T)
