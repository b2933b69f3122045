"""Medusa's heads on the target ranks: the drafting method `medusa` (Cai et al. 2024, arXiv:2401.10774).

Each head proposes tokens of one place from the hidden state that the row's newest token was chosen from: head h for
what stands h + 1 places behind that token. What stands between does not matter to it, so the likeliest tokens of all
places are known at once, and a tree of them is proposed, or a chain.

Sampled rows rank tokens as the target will choose them, with its random numbers of each place (Daliri et al. 2024,
arXiv:2408.07978): then one of them is the target's choice more often than any of the likeliest. Penalties and bans look
at the row's text and, behind it, at the likeliest token of each place before.

It knows the target's rows and step, and heads by protocol. It does not know files, or how heads compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.draft_trees import ChoiceTree
from trtrun.configuration.drafting.head_methods import MedusaSection
from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.errors import ConfigError
from trtrun.guiding.row_guides import RowGuides
from trtrun.sampling.distributions import Distributions, distributions_of
from trtrun.sampling.filters import likeliest
from trtrun.sampling.random import Stream
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.protocols import PositionHeads, Rows, TargetEngine
from trtrun.speculation.text_drafts import TextDrafts
from trtrun.speculation.trees import last_nodes
from trtrun.tensors import cached_range, cached_tensor, inference


@dataclass(frozen=True)
class _Shape:
    """What drafts of one length look like, on the device.

    Attributes:
        num_ranks: tokens that are wanted of each head.
        picks: [nodes] int64: the place of each node's token among [depth * num_ranks].
        paths: [paths, depth] int64, see Draft; None where drafts are chains.
        spine: [depth] int64: the nodes of the first of the deepest paths, which a draft that came with a request takes.
    """

    num_ranks: int
    picks: Tensor
    paths: Tensor | None
    spine: Tensor

    @classmethod
    def of(cls, tree: ChoiceTree, num_ranks: int, is_chain: bool, device: torch.device) -> _Shape:
        """Lay out a whole tree, with as many ranks of each head as it has, or more."""
        depth = tree.depth
        picks = [(len(node) - 1) * num_ranks + node[-1] for node in tree.nodes]
        spine = next(path for path in tree.paths if len(path) == depth)
        padded = [[*path, *[-1] * (depth - len(path))] for path in tree.paths]
        paths = None if is_chain else torch.tensor(padded, dtype=torch.int64, device=device)
        of_nodes, of_spine = (torch.tensor(one, dtype=torch.int64, device=device) for one in (picks, spine))
        return cls(num_ranks, of_nodes, paths, of_spine)


class MedusaDrafter(Drafter):
    """Proposes the likeliest tokens of each head; nothing for a row whose hidden state it has not seen.

    A proposal is no sample, so it has no draft_probs: the target chooses its own token at every position. The rank that
    has the heads' logits ranks tokens, and the others are told.
    """

    def __init__(
        self,
        target: TargetEngine,
        heads: PositionHeads,
        tree: ChoiceTree | None,
        options: HybridOptions | None = None,
    ) -> None:
        """Draft for the rows of `target`, whose step taps its normed end alone; without a tree the likeliest tokens, or
        where `options` have texts looked up what these say."""
        self._rows = target.rows
        self._heads = heads
        self._tree = tree
        self._given = TextDrafts(target.rows, options=options)
        self._shapes: dict[int, _Shape] = {}
        self._hidden = torch.zeros(
            (len(target.rows.lengths), heads.hidden_size), dtype=heads.dtype, device=target.rows.lengths.device
        )
        self._known: set[int] = set()
        self._proposed: Draft | None = None

    @property
    @override
    def rows(self) -> Rows:
        return self._rows

    @inference
    @override
    def warm_up(self) -> None:
        """Run the heads for numbers of rows that other kernels may serve, and the shapes of drafts."""
        shapes, count = [self._shape(depth) for depth in range(1, self._heads.num_heads + 1)], 1
        shape = shapes[-1]
        while True:
            logits = self._heads.logits(self._hidden[:count], self._heads.num_heads)
            ranked = self._empty(count, self._heads.num_heads, shape)
            if logits is not None:
                ranked.copy_(likeliest(logits.flatten(0, 1), shape.num_ranks).view(ranked.shape))
            self._heads.share(ranked)
            if count == len(self._hidden):
                return
            count = min(2 * count, len(self._hidden))

    @override
    def guide(self, guides: RowGuides) -> None:
        self._given.guide(guides)

    @override
    def release_rows(self, plan: RoundPlan) -> None:
        self._given.release_rows(plan)

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        self._given.begin_round(plan)
        # A row that another request has had, or that is computed anew, is known from the end of its prompt on.
        self._known.difference_update(plan.dropped_rows)
        self._known.difference_update(admission.row for admission in plan.admissions)

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        device, depth = self._hidden.device, plan.draft_len
        listed: list[int] = plan.decode_rows.tolist()
        asked = plan.draft_lens.clip(min=0).tolist()
        known = [length if row in self._known else 0 for row, length in zip(listed, asked, strict=True)]
        lens = cached_tensor(known, device)
        if not depth:
            self._proposed = Draft(torch.zeros((len(listed), 0), dtype=torch.int64, device=device), lens)
            return self._proposed
        shape = self._shape(depth)
        given = self._given.propose(plan)
        if given is not None and shape.paths is None and len(given.whole_rows(asked)) == len(listed):
            tokens = given.tokens
        else:
            tokens = self._rank(plan, listed, shape).flatten(1).index_select(1, shape.picks)
        if given is not None:
            of_spine = torch.where(given.is_given, given.tokens, tokens.index_select(1, shape.spine))
            tokens.index_copy_(1, shape.spine, of_spine)
            lens = torch.maximum(lens, torch.minimum(given.is_given.sum(dim=1), cached_tensor(asked, device)))
        paths = None if shape.paths is None else shape.paths.expand(len(listed), -1, -1)
        found = None if given is None else given.num_suffix_tokens
        self._proposed = Draft(tokens, lens, paths=paths, num_suffix_tokens=found)
        return self._proposed

    def _shape(self, depth: int) -> _Shape:
        if depth not in self._shapes:
            tree = ChoiceTree.chain(depth) if self._tree is None else self._tree.cut(depth)
            # Of all lengths the same number: kernels are compiled for it.
            num_ranks = 1 if self._tree is None else self._tree.num_ranks
            self._shapes[depth] = _Shape.of(tree, num_ranks, self._tree is None, self._hidden.device)
        return self._shapes[depth]

    def _empty(self, count: int, depth: int, shape: _Shape) -> Tensor:
        return torch.empty((count, depth, shape.num_ranks), dtype=torch.int64, device=self._hidden.device)

    def _rank(self, plan: RoundPlan, listed: list[int], shape: _Shape) -> Tensor:
        """[R, depth, ranks] int64: for the R rows the tokens of each head, the best first."""
        rows = cached_tensor(listed, self._hidden.device)
        logits = self._heads.logits(self._hidden.index_select(0, rows), plan.draft_len)
        if logits is None:
            return self._heads.share(self._empty(len(listed), plan.draft_len, shape))
        if self._rows.sampling.needs_history(listed):
            ranked = self._rank_in_turn(plan, listed, rows, logits, shape.num_ranks)
        else:
            steps = cached_range(0, plan.draft_len, rows.device)
            places = (self._rows.lengths.index_select(0, rows).unsqueeze(1) + steps).flatten()
            every = [row for row in listed for _ in range(plan.draft_len)]
            lines = logits.flatten(0, 1).unsqueeze(1)
            found = distributions_of(self._rows.sampling, lines, every, places, self._rows.token_ids)
            ranked = _best(found, shape.num_ranks)
        return self._heads.share(ranked.view(len(listed), plan.draft_len, shape.num_ranks))

    def _rank_in_turn(self, plan: RoundPlan, listed: list[int], rows: Tensor, logits: Tensor, num_ranks: int) -> Tensor:
        """Rank where the choices of some rows look at their tokens: at the best ones of the places before, too."""
        state, ranked = self._rows, []
        lengths = state.lengths.index_select(0, rows)
        for step in range(plan.draft_len):
            where = lengths + step
            found = distributions_of(
                state.sampling, logits[:, step : step + 1], listed, where, state.token_ids, None, plan.max_context
            )
            ranked.append(_best(found, num_ranks))
            # Scratch behind the row's length, which a verdict overwrites.
            state.token_ids[rows, where] = ranked[-1][:, 0].to(torch.int32)
        return torch.stack(ranked, dim=1)

    @inference
    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """Keep the state that each row's newest token was chosen from."""
        assert step is not None and step.hidden is not None
        listed: list[int] = plan.decode_rows.tolist()
        if listed:
            assert verdict is not None and self._proposed is not None
            last = last_nodes(self._proposed, verdict).view(-1, 1, 1)
            decoded = step.hidden.decoded[:, :, 0]
            states = decoded.gather(1, last.expand(-1, 1, decoded.shape[2])).squeeze(1)
            self._hidden.index_copy_(0, cached_tensor(listed, self._hidden.device), states)
            self._known.update(listed)
        ended = [
            (chunk.row, tapped)
            for chunk, tapped in zip(plan.prefill, step.hidden.prompts, strict=True)
            if chunk.is_last
        ]
        if ended:
            rows = cached_tensor([row for row, _ in ended], self._hidden.device)
            self._hidden.index_copy_(0, rows, torch.stack([tapped[-1, 0] for _, tapped in ended]))
            self._known.update(row for row, _ in ended)
        self._proposed = None


def _best(found: Distributions, count: int) -> Tensor:
    """[R, count] int64: what the target would choose from each of R lines, the best first."""
    return found.rank(count) if count > 1 else found.choose(Stream.TARGET)


@DRAFTERS.register("medusa")
def make_medusa_drafter(context: DrafterContext) -> Drafter:
    """Medusa's heads, with the section's tree.

    Raises:
        ConfigError: the tree wants more tokens of a head than there are.
    """
    section = context.section
    assert isinstance(section, MedusaSection) and context.target is not None and context.heads is not None
    if section.tree is not None and section.tree.num_ranks > context.target_vocab_size:
        raise ConfigError(
            f"speculation.medusa_choices name rank {section.tree.num_ranks - 1}, but the target has "
            f"{context.target_vocab_size} tokens"
        )
    return MedusaDrafter(context.target, context.heads, section.tree, section)
