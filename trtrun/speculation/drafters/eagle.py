"""An EAGLE head (EAGLE-1, EAGLE-2: Li et al. 2024, arXiv:2401.15077, arXiv:2406.16858; EAGLE-3: Li et al. 2025,
arXiv:2503.01840) on the target ranks, in chains and in trees, and on a rank of its own.

The head keeps keys and values of every position, in the target's blocks. What it keeps of position i is made of the
target's hidden states of i and of the token at i + 1, so that each round feeds it what the target has just read, one
position late: prompts chunk by chunk, and the tokens that a row gained. Behind the last of them stands the first draft
token; for the others the head goes on with its own states. These write scratch behind what is fed, which the next round
writes over with the target's states; of trees, blocks that no row has.

A row with a draft KV is fed in all rounds, whether tokens are drafted in them or not: what the target computed is gone
afterwards. Rows that nothing is drafted for in any round are left alone.

On a rank of its own hidden states come beside each verdict, of the tokens that rows have gained, and of chunks of
prompts as the target reads them. So it feeds them as on the target's ranks, and drafts the same. Where those of a round
did not come, as the target does not wait for a rank that is far behind, the head lacks a part of their rows, and
proposes nothing for them any more; that blocks of theirs are reused all the same costs acceptance alone.

It does not know files, how hidden states travel, or how heads compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Generic

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.draft_trees import ChoiceTree, DynamicTree
from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import Draft, FedPart, RoundPlan, Step, Verdict
from trtrun.speculation.drafters.running_heads import RunningHeadDrafter
from trtrun.speculation.head_trees import HeadTrees
from trtrun.speculation.protocols import FeatureHeads, PreparedStep
from trtrun.speculation.text_drafts import Suggestion
from trtrun.speculation.trees import along_paths
from trtrun.tensors import cached_range, cached_tensor, device_integers, inference


class EagleDrafter(RunningHeadDrafter[FeatureHeads[PreparedStep]], Generic[PreparedStep]):
    """Proposes a chain for each row, step by step, or a tree, depth by depth."""

    def __init__(
        self,
        heads: FeatureHeads[PreparedStep],
        draft_len: int,
        tree: ChoiceTree | DynamicTree | None = None,
        options: HybridOptions | None = None,
    ) -> None:
        """Draft up to `draft_len` tokens, one behind the other, for each of the rows of `heads`; trees of a shape or
        with bounds, or chains without. Or where `options` have texts looked up what these say."""
        super().__init__(heads, options)
        self._draft_len = draft_len
        self._trees = HeadTrees(heads.rows, heads, tree) if tree is not None else None

    @inference
    @override
    def warm_up(self) -> None:
        """Run steps and what a round feeds, for numbers of rows that other kernels may serve. Nothing is at a
        position, so that all is written to the null block."""
        self._heads.warm_up()
        device, count, most = self._states.device, 1, len(self._states)
        while True:
            rows, parts = cached_range(0, count, device), list[FedPart]()
            for taken, width in ((rows, self._draft_len + 1), (rows[:1], 2)):  # as of rows, and of a prompt beside them
                nothing = torch.zeros((len(taken), width), dtype=torch.int64, device=device)
                tapped = torch.zeros(
                    (len(taken), width, *self._heads.tapped_shape), dtype=self._states.dtype, device=device
                )
                parts.append(FedPart(taken, nothing, nothing - 1, tapped))
            states = self._heads.feed(parts, 1)
            (batch,) = self._heads.prepare_steps(self._heads.tables(rows, 1), parts[0].positions[:, :1])
            states = self._heads.step(batch, parts[0].tokens[:, 0], states[:count].clone())
            logits = self._heads.logits(states)
            self._heads.share(torch.empty_like(rows) if logits is None else logits.argmax(dim=1))
            if self._trees is not None:
                self._trees.warm_up(rows, self._draft_len)
            if count == most:
                return
            count = min(2 * count, most)

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        self._heads.begin_round(plan)
        self._given.begin_round(plan)

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """Propose as many tokens as the plan asks for: a head always has a proposal."""
        device, depth = self._states.device, plan.draft_len
        listed: list[int] = plan.decode_rows.tolist()
        asked: list[int] = plan.draft_lens.tolist()
        lens = cached_tensor([max(0, length) for length in asked], device)
        self._proposed = None
        if not depth:
            return Draft(torch.zeros((len(listed), 0), dtype=torch.int64, device=device), lens)
        fed, given = _fed_places(plan), self._given.propose(plan)
        found = None if given is None else given.num_suffix_tokens
        if len(fed) == len(listed):  # as in most rounds, where fewer operations are launched
            tokens, paths = self._draft(plan, listed, asked, given)
        else:
            places = cached_tensor(fed, device)
            given = None if given is None else given.of_rows(places)
            listed, asked = ([of_row[index] for index in fed] for of_row in (listed, asked))
            of_followed, paths = self._draft(plan, listed, asked, given)
            tokens = of_followed.new_zeros((len(lens), of_followed.shape[1])).index_copy_(0, places, of_followed)
            if paths is not None:
                paths = paths.new_full((len(lens), *paths.shape[1:]), -1).index_copy_(0, places, paths)
        self._proposed = Draft(tokens, lens, paths=paths, num_suffix_tokens=found)
        return self._proposed

    def _draft(
        self, plan: RoundPlan, listed: list[int], asked: list[int], given: Suggestion | None
    ) -> tuple[Tensor, Tensor | None]:
        """[R, draft_len] int64 for the R rows `listed`, of which each needs as many as `asked` says; `given` are those
        that take the place of the head's. What its steps write nobody needs, so that they are left out where all are
        given. Of trees the nodes, and their paths (see `Draft`)."""
        if self._trees is None and given is not None and len(given.whole_rows(asked)) == len(listed):
            return given.tokens, None
        rows = cached_tensor(listed, self._states.device)
        lengths = self._rows.lengths.index_select(0, rows)
        hidden = self._states.index_select(0, rows)
        positions = self._step_positions(plan, lengths, asked)
        if self._trees is not None:
            return self._trees.draft(plan, listed, asked, rows, positions, hidden, given)
        draft = partial(self._heads.draft, rows, hidden, positions, plan.max_context)
        if given is None and (drafted := self._chain(listed, lengths, draft)) is not None:
            return drafted, None
        tables = self._heads.tables(rows, plan.max_context)
        batches = self._heads.prepare_steps(tables, positions) if plan.draft_len > 1 else ()
        chosen = list[Tensor]()
        for step in range(plan.draft_len):
            token = self._choose(plan, listed, lengths + step, hidden)
            if given is not None:
                token = torch.where(given.is_given[:, step], given.tokens[:, step], token)
            chosen.append(token)
            if step + 1 < plan.draft_len:
                # Scratch behind the row's length: penalties of the next step see it; a verdict overwrites it.
                self._rows.token_ids[rows, lengths + step] = token.to(torch.int32)
                hidden = self._heads.step(batches[step], token, hidden)
        return torch.stack(chosen, dim=1), None

    def _step_positions(self, plan: RoundPlan, lengths: Tensor, asked: list[int]) -> Tensor:
        """[R, draft_len - 1] int64, where all draft tokens but the last are fed: the first of them, which stands at the
        place of a row's length [R], one position before. -1 where a row needs no more."""
        steps = cached_range(0, plan.draft_len - 1, lengths.device)
        positions = lengths.unsqueeze(1) - 1 + steps
        if min(asked) < plan.draft_len:
            needed = steps + 1 < cached_tensor(asked, lengths.device).unsqueeze(1)
            positions = torch.where(needed, positions, -1)
        return positions

    @inference
    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """Feed what the target has read, and keep the state behind each row's newest token but one."""
        assert step is not None and step.hidden is not None
        parts, ended = list[FedPart](), list[tuple[int, int]]()
        fed, place, last = _fed_places(plan), 0, None
        if fed:
            assert verdict is not None
            part, last = self._gained(plan, fed, verdict, step.hidden.decoded)
            parts.append(part)
            place = part.tokens.numel()
        num_decoded = place
        for chunk, states in zip(plan.prefill, step.hidden.prompts, strict=True):
            if not chunk.has_draft_kv:
                continue
            parts.append(self._read(chunk.row, chunk.start, chunk.length, states))
            place += chunk.length
            if chunk.is_last:
                ended.append((chunk.row, place - 1))
        if not parts:
            return
        found = self._heads.feed(parts, plan.max_context)
        if last is not None:
            self._states.index_copy_(0, parts[0].rows, found[:num_decoded].index_select(0, last))
        if ended:
            rows, places = (device_integers(list(one), found.device) for one in zip(*ended, strict=True))
            self._states.index_copy_(0, rows, found.index_select(0, places))

    def _gained(self, plan: RoundPlan, fed: list[int], verdict: Verdict, decoded: Tensor) -> tuple[FedPart, Tensor]:
        """What the decode rows at the places `fed` feed, which have moved on by now; and of each row [R] the last
        of its tokens that counts, among all of them."""
        device, listed = decoded.device, plan.decode_rows.tolist()
        gained = verdict.num_tokens[: len(listed)]
        if self._proposed is not None and self._proposed.paths is not None:
            decoded = along_paths(self._proposed, verdict, decoded)
        if len(fed) < len(listed):
            places = cached_tensor(fed, device)
            gained, decoded = gained.index_select(0, places), decoded.index_select(0, places)
        rows, width = cached_tensor([listed[index] for index in fed], device), decoded.shape[1]
        if device.type == "cpu":  # where reading costs nothing, and each token does
            width = max(1, int(gained.max()))
        steps = cached_range(0, width, device)
        first = self._rows.lengths.index_select(0, rows) - gained - 1
        positions = torch.where(steps < gained.unsqueeze(1), first.unsqueeze(1) + steps, -1)
        behind = (positions + 1).clamp(min=0)
        tokens = self._rows.token_ids[rows.unsqueeze(1), behind].to(torch.int64)
        last = cached_range(0, len(fed), device) * width + (gained - 1).clamp(min=0)
        return FedPart(rows, tokens, positions, decoded[:, :width]), last

    def _read(self, row: int, start: int, length: int, tapped: Tensor) -> FedPart:
        """A chunk of a prompt; behind its last token stands what was chosen there."""
        device = self._states.device
        # A row that gains nothing has padding there.
        tokens = self._rows.token_ids[row, start + 1 : start + length + 1].to(torch.int64).clamp(min=0)
        positions = torch.arange(start, start + length, device=device)
        return FedPart(cached_tensor([row], device), tokens.unsqueeze(0), positions.unsqueeze(0), tapped.unsqueeze(0))


