"""The method `eagle3`: a decoder layer that drafts from the target's hidden states, and then from its own (EAGLE-3).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv
2503.01840. Each row is drafted from at all its places at once, `num_tokens` steps deep, with the data's tokens. The
loss of a step is the mean over its places of KL(target ‖ head) over the tokens that the head knows, where the target's
first choice is among them, and of the cross-entropy with the data's token likewise; places where it is not count as
zeros, as in SpecForge. Target and embedding are frozen.

Place i holds what the target has read up to token i. At step 0 a decoder layer reads the embedding of token i + 1
beside the target's states of token i, which fc makes one; what it leaves behind says token i + 2. At step k it reads
the embedding of token i + 1 + k beside what it left itself at step k - 1, as when it drafts, and stands at position
i + k. It then sees what a draft from place i sees: keys of step 0 of places up to i, and of place i its own keys of
steps 1 to k. So the mask of step 0 serves all steps, with a diagonal more at each.

What is written is laid out as the reference's and SpecForge's files: model.safetensors with `fc`, `midlayer`, `norm`,
`lm_head`, `d2t` (how far each of its tokens is from the target's id) and `t2d` (which of the target's tokens it knows),
and config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from trtrun.errors import RustLibrary
from trtrun.tools.training.data import DataRow
from trtrun.tools.training.methods.eagle3_config import choose_boundaries, commonest_tokens, make_config
from trtrun.tools.training.methods.head_batch import HeadBatch, check_long_enough, pad_rows, tables_of
from trtrun.tools.training.methods.table import MethodContext
from trtrun.tools.training.models import TargetOutput, read_config, stored_dtype

Angles = tuple[torch.Tensor, torch.Tensor]
Kept = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each step so far, [rows, key heads, places, head_dim] each."""


class Attention(nn.Module):
    """Attention of the head's layer, which reads an embedding and a state side by side."""

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


WEIGHTS = "model.safetensors"
UNKNOWN = -1
"""In the place of a token that the head does not know."""


