"""Made-up EAGLE-3 heads for tests: of every layout that files have them in, and in plain torch, from the paper's text.

Li et al. 2025 (arXiv:2503.01840). At position i a decoder layer reads the embedding of token i + 1, normed, beside a
hidden state of i, normed: what fc makes of the target's states at some layers, or behind the text what the layer left
at the position before. What it leaves says, behind a norm, what stands at i + 2. There is no cache: each token that is
drafted takes the whole text anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from decoder_heads import (
    NUM_HEADS,
    THETA,
    DecoderHead,
    RandomTensors,
    check_drafts,
    layer_values,
    read_config,
    token_tables,
    write_files,
)
from medusa_heads import Proposals, keyed_scores, ranked
from own_drafters import hidden_states
from pipelines import Reference
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from trtrun.configuration.drafting.draft_trees import ChoiceTree
from trtrun.configuration.drafting.head_methods import Eagle3Section

LAYOUTS = ("reference", "specforge", "speculators", "prefixed")


@dataclass(frozen=True)
class Eagle3(DecoderHead):
    """A head, with tensors by the names that speculators has for them.

    Attributes:
        token_ids: the target's id of each line of lm_head; None where they are the same.
        options: norm_before_residual, norm_output, fc_norm and norm_before_fc, as far as they are set.
        theta: of its rotation.
        hidden_act, window: see the base.
    """

    token_ids: Tensor | None = None
    options: dict[str, bool] = field(default_factory=dict)
    theta: float = THETA
    hidden_act: str = "silu"
    window: int | None = None

    def fuse(self, states: Tensor) -> Tensor:
        """[n, hidden] of the target's states [n, boundaries, hidden of the target]."""
        taken = states[:, list(self.boundaries)]
        if self.options.get("fc_norm"):
            taken = torch.stack([self.norm(taken[:, tap], f"fc_norm.{tap}") for tap in range(taken.shape[1])], 1)
        flat = taken.flatten(1)
        return self.linear(self.norm(flat, "input_norm") if self.options.get("norm_before_fc") else flat, "fc")

    def states(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """[n, hidden] that the next step reads, of tokens [n] beside hidden [n, hidden]."""
        stream = hidden
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            if layer:
                read = self.norm(stream, f"{name}.input_layernorm")
            else:
                normed = self.norm(hidden, f"{name}.hidden_norm")
                read = torch.cat((self.norm(self.embedding[list(tokens)], f"{name}.input_layernorm"), normed), 1)
                stream = normed if self.options.get("norm_before_residual") else hidden
            stream = stream + self.attend(read, f"{name}.self_attn", theta=self.theta)
            stream = stream + self.linear(self.gated(stream, name), f"{name}.mlp.down_proj")
        return self.norm(stream, "norm") if self.options.get("norm_output") else stream

    def normed(self, states: Tensor) -> Tensor:
        """What lm_head multiplies."""
        return states if self.options.get("norm_output") else self.norm(states, "norm")

    def logits(self, states: Tensor, vocab_size: int) -> Tensor:
        """[n, V] of states [n, hidden]."""
        found = linear(self.normed(states), self.tensors["lm_head.weight"])
        if self.token_ids is None:
            return found
        every = torch.full((len(found), vocab_size), -torch.inf)
        every[:, self.token_ids] = found
        return every

    @torch.inference_mode()
    def draft(self, target: Reference, text: list[int], count: int, temperature: float, seed: int) -> list[int]:
        """Tokens behind a text, one after the other, each chosen as a row with such parameters chooses."""
        hidden = self.fuse(hidden_states(target, text[:-1]))
        drafted: list[int] = []
        for _ in range(count):
            states = self.states([*text[1:], *drafted], hidden)
            logits = self.logits(states[-1:], target.model.config.vocab_size)
            drafted.append(int(ranked(logits, 1, temperature, seed, len(text) + len(drafted))))
            hidden = torch.cat((hidden, states[-1:]))
        return drafted


class Ways:
    """What a head says behind a text and tokens that are drafted, whatever way they take, in plain torch."""

    def __init__(
        self,
        head: Eagle3,
        target: Reference,
        text: list[int],
        temperature: float,
        seed: int,
        penalty: float = 1.0,
        banned: int | None = None,
    ) -> None:
        self._head, self._text, self._keys = head, text, (temperature, seed)
        self._penalty, self._banned = penalty, banned
        self._vocab_size = target.model.config.vocab_size
        with torch.inference_mode():
            self._hidden = {(): head.fuse(hidden_states(target, text[:-1]))}

    @torch.inference_mode()
    def scores(self, way: tuple[int, ...]) -> Tensor:
        """[V] of which the row takes the largest; without a cache: all of the text and the way is computed anew."""
        if way not in self._hidden:
            hidden = self._hidden[way[:-1]]
            states = self._head.states([*self._text[1:], *way[:-1]], hidden)
            self._hidden[way] = torch.cat((hidden, states[-1:]))
        state = self._head.states([*self._text[1:], *way], self._hidden[way])[-1:]
        logits = self._head.logits(state, self._vocab_size)
        if self._banned is not None:
            logits[:, self._banned] -= 100
        before = [*self._text, *way]
        taken = logits[:, before]
        logits[:, before] = torch.where(taken > 0, taken / self._penalty, taken * self._penalty)
        return keyed_scores(logits, *self._keys, len(self._text) + len(way))[0]

    def static(self, tree: ChoiceTree) -> list[tuple[int, ...]]:
        """The way to each node, in the order of the tree's."""
        found: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for node in tree.nodes:
            way = found[node[:-1]]
            found[node] = (*way, int(self.scores(way).topk(node[-1] + 1).indices[-1]))
        return [found[node] for node in tree.nodes]

    def dynamic(self, top_k: int, most_nodes: int, depth: int) -> set[tuple[int, ...]]:
        """The ways to the nodes that are kept."""
        frontier: dict[tuple[int, ...], float] = {(): 0.0}
        every: dict[tuple[int, ...], float] = {}
        for _ in range(depth):
            met = {}
            for way, sum_so_far in frontier.items():
                best = torch.log_softmax(self.scores(way), dim=0).topk(top_k)
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    met[*way, token] = sum_so_far + value
            every |= met
            frontier = dict(sorted(met.items(), key=lambda entry: -entry[1])[:top_k])
        return {way for way, _ in sorted(every.items(), key=lambda entry: -entry[1])[:most_nodes]}


def make_head(
    target: Path,
    *,
    boundaries: Sequence[int] | None = None,
    num_tokens: int | None = None,
    hidden_size: int | None = None,
    head_dim: int = 16,
    num_kv_heads: int = 2,
    num_layers: int = 1,
    own_embedding: bool = False,
    biases: bool = False,
    head_norms: bool = False,
    seed: int = 3,
    **options: bool,
) -> Eagle3:
    """A random head for a target: for `num_tokens` of its tokens; with an embedding of its own where its hidden size is
    not the target's."""
    config = read_config(target)
    size, vocab_size, depth = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    taken = tuple(boundaries or (2, depth // 2, depth - 3))
    hidden = hidden_size or size
    random = RandomTensors(seed)
    tensors, matrix, norm = random.tensors, random.matrix, random.norm
    matrix("fc", hidden, len(taken) * size, biases)
    for tap in range(len(taken) if options.get("fc_norm") else 0):
        norm(f"fc_norm.{tap}", size)
    if options.get("norm_before_fc"):
        norm("input_norm", len(taken) * size)
    for layer in range(num_layers):
        name, inputs = f"layers.{layer}", hidden if layer else 2 * hidden
        random.layer(
            name, hidden, inputs=inputs, num_kv_heads=num_kv_heads, head_dim=head_dim, biases=biases,
            head_norms=head_norms,
        )  # fmt: skip
        for one in ("input_layernorm", "post_attention_layernorm", *(() if layer else ("hidden_norm",))):
            norm(f"{name}.{one}", hidden)
    norm("norm", hidden)
    matrix("lm_head", num_tokens or vocab_size, hidden)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    if own_embedding or hidden != size:
        embedding = tensors["embed_tokens.weight"] = torch.randn(vocab_size, hidden, generator=random.generator)
    token_ids = random.token_ids(vocab_size, num_tokens)
    return Eagle3(tensors, taken, NUM_HEADS, num_kv_heads, head_dim, embedding, token_ids, options)


def fitted(head: Eagle3, target: Path, texts: Iterable[Sequence[int]]) -> Eagle3:
    """The head with an lm_head that says by least squares what the texts go on with: right more often than by chance,
    where it knows the token, and for the first drafted token above all."""
    reference, vocab_size = Reference(target), len(head.embedding)
    listed = [list(text) for text in texts]
    with torch.inference_mode():
        states = [head.states(text[1:-1], head.fuse(hidden_states(reference, text[:-2]))) for text in listed]
        read = torch.cat([head.normed(of_text) for of_text in states])
    wanted = torch.nn.functional.one_hot(torch.tensor([token for text in listed for token in text[2:]]), vocab_size)
    solution = torch.linalg.lstsq(read, wanted.float(), driver="gelsd").solution.T * 10
    lines = solution if head.token_ids is None else solution[head.token_ids]
    return replace(head, tensors={**head.tensors, "lm_head.weight": lines.contiguous()})


def write_head(path: Path, head: Eagle3, layout: str, target: Path, **changes: Any) -> Path:
    """Write a head in a layout; `changes` are values of config.json, None leaves one out. Returns the directory."""
    of_target = read_config(target)
    vocab_size, depth = of_target["vocab_size"], of_target["num_hidden_layers"]
    tensors = {**head.tensors, **token_tables(head.token_ids, vocab_size)}
    if head.token_ids is None and layout == "reference":  # buffers that nobody filled
        tensors |= {"d2t": torch.zeros(vocab_size, dtype=torch.int64), "t2d": torch.zeros(vocab_size, dtype=torch.bool)}
    if layout != "speculators":
        tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    if layout == "prefixed":
        apart = ("d2t", "t2d", "lm_head.weight")
        tensors = {name if name in apart else f"model.{name}": value for name, value in tensors.items()}
    layer = layer_values(head, vocab_size, head.theta)
    if head.window is not None:
        layer |= {"layer_types": ["sliding_attention"] * head.num_layers, "sliding_window": head.window}
    others = {"draft_vocab_size": len(head.tensors["lm_head.weight"]), **head.options}
    usual = head.boundaries == (2, depth // 2, depth - 3)
    if layout == "speculators":
        ids = {"eagle_aux_hidden_state_layer_ids": list(head.boundaries)}
        config = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, **others, **ids}
    elif layout == "reference" and usual:
        config = {"architectures": ["LlamaForCausalLM"], **layer, **others}
    else:
        ids = {"eagle_aux_hidden_state_layer_ids": [one - 1 for one in head.boundaries]}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **others, "eagle_config": ids}
    return write_files(path, tensors, config, changes)


def check_proposals(seen: Proposals, target: Path, head: Eagle3) -> int:
    """Compare what was proposed with the head in plain torch; returns how many drafts there were."""
    return check_drafts(seen, target, head.draft)


def check_trees(
    seen: Proposals,
    target: Path,
    head: Eagle3,
    options: dict[str, Any],
    penalty: float = 1.0,
    banned: int | None = None,
) -> int:
    """Compare trees that were proposed with the head in plain torch, node for node; returns how many there were. All
    rows have the same repetition_penalty, and the logit of a banned token is less by 100."""
    reference, count = Reference(target), 0
    section = Eagle3Section.model_validate(options)
    for (text, temperature, seed, tokens, wanted), paths in zip(seen.seen, seen.paths, strict=True):
        if wanted <= 0:
            continue
        assert paths is not None
        ways, depth = Ways(head, reference, text, temperature, seed, penalty, banned), len(paths[0])
        taken = [[node for node in path if node >= 0] for path in paths]
        drafted = {node: tuple(tokens[one] for one in path[: at + 1]) for path in taken for at, node in enumerate(path)}
        assert drafted.keys() == set(range(len(tokens))), "a node is on no path"
        # Of a row that needs less what is deeper may be anything.
        needed = [drafted[node] for node in range(len(tokens)) if len(drafted[node]) <= wanted]
        if isinstance(section.tree, ChoiceTree):
            assert needed == ways.static(section.tree.cut(wanted)), len(text)
            assert [tuple(path) for path in taken] == list(section.tree.cut(depth).paths)
        else:
            assert section.tree is not None and len(set(needed)) == len(needed)
            expected = ways.dynamic(section.tree.top_k, section.tree.num_nodes(depth), wanted)
            assert set(needed) == expected, len(text)
            leaves = {way for way in drafted.values() if not any(way == other[:-1] for other in drafted.values())}
            assert sorted(drafted[path[-1]] for path in taken if path) == sorted(leaves)
        count += 1
    return count


def eagle3(**options: Any) -> dict[str, Any]:
    """The section of the method."""
    return {"method": "eagle3", **options}
