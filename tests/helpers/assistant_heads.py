"""Made-up assistants of Gemma 4 for tests, by the modules of transformers, fed by hand.

Behind a text, of which the target has read all but the last token, the assistant is fed that token beside the target's
normed end of the one before, then its own drafts beside what it projected back, all at the last token's position. It
sees the keys and values of what the target has read: in layers with a window those that the target's cache holds then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from medusa_heads import ranked
from pipelines import Reference
from torch import Tensor


class Assistant:
    """A random assistant for a target.

    Attributes:
        model: transformers' own.
    """

    def __init__(
        self,
        target: Path,
        *,
        kind: str = "gemma4_assistant",
        ordered: bool = False,
        layers: Sequence[str] = ("sliding_attention", "sliding_attention", "full_attention"),
        seed: int = 3,
        **changes: Any,
    ) -> None:
        """Make one of layers of these types; `changes` are values of its config.json, those of text_config in that."""
        from transformers import AutoConfig, AutoModelForCausalLM

        text = AutoConfig.from_pretrained(target).get_text_config().to_dict()
        own = {
            "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": len(layers), "layer_types": list(layers),
            "num_kv_shared_layers": len(layers), "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
            "enable_moe_block": False, "use_double_wide_mlp": False, "tie_word_embeddings": True, "num_experts": None,
            "top_k_experts": None, "moe_intermediate_size": None, "model_type": text["model_type"],
        }  # fmt: skip
        for of_layer in (text.pop("per_layer_config", None) or {}).values():  # of those that see all, alike
            text |= {"global_head_dim": of_layer["head_dim"]}
            text |= {"num_global_key_value_heads": of_layer.get("num_key_value_heads")}
        values = {
            "backbone_hidden_size": text["hidden_size"], "use_ordered_embeddings": ordered, "num_centroids": 29,
            "centroid_intermediate_top_k": 3, "text_config": {**text, **own, **changes.pop("text_config", {})},
        }  # fmt: skip
        config = AutoConfig.for_model(kind, **{**values, **changes})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                made = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() > 1:
                    parameter.copy_(made * 1.5 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(0.1 * made)
            # So that hidden states count as much as embeddings, which are longer.
            self.model.pre_projection.weight[:, text["hidden_size"] :] *= 8
            for name, buffer in self.model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.mul_(0.7 + 0.5 * torch.rand(1, generator=generator))
                if name.endswith("token_ordering"):
                    buffer.copy_(torch.randperm(len(buffer), generator=generator))

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        """Save it as transformers does, rounded; `changes` are values of config.json, None leaves one out."""
        self.model.to(dtype).save_pretrained(path)
        self.model.float()
        if changes:
            values = json.loads((path / "config.json").read_text(encoding="utf-8"))
            values = {key: value for key, value in {**values, **changes}.items() if value is not None}
            (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
        return path

    def _step(self, target: Reference, token: int, hidden: Tensor, kept: Any, position: int) -> Any:
        embedded = target.model.get_input_embeddings()(torch.tensor([[token]]))
        return self.model(
            inputs_embeds=torch.cat((embedded, hidden), dim=-1),
            position_ids=torch.tensor([[position]]),
            attention_mask=None,
            shared_kv_states=kept,
        )

    @torch.inference_mode()
    def draft(self, target: Reference, text: list[int], count: int, temperature: float, seed: int) -> list[int]:
        """Tokens behind a text, one after the other, each chosen as a row with such parameters chooses."""
        hidden, kept = _read(target, text[:-1])
        hidden, kept, token, drafted = hidden[:, -1:], _behind(target, kept, len(text) - 1), text[-1], list[int]()
        for _ in range(count):
            found = self._step(target, token, hidden, kept, len(text) - 1)
            # Ordered embeddings give tokens of other clusters less than any in the batch, which none must become.
            logits, hidden = found.logits[0], found.last_hidden_state
            if self.model.masked_embedding is not None:
                logits = logits.masked_fill(logits == logits.min(), -torch.inf)
            token = int(ranked(logits, 1, temperature, seed, len(text) + len(drafted)))
            drafted.append(token)
        return drafted

    @torch.no_grad()
    def learn(self, target_path: Path, texts: Iterable[Sequence[int]]) -> None:
        """Have its vocabulary head say by least squares what these texts go on with."""
        target, states, wanted = Reference(target_path), list[Tensor](), list[int]()
        found: list[Tensor] = []
        hook = self.model.model.norm.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
        for text in map(list, texts):
            hidden, kept = _read(target, text[:-1])
            for length in range(2, len(text)):
                before = _behind(target, kept, length - 1)
                self._step(target, text[length - 1], hidden[:, length - 2 : length - 1], before, length - 1)
                wanted.append(text[length])
        hook.remove()
        states = torch.cat(found)
        goal = torch.nn.functional.one_hot(torch.tensor(wanted), self.model.vocab_size).float()
        solution = torch.linalg.lstsq(states, goal, driver="gelsd").solution
        self.model.lm_head.weight.copy_(10 * solution.T)


def _read(target: Reference, text: list[int]) -> tuple[Tensor, Any]:
    """The normed end [1, tokens, hidden], and keys and values by type of layers."""
    with torch.inference_mode():
        output = target.model(
            torch.tensor([text]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
    return output.hidden_states[-1], output.shared_kv_states


def _behind(target: Reference, kept: Any, length: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What the target's cache holds of a text's first tokens."""
    window = target.model.config.get_text_config().sliding_window
    first = {"full_attention": 0, "sliding_attention": max(0, length - window + 1)}
    return {kind: tuple(part[:, :, first[kind] : length] for part in kept[kind]) for kind in first}  # type: ignore[misc]