def _fed_places(plan: RoundPlan) -> list[int]:
    """Indices into the plan's decode rows of those that something is drafted for, in this round or in others."""
    return [index for index, length in enumerate(plan.draft_lens.tolist()) if length >= 0]


class ApartEagleDrafter(EagleDrafter[PreparedStep]):
    """An EAGLE head on a rank of its own; drafts and verdicts are on the host."""

    _lacking: frozenset[int] = frozenset()

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        self._lacking -= {*plan.dropped_rows, *(admission.row for admission in plan.admissions)}
        super().begin_round(plan)

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """The device of drafts: the host, as they travel as messages."""
        draft = super().propose(plan, probability_rows)
        # What the target tells of a tree is that of the accepted path alone.
        self._proposed = None
        lens = [
            0 if row in self._lacking else max(0, length)
            for row, length in zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
        ]
        found = draft.num_suffix_tokens
        return replace(
            draft,
            tokens=draft.tokens.cpu(),
            draft_lens=torch.tensor(lens, dtype=torch.int64),
            paths=None if draft.paths is None else draft.paths.cpu(),
            num_suffix_tokens=None if found is None else found.cpu(),
        )

    @inference
    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """Move rows on, and feed them what came of them."""
        self._proposed = None
        if verdict is not None:
            device = self._states.device
            counts, tokens = (part.to(device, non_blocking=True) for part in (verdict.num_tokens, verdict.tokens))
            verdict = Verdict(counts, tokens)
            self._rows.advance(cached_tensor(plan.sampled_rows, device), verdict.num_tokens, verdict.tokens)
        if step is None:
            self._lacking |= fed_rows(plan)
        elif fed_rows(plan):
            super().observe(plan, verdict, step)


def fed_rows(plan: RoundPlan) -> frozenset[int]:
    """Rows that a round feeds to heads: those that something is drafted for in any round."""
    decoding = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
    return frozenset(
        [row for row, length in decoding if length >= 0] + [chunk.row for chunk in plan.prefill if chunk.has_draft_kv]
    )
