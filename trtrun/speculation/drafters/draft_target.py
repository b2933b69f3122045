"""The drafting method `draft_target`: a draft model on the draft ranks, in one of four ways.

Step by step, or all tokens in one forward where the model was trained for that; ahead of verdicts, in both ways, where
it has devices of its own; and step by step in a vocabulary of its own, where its tokenizer is not the target's.
This module knows which drafter a rank needs. It does not know how any of them drafts.
"""

from __future__ import annotations

from trtrun.configuration.drafting.drafting_methods import DraftModelSection
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.drafters.draft_model import DraftModelDrafter
from trtrun.speculation.drafters.parallel_model import ParallelDrafter
from trtrun.speculation.drafters.translated_model import TranslatedDrafter


@DRAFTERS.register("draft_target")
def make_draft_model_drafter(place: DrafterContext) -> Drafter:
    """A drafter on the rank's draft engine."""
    assert place.draft is not None
    section = place.section
    assert isinstance(section, DraftModelSection)
    if place.translation is not None:
        return TranslatedDrafter(place.draft, place.translation, section.use_logits, section)
    if place.guess_space is not None:
        return AheadDrafter(
            place.draft,
            place.target_vocab_size,
            section.draft_len,
            section.use_logits,
            place.guess_space,
            place.guess_steps,
            place.mask_token,
            section,
        )
    if place.mask_token is not None:
        return ParallelDrafter(place.draft, place.target_vocab_size, section.use_logits, place.mask_token, section)
    return DraftModelDrafter(place.draft, place.target_vocab_size, section.use_logits, section)
