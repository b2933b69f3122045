"""An EAGLE-3 head that can be trained: its forward over whole rows, unrolled over the steps of a draft.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv
2503.01840. Place i holds what the target has read up to token i. At step 0 a decoder layer reads the embedding of token
i + 1 beside the target's states of token i, which fc makes one; what it leaves behind says token i + 2. At step k it
reads the embedding of token i + 1 + k beside what it left itself at step k - 1, as when it drafts, and stands at
position i + k. It then sees what a draft from place i sees: keys of step 0 of places up to i, and of place i its own
keys of steps 1 to k. So the mask of step 0 serves all steps, with a diagonal more at each.

Names of parameters are those of the reference and of SpecForge. It knows tensors, and not what is learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

Angles = tuple[torch.Tensor, torch.Tensor]
Kept = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each step so far, [rows, key heads, places, head_dim] each."""


class Attention(nn.Module):
    """Of the head's layer: it reads an embedding and a state side by side."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(2 * hidden, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden, bias=False)

    def forward(self, both: torch.Tensor, angles: Angles, kept: Kept) -> torch.Tensor:
        """[rows, places, 2 hidden] to [rows, places, hidden]; adds this step's keys and values to `kept`."""
        rows, places, _ = both.shape
        query, key, value = (
            projection(both).view(rows, places, -1, self._head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *angles)
        kept.append((key.to(value.dtype), value))
        grouped = query.to(value.dtype).unflatten(1, (self._num_kv_heads, -1))
        tensors = [tensor for pair in kept for tensor in pair]
        # Scores of all steps would be kept for the gradients: places * places numbers a head and step.
        found = checkpoint(_attend, grouped, *tensors, use_reentrant=False, preserve_rng_state=False)
        attended: torch.Tensor = self.o_proj(found.flatten(1, 2).transpose(1, 2).flatten(2))
        return attended


def _attend(query: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
    """Queries [rows, key heads, group, places, head_dim] over keys and values of each step → the same shape: of step 0
    those of the own place and before it, of later steps those of the own place."""
    places, scale = query.shape[-2], query.shape[-1] ** -0.5
    key, value, *later = (tensor.unsqueeze(2) for tensor in kept)
    hidden = torch.ones(places, places, dtype=torch.bool, device=query.device).triu(1)
    scores = [(query @ key.transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)]
    scores += [(query.float() * own.float()).sum(-1, keepdim=True) for own in later[::2]]
    weights = (torch.cat(scores, -1) * scale).softmax(-1).to(value.dtype)
    found: torch.Tensor = weights[..., :places] @ value
    for step, own in enumerate(later[1::2]):
        found = found + weights[..., places + step, None] * own
    return found


class GatedMLP(nn.Module):
    """down(SiLU(gate x) * up x)."""

    def __init__(self, hidden: int, features: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, features, bias=False)
        self.up_proj = nn.Linear(hidden, features, bias=False)
        self.down_proj = nn.Linear(features, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, hidden] to [..., hidden]."""
        found: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return found


class FusedLayer(nn.Module):
    """The decoder layer, whose residual stream is the state."""

    def __init__(self, hidden: int, features: int, attention: Attention, eps: float) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, features)

    def forward(self, embedded: torch.Tensor, state: torch.Tensor, angles: Angles, kept: Kept) -> torch.Tensor:
        """Embeddings and states, [rows, places, hidden] float32 each, to the states behind it."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), -1)
        state = state + self.self_attn(both, angles, kept)
        found: torch.Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return found


class Eagle3Model(nn.Module):
    """The head, with random weights but for `lm_head`.

    Args:
        values: its config.json: sizes, `rope_theta` and `rope_scaling`.
        num_taps: hidden states of the target that fc makes one of.
        lm_head: [tokens of the head, hidden] to begin with.
        seed: of the random weights.
    """

    def __init__(self, values: Mapping[str, Any], num_taps: int, lm_head: torch.Tensor, seed: int) -> None:
        super().__init__()
        hidden, eps = values["hidden_size"], values["rms_norm_eps"]
        heads = values["num_attention_heads"], values["num_key_value_heads"], values["head_dim"]
        self.midlayer = FusedLayer(hidden, values["intermediate_size"], Attention(hidden, *heads), eps)
        self.fc = nn.Linear(num_taps * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(lm_head), bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in self.parameters():
                if value.ndim == 2:
                    bound = value.shape[1] ** -0.5
                    value.uniform_(-bound, bound, generator=generator)
            self.lm_head.weight.copy_(lm_head)

    def unroll(
        self, tapped: torch.Tensor, embedded: torch.Tensor, rotary: LlamaRotaryEmbedding, num_steps: int
    ) -> list[torch.Tensor]:
        """The states of each step; `logits` makes guesses of them.

        Args:
            tapped: [rows, places, taps * hidden] float32: the target's states, side by side.
            embedded: [rows, places + num_steps, hidden] float32: of tokens 1, 2, …, of which step k takes those from k
                on.
            rotary: gives angles of positions.
            num_steps: of a draft.

        Returns:
            [rows, places, hidden] float32 of each step.
        """
        places = tapped.shape[1]
        positions = torch.arange(places, device=tapped.device)[None]
        state, kept, states = self.fc(tapped).float(), Kept(), []
        for step in range(num_steps):
            angles = rotary(state, positions + step)
            state = self.midlayer(embedded[:, step : step + places], state, angles, kept).float()
            states.append(state)
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, tokens of the head] float32 of [n, hidden]."""
        found: torch.Tensor = self.lm_head(self.norm(states))
        return found.float()


def make_rotary(values: Mapping[str, Any], device: torch.device) -> LlamaRotaryEmbedding:
    """The rotation that a head's config.json names. It stays out of the model, whose weights are rounded as a whole."""
    rope = {"rope_type": "default", **(values.get("rope_scaling") or {}), "rope_theta": values["rope_theta"]}
    size, positions = values["head_dim"], values["max_position_embeddings"]
    # Of one head: angles ask for no more, and transformers refuses hidden sizes that heads do not divide.
    config = LlamaConfig(
        hidden_size=size,
        num_attention_heads=1,
        head_dim=size,
        max_position_embeddings=positions,
        rope_parameters=rope,
    )
    return LlamaRotaryEmbedding(config).to(device)


def join(tapped: Sequence[torch.Tensor], places: int) -> torch.Tensor:
    """[rows, places, taps * hidden] float32 of the target's states [rows, length, hidden]."""
    return torch.cat([state[:, :places] for state in tapped], -1).float()
