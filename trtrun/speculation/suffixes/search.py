"""What may follow rows, by what followed their last tokens before: in their own prompts and outputs, in past answers
and in a corpus.

It knows where rows stand, and which of them a plan drops. It does not know who drafts, nor what becomes of what is
found. Nothing is read back from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtrun.configuration.drafting.speculation_section import SuffixOptions
from trtrun.core.nouns import RoundPlan
from trtrun.speculation.found_paths import Continuations
from trtrun.speculation.protocols import Texts
from trtrun.speculation.suffixes.continuations import MOST_PLACES, Places, SuffixRule, join_places, likely_paths
from trtrun.speculation.suffixes.corpus import PastAnswers, SortedCorpus
from trtrun.tensors import cached_range, inference

_NOWHERE = -3
"""Stands in place of a token before a row's start. Corpora have -1 and -2 in such places."""


def last_tokens(token_ids: Tensor, lengths: Tensor, most: int) -> Tensor:
    """[R, most] int32: the last tokens of rows, the newest last; before a row's start what stands nowhere else, and is
    less than all that does.

    Args:
        token_ids: [R, columns] int32: the rows' tokens; scratch behind a row's length.
        lengths: [R] int64.
        most: tokens of each.
    """
    places = lengths.unsqueeze(1) + cached_range(-most, 0, token_ids.device)
    return torch.where(places >= 0, token_ids.gather(1, places.clamp(min=0)), _NOWHERE)


def find_in_rows(token_ids: Tensor, lengths: Tensor, wanted: Tensor, draft_len: int) -> Places:
    """The places of longest match in each row, of equally long ones the latest.

    Args:
        token_ids: [R, columns] int32: the rows' tokens; scratch behind a row's length.
        lengths: [R] int64.
        wanted: [R, most] int32: their last tokens, as `last_tokens` has them.
        draft_len: K, tokens behind each.
    """
    columns, most, device = token_ids.shape[1], wanted.shape[1], token_ids.device
    last = lengths.unsqueeze(1) - 1
    before = pad(token_ids, (most - 1, 0), value=-1).unfold(1, columns, 1)
    # The nearer to the newest token, the more: what is most is where the first other token stands.
    nearness = cached_range(1, most + 1, device).to(torch.uint8).unsqueeze(1)
    nearest = ((before != wanted.unsqueeze(2)) * nearness).amax(dim=1)
    matched = most - nearest.to(torch.int32)
    places = torch.arange(columns, dtype=torch.int32, device=device)
    scores = torch.where(places < last, matched * columns + places, 0)
    best, end = scores.topk(min(MOST_PLACES, columns), dim=1)
    matched = best.to(torch.int64) // columns
    counts = (last - end).clamp(min=0, max=draft_len)
    behind = end.unsqueeze(2) + cached_range(1, draft_len + 1, device)
    tokens = token_ids.gather(1, behind.clamp(max=columns - 1).flatten(1)).to(torch.int64)
    # Behind a row's end stands scratch, -1 too, which must be some token: it is fed with the rest.
    return Places(matched, tokens.clamp(min=0).view(behind.shape), counts)


_MOST_COMPARED = 1 << 21
"""Pairs of tokens that are compared at a time: with many rows of long contexts, memory stays within some tens of
megabytes."""


class SuffixSearch:
    """Looks up in all of them."""

    def __init__(
        self,
        texts: Texts,
        rule: SuffixRule,
        corpus: SortedCorpus | None = None,
        answers: PastAnswers | None = None,
    ) -> None:
        """Look in `texts`, `answers` of the past and `corpus`, by `rule`."""
        self._texts = texts
        self._rule = rule
        self._corpus = corpus
        self._answers = answers
        self._starts: dict[int, int] = {}

    @classmethod
    def of_options(cls, options: SuffixOptions, texts: Texts, corpus: SortedCorpus | None = None) -> SuffixSearch:
        """Search by the configuration's options, on the device of `texts`."""
        rule = SuffixRule(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_max_spec_offset,
            options.suffix_decoding_min_token_prob,
        )
        answers = None
        if options.suffix_decoding_max_cached_requests:
            answers = PastAnswers(
                options.suffix_decoding_max_cached_requests,
                options.suffix_decoding_max_cached_tokens,
                rule.most_matched,
                texts.lengths.device,
            )
        return cls(texts, rule, corpus, answers)

    @inference
    def release_rows(self, plan: RoundPlan) -> None:
        """What rows wrote that the plan drops becomes a past answer, but nothing of rows that nobody asked for. Before
        anything of the plan is taken in."""
        for row in plan.dropped_rows:
            start = self._starts.pop(row, None)
            if self._answers is not None and start is not None:
                self._answers.add(self._texts.token_ids[row], start, self._texts.lengths[row])

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come."""
        if plan.is_warm_up:
            return
        for admission in plan.admissions:
            self._starts.pop(admission.row, None)
            if admission.sampling.cache_salt is not None:
                continue  # its answer is nobody else's
            # What a preempted row had written is known, but for what goes on from its last tokens.
            known = len(admission.tokens) - self._rule.most_matched
            self._starts[admission.row] = max(admission.num_prompt_tokens, known)

    def rows_at_a_time(self, columns: int, draft_len: int) -> int:
        """Rows to look at at once, so that memory stays bounded; 0 is taken for 1."""
        return _MOST_COMPARED // max(self._rule.most_matched * columns, MOST_PLACES**2 * draft_len)

    def look_up(
        self, rows: Tensor, draft_len: int, columns: int, max_paths: int = 1, min_match: int = 1
    ) -> Continuations:
        """What is likely to follow.

        Args:
            rows: [R] int64.
            draft_len: K, tokens of each continuation at most.
            columns: upper bound of the rows' lengths, which the host knows.
            max_paths: continuations of each row, at most.
            min_match: of a row's last tokens that must have stood in a place before, all together.
        """
        token_ids = self._texts.token_ids[rows, :columns]
        lengths = self._texts.lengths.index_select(0, rows)
        wanted = last_tokens(token_ids, lengths, self._rule.most_matched)
        places = find_in_rows(token_ids, lengths, wanted, draft_len)
        of_answers = None if self._answers is None else self._answers.corpus()
        for texts in (of_answers, self._corpus):
            if texts is not None:
                places = join_places(places, texts.find(wanted, draft_len))
        if min_match > 1:
            places = places._replace(matched=torch.where(places.matched >= min_match, places.matched, 0))
        return likely_paths(places, self._rule, max_paths)
