"""A draft model on the draft ranks: the drafting method `draft_target`.

It proposes by running a small model of the same vocabulary draft_len steps ahead. It knows an engine by protocol and
the rows' sampling parameters. It does not know the target or how its proposal travels.
"""

from __future__ import annotations

import torch

from trtrun.core import Draft, RoundPlan
from trtrun.sampling.random import Stream
from trtrun.speculation.cycle import probability_rows
from trtrun.speculation.protocols import DraftEngine
from trtrun.tensors import device_integers


class DraftModelDrafter:
    """Drafts with a model. All steps stay on the device: no host round trip between them.

    In token mode the draft draws with the same random numbers as the target will (the coupling of Daliri et al. 2024,
    arXiv:2408.07978), so that two similar distributions choose the same token most of the time. With draft_probs it
    must draw independently of the target, from a stream of its own.
    """

    placement = "draft"

    def __init__(self, engine: DraftEngine, target_vocab_size: int, use_logits: bool) -> None:
        """Draft with `engine`; its vocabulary may be padded differently from the target's `target_vocab_size`."""
        self._engine = engine
        self._target_vocab_size = target_vocab_size
        # Ids that only the draft's padding has could never be accepted, so they are not proposed.
        self._vocab_size = min(engine.vocab_size, target_vocab_size)
        self._use_logits = use_logits
        self._stream = Stream.DRAFT if use_logits else Stream.TARGET

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        self._engine.begin_round(plan)

    @torch.inference_mode()
    def propose(self, plan: RoundPlan) -> Draft:
        """See Drafter."""
        self._engine.prefill([chunk for chunk in plan.prefill if chunk.drafted])
        device, draft_len = self._engine.device, plan.draft_len
        tokens = torch.zeros((len(plan.decode_rows), draft_len), dtype=torch.int64, device=device)
        counts = plan.catch_up.tolist()
        followed = [index for index, count in enumerate(counts) if count > 0]
        if not followed:
            return Draft(tokens)
        row_list = plan.decode_rows[followed].tolist()
        rows = device_integers(row_list, device)
        logits = self._engine.catch_up(rows, [counts[index] for index in followed], plan.max_context)
        if draft_len == 0:
            return Draft(tokens)
        wanted = set(probability_rows(plan, self._engine.rows.sampling, self._use_logits))
        picks = [place for place, index in enumerate(followed) if index in wanted]
        lens = device_integers(plan.draft_lens[followed].tolist(), device)
        steps, probs = self._steps(plan, row_list, rows, lens, logits, picks)
        tokens[device_integers(followed, device)] = steps
        return Draft(tokens, probs)

    def _steps(
        self,
        plan: RoundPlan,
        row_list: list[int],
        rows: torch.Tensor,
        lens: torch.Tensor,
        logits: torch.Tensor,
        picks: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """draft_len steps for `rows` [R], from the logits [R, vocab] after their newest token.

        Returns:
            tokens [R, draft_len] int64 and draft_probs [picks, draft_len, target vocab] float32 or None.
        """
        state = self._engine.rows
        lengths = state.lengths[rows]
        pick_index = device_integers(picks, rows.device)
        chosen, probabilities = [], []
        fed = torch.arange(plan.draft_len - 1, device=rows.device)
        positions = torch.where(fed + 1 < lens.unsqueeze(1), lengths.unsqueeze(1) + fed, -1)
        batches = self._engine.prepare_steps(rows, positions, plan.max_context) if plan.draft_len > 1 else ()
        for step in range(plan.draft_len):
            where = lengths + step
            raw = logits[:, : self._vocab_size].unsqueeze(1)
            processed = state.sampling.process(raw, row_list, where, state.history, None, plan.max_context)
            token = state.sampling.choose(processed, row_list, where, self._stream).squeeze(1)
            chosen.append(token)
            if picks:
                probabilities.append(state.sampling.probabilities(processed[pick_index, 0]))
            if step + 1 < plan.draft_len:
                # Scratch behind the row's length: penalties of the next step see it; a verdict overwrites it.
                state.history[rows, where] = token.to(torch.int32)
                logits = self._engine.decode(batches[step], token)
        tokens = torch.stack(chosen, dim=1)
        if not picks:
            return tokens, None
        probs = torch.stack(probabilities, dim=1)
        return tokens, torch.nn.functional.pad(probs, (0, self._target_vocab_size - self._vocab_size))

    def close(self) -> None:
        """See Drafter."""
        self._engine.close()

    def advance(self, plan: RoundPlan, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """See Drafter."""
        rows = device_integers(plan.sampled_rows, self._engine.device)
        self._engine.rows.advance(rows, num_tokens, tokens)