class Eagle3Method:
    """The `DraftTraining` of `eagle3`.

    Args:
        context: with a target.

    Raises:
        ConfigError: the target has no such layers, or fewer tokens than the head is to know.
    """

    def __init__(self, context: MethodContext) -> None:
        assert context.target is not None
        self._settings, self._device, self._target = context.settings, context.device, context.target
        self._dtype, self.num_depths = stored_dtype(context.target_path), context.settings.num_tokens
        of_target, vocab_size = read_config(context.target_path), context.target_vocab_size
        captured = context.settings.eagle3_layers_to_capture
        self.boundaries = choose_boundaries(of_target["num_hidden_layers"], captured)
        known = commonest_tokens(context.rows, vocab_size, context.settings.draft_vocab_size)
        self.token_ids = torch.tensor(known, device=self._device)
        self._own_ids = torch.full((vocab_size,), UNKNOWN, device=self._device)
        self._own_ids[self.token_ids] = torch.arange(len(known), device=self._device)
        dtype_name = str(self._dtype).removeprefix("torch.")
        self.config = make_config(of_target, self.boundaries, len(known), dtype_name)
        head = context.target.head_weight()[self.token_ids]
        self.model = Eagle3Model(self.config, len(self.boundaries), head, context.settings.seed).to(self._device)
        self._rotary = make_rotary(self.config, self._device)

    def check(self, rows: Sequence[DataRow]) -> None:
        """Raise ConfigError where no row is long enough for a guess."""
        check_long_enough(rows)

    def prepare(self, rows: Sequence[DataRow], step: int, indexes: Sequence[int]) -> HeadBatch:
        """The rows, padded; nothing is random."""
        return pad_rows(rows, self._device)

    def counts(self, prepared: HeadBatch) -> torch.Tensor:
        """[num_tokens] float32: guesses of each step."""
        return torch.stack([prepared.places(depth).sum() for depth in range(self.num_depths)]).to(torch.float32)

    def losses(self, prepared: HeadBatch) -> torch.Tensor:
        """[num_tokens] float32: the loss of each step, summed over its guesses; with gradients."""
        settings, text = self._settings, prepared.text
        output = self._target.read(text, self.boundaries)
        said = self._read_choices(output, prepared) if settings.divergence else None
        found = []
        for depth, states in enumerate(self._unroll(output, prepared)):
            rows, places = prepared.places(depth).nonzero(as_tuple=True)
            logits = self._logits(states[rows, places])
            loss = logits.new_zeros(())
            if settings.cross_entropy:
                labels = self._own_ids[text[rows, places + 2 + depth]]
                entropy = functional.cross_entropy(logits, labels, ignore_index=UNKNOWN, reduction="sum")
                loss = loss + settings.cross_entropy * entropy
            if said is not None:
                log_probs, is_known, lines = said
                own = lines[rows, places + 1 + depth]
                # In this form the target's own entropy, which has no gradient, is taken off.
                every = functional.kl_div(logits.log_softmax(-1), log_probs[own], reduction="none", log_target=True)
                loss = loss + settings.divergence * every.sum(-1).where(is_known[own], 0).sum()
            found.append(loss)
        return torch.stack(found)

    @torch.no_grad()
    def matches(self, rows: Sequence[DataRow]) -> list[torch.Tensor]:
        """Whether each step's first choice is the data's token: for each row [places, num_tokens] bool on the CPU.

        Steps read the data's tokens: where all drafted tokens before one match, they are the drafted ones.
        """
        batch = self.prepare(rows, 0, range(len(rows)))
        found = []
        for depth, states in enumerate(self._unroll(self._target.read(batch.text, self.boundaries), batch)):
            indexes, places = batch.places(depth).nonzero(as_tuple=True)
            chosen = self.token_ids[self._logits(states[indexes, places]).argmax(-1)]
            found.append(chosen == batch.text[indexes, places + 2 + depth])
        return tables_of(rows, batch, found)

    def finish(self) -> None:
        """Round the weights to the target's dtype."""
        self.model.to(self._dtype).to(torch.float32)

    def save(self, directory: Path) -> None:
        """Write the head in the target's dtype, and config.json."""
        state = {name: value.detach().cpu().to(self._dtype) for name, value in self.model.state_dict().items()}
        token_ids = self.token_ids.cpu()
        state["d2t"] = token_ids - torch.arange(len(token_ids))
        state["t2d"] = (self._own_ids != UNKNOWN).cpu()
        with RustLibrary("safetensors"):
            save_file(state, directory / WEIGHTS, {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def _unroll(self, output: TargetOutput, batch: HeadBatch) -> list[torch.Tensor]:
        """[rows, places, hidden] of each step. The last two tokens of a row are guessed, and not guessed from."""
        places = max(1, batch.text.shape[1] - 2)
        tokens = functional.pad(batch.text, (0, self.num_depths))[:, 1 : 1 + places + self.num_depths]
        embedded = functional.embedding(tokens, self._target.embedding_weight()).float()
        with self._autocast():
            return self.model.unroll(join(output.tapped, places), embedded, self._rotary, self.num_depths)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """[guesses, tokens of the head] float32."""
        with self._autocast():
            return self.model.logits(states)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16")

    @torch.no_grad()
    def _read_choices(self, output: TargetOutput, batch: HeadBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the target says, wherever it makes a token of a completion.

        Returns:
            [n, tokens of the head] float32: log probabilities of these among each other; [n] bool: whether its first
            choice is one of them; [rows, longest] int64: which of the n stands for a place.
        """
        wanted = torch.zeros_like(batch.text, dtype=torch.bool)
        for depth in range(self.num_depths):
            rows, places = batch.places(depth).nonzero(as_tuple=True)
            wanted[rows, places + 1 + depth] = True
        logits = output.head(output.hidden[wanted])[:, : len(self._own_ids)]
        is_known = self._own_ids[logits.argmax(-1)] != UNKNOWN
        lines = torch.zeros_like(batch.text)
        lines[wanted] = torch.arange(len(logits), device=self._device)
        if len(self.token_ids) < logits.shape[1]:
            logits = logits[:, self.token_ids]
        return logits.float().log_softmax(-1), is_known, lines


def make(context: MethodContext) -> Eagle3Method:
    """Make a head for the target; see Eagle3Method."""
    return Eagle3Method(context)
