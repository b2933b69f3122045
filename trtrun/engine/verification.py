"""The forward that verifies drafts, beside the prompts of the round: logits, and what is tapped on the way.

It knows rows, forwards and the shapes of a plan. It does not know which tokens are accepted.
"""

from __future__ import annotations

import torch

from trtrun.core.nouns import Draft, RoundPlan, Step
from trtrun.engine.batch import BatchBuilder
from trtrun.engine.forwards import Forwards
from trtrun.engine.prompt_logits import report_prompts
from trtrun.engine.prompt_logprobs import score_prompts, tokens_of_parts
from trtrun.engine.rows import RowState
from trtrun.models.decoder import CausalLM
from trtrun.tensors import device_integers, kept_integers


class Verification:
    """Runs it on one engine rank."""

    def __init__(self, model: CausalLM, rows: RowState, forwards: Forwards) -> None:
        self._model = model
        self._rows = rows
        self._forwards = forwards
        self._device = rows.device
        self._vocab_size = model.config.vocab_size

    def run(self, plan: RoundPlan, draft: Draft) -> Step:
        """One forward over the newest token of every decode row and its draft, and over every prefill chunk.

        Args:
            plan: the round's plan.
            draft: on the device; where its draft_lens are below 1 only the newest token is fed.
        """
        if any(chunk.scored is not None or chunk.reported is not None for chunk in plan.prefill):
            return self._verify_beside_prompts(plan, draft)  # graphs have the last positions of prompts alone
        queries = draft.tokens.shape[1] + 1
        logits = torch.empty((0, queries, self._vocab_size), device=self._device)
        rows = kept_integers(plan.decode_rows.tolist(), self._device)
        mixed = self._forwards.run_mixed(rows, draft, plan.prefill, plan.max_context)
        by_graph = mixed.prompts if mixed is not None else self._forwards.prefill_by_graph(plan.prefill)
        if by_graph is None and plan.prefill:
            return self._verify_beside_prompts(plan, draft)
        if mixed is not None:
            logits = mixed.logits
        elif len(plan.decode_rows):
            logits = self._forwards.run_drafts(rows, draft, plan.max_context).view(-1, queries, self._vocab_size)
        tapped = by_graph.tapped if by_graph is not None else []
        hidden = (
            self._forwards.taps.states(len(plan.decode_rows), queries, tapped)
            if self._forwards.taps is not None
            else None
        )
        return Step(logits if by_graph is None else self._join(logits, by_graph.logits, plan, queries), hidden)

    def _verify_beside_prompts(self, plan: RoundPlan, draft: Draft) -> Step:
        """`verify_forward` where prompts are computed beside the decode rows, in one forward."""
        builder, queries = BatchBuilder(self._rows), draft.tokens.shape[1] + 1
        if len(plan.decode_rows):
            rows = kept_integers(plan.decode_rows.tolist(), self._device)
            if draft.paths is None:
                builder.add_rows(rows, *self._rows.with_drafts(rows, draft.tokens, draft.draft_lens), plan.max_context)
            else:
                assert self._forwards.paths is not None
                builder.add_trees(self._forwards.paths.fork(rows, draft, self._forwards.tables(rows, plan.max_context)))
        num_decoded = builder.num_tokens
        places = builder.add_prompts(plan.prefill, self._forwards.prompt_width)
        ended = [of_chunk[-1][-1] for of_chunk, chunk in zip(places, plan.prefill, strict=True) if chunk.is_last]
        scored = tokens_of_parts(places, plan.prefill, lambda chunk: chunk.scored)
        reported = tokens_of_parts(places, plan.prefill, lambda chunk: chunk.reported)
        wanted = [*range(num_decoded), *ended, *scored, *reported]
        hidden = self._forwards.run(builder.build(device_integers(wanted, self._device)))
        states = None
        if self._forwards.taps is not None:
            states = self._forwards.taps.states(
                len(plan.decode_rows), queries, [self._forwards.taps.copy(one) for one in places]
            )
        scores = reports = None
        if scored or reported:
            end, behind = num_decoded + len(ended), len(wanted) - len(reported)
            if scored:
                scores = score_prompts(self._model, self._rows, plan.prefill, hidden[end:behind])
            if reported:
                reports = report_prompts(self._model, hidden[behind:])
            hidden = hidden[:end]
        if not len(hidden):
            return Step(torch.empty((0, queries, self._vocab_size), device=self._device), states, scores, reports)
        logits = self._model.logits(hidden)
        after_prompts = logits[num_decoded:].unsqueeze(1).expand(-1, queries, -1)
        decoded = logits[:num_decoded].view(-1, queries, self._vocab_size)
        return Step(torch.cat((decoded, after_prompts)), states, scores, reports)

    def _join(self, logits: torch.Tensor, after_prompts: torch.Tensor, plan: RoundPlan, queries: int) -> torch.Tensor:
        """Logits [decode_rows, queries, vocab], and behind them those of prompts that end in the round, repeated."""
        ended = [index for index, chunk in enumerate(plan.prefill) if chunk.is_last]
        if not ended:
            return logits
        last = after_prompts[device_integers(ended, self._device)].unsqueeze(1)
        return torch.cat((logits, last.expand(-1, queries, -1)))
