"""Made-up heads of EAGLE-1 and EAGLE-2 for tests: of every layout that files have them in, and in plain torch, from the
papers' text.

Li et al. 2024 (arXiv:2401.15077): at position i fc makes one state of the embedding of token i + 1 and of the target's
feature f_i, which its own head multiplies; a decoder layer makes of it what f_{i+1} might be, without a norm in front
of attention or behind the end, and the target's head says what stands at i + 2. Behind the text the layer goes on with
what it left itself. There is no cache: each token that is drafted takes the whole text anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from decoder_heads import NUM_HEADS, RandomTensors, layer_values, read_config, write_files
from eagle3_heads import Eagle3
from own_drafters import hidden_states
from pipelines import Reference
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

LAYOUTS = ("reference", "speculators", "vllm")
INPUT_NORM = "layers.0.input_layernorm"


@dataclass(frozen=True)
class Eagle(Eagle3):
    """A head, with tensors by the reference's names; lm_head.weight among them is the target's, or its own.

    Attributes:
        options: input_norm and final_norm, for heads that were trained with these; own_head, whether lm_head.weight is
            in its file.
    """

    def fuse(self, states: Tensor) -> Tensor:
        """[n, hidden] of the target's states [n, boundaries, hidden]: the last is normed."""
        return states[:, -1]

    def halves(self, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The stream [n, hidden] in the last layer behind its attention, and what its down_proj reads [n, features]."""
        stream = self.linear(torch.cat((self.embedding[list(tokens)], hidden), 1), "fc")
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            is_normed = layer or self.options.get("input_norm")
            read = self.norm(stream, f"{name}.input_layernorm") if is_normed else stream
            stream = stream + self.attend(read, f"{name}.self_attn")
            gated = self.gated(stream, name)
            if layer + 1 < self.num_layers:
                stream = stream + self.linear(gated, f"{name}.mlp.down_proj")
        return stream, gated

    def states(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """[n, hidden] that the next step reads, of tokens [n] beside hidden [n, hidden]."""
        stream, gated = self.halves(tokens, hidden)
        state = stream + self.linear(gated, f"layers.{self.num_layers - 1}.mlp.down_proj")
        return self.norm(state, "norm") if self.options.get("final_norm") else state

    def normed(self, states: Tensor) -> Tensor:
        """What lm_head multiplies."""
        return states

    def logits(self, states: Tensor, vocab_size: int) -> Tensor:
        """[n, V] of states [n, hidden]."""
        return linear(states, self.tensors["lm_head.weight"])


def make_eagle_head(
    target: Path,
    *,
    head_dim: int = 16,
    num_kv_heads: int = 2,
    num_layers: int = 1,
    features: int = 96,
    own_embedding: bool = False,
    fc_bias: bool = True,
    biases: bool = False,
    head_norms: bool = False,
    seed: int = 3,
    **options: bool,
) -> Eagle:
    """A random head for a target."""
    config = read_config(target)
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    random = RandomTensors(seed)
    tensors, matrix, norm = random.tensors, random.matrix, random.norm
    matrix("fc", hidden, 2 * hidden, fc_bias)
    for layer in range(num_layers):
        name = f"layers.{layer}"
        random.layer(
            name, hidden, inputs=hidden, num_kv_heads=num_kv_heads, head_dim=head_dim, features=features, biases=biases,
            head_norms=head_norms,
        )  # fmt: skip
        norm(f"{name}.post_attention_layernorm", hidden)
        if layer or options.get("input_norm"):
            norm(f"{name}.input_layernorm", hidden)
    if options.get("final_norm"):
        norm("norm", hidden)
    of_target = load_file(target / "model.safetensors")
    embedding, lm_head = (of_target[f"{name}.weight"].float() for name in ("model.embed_tokens", "lm_head"))
    if own_embedding:
        embedding = tensors["embed_tokens.weight"] = torch.randn(vocab_size, hidden, generator=random.generator)
    if options.get("own_head"):
        lm_head = torch.randn(vocab_size, hidden, generator=random.generator)
    tensors["lm_head.weight"] = lm_head
    return Eagle(tensors, (), NUM_HEADS, num_kv_heads, head_dim, embedding, None, options)


def fitted_eagle(head: Eagle, target: Path, texts: Iterable[Sequence[int]]) -> Eagle:
    """The head with a last matrix that makes by least squares the features of the texts: right more often than by
    chance, as the target's own head reads them."""
    reference, listed = Reference(target), [list(text) for text in texts]
    name = f"layers.{head.num_layers - 1}.mlp.down_proj"
    with torch.inference_mode():
        features = [head.fuse(hidden_states(reference, text)) for text in listed]
        pairs = [head.halves(text[1:], own[:-1]) for text, own in zip(listed, features, strict=True)]
        wanted = torch.cat([own[1:] - stream for own, (stream, _) in zip(features, pairs, strict=True)])
    wanted = wanted - head.tensors.get(f"{name}.bias", torch.zeros(1))
    gated = torch.cat([one for _, one in pairs])
    solution = torch.linalg.lstsq(gated, wanted, driver="gelsd").solution.T
    return replace(head, tensors={**head.tensors, f"{name}.weight": solution.contiguous()})


def write_eagle_head(path: Path, head: Eagle, layout: str, target: Path, **changes: Any) -> Path:
    """Write a head in a layout; `changes` are values of config.json, None leaves one out. Returns the directory."""
    of_target = read_config(target)
    tensors = dict(head.tensors)
    if not head.options.get("own_head"):
        del tensors["lm_head.weight"]
    has_bias = "fc.bias" in tensors
    layer = {"architectures": ["LlamaForCausalLM"], **layer_values(head, of_target["vocab_size"])}
    if head.head_dim == 16:
        del layer["head_dim"]
    said = {
        key: False
        for option, key in (("input_norm", "skip_prenorm"), ("final_norm", "skip_output_norm"))
        if head.options.get(option)
    }
    if layout == "speculators":
        names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
        kinds = {"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "layernorms": False}
        config = {**kinds, "fusion_bias": has_bias, "transformer_layer_config": layer, **said}
    elif layout == "vllm":
        names = {"layers.": "model.layers.", "embed_tokens.": "model.embed_tokens."}
        kinds = {"architectures": ["EAGLEModel"], "model_type": "eagle"}
        config = {**kinds, "eagle_fc_bias": has_bias, "model": {**layer, **said}}
        for name in ("layers.0.input_layernorm.weight", "norm.weight"):  # that are there for the loader's sake
            tensors.setdefault(name, torch.full((of_target["hidden_size"],), 3.0))
    else:
        names, config = {}, {**layer, "bias": has_bias, **said}
    for usual, other in names.items():
        tensors = {other + one.removeprefix(usual) if one.startswith(usual) else one: tensors[one] for one in tensors}
    return write_files(path, tensors, config, changes)


def eagle(**options: Any) -> dict[str, Any]:
    """The section of the method."""
    return {"method": "eagle", **options}
