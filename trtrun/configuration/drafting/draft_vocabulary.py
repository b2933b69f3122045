"""How tokens of a draft model become the target's, where the configuration leaves that open: files of tokenizers tell.

It knows sections. What is in those files is the business of `trtrun.tokens`, which is loaded for it alone.
"""

from __future__ import annotations

from pathlib import Path

from trtrun.configuration.drafting.drafting_methods import DraftModelSection
from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.configuration.model_sections import DraftSection
from trtrun.errors import ConfigError


def settle_vocabulary(
    draft: DraftSection, speculation: SpeculationSection, tokenizer: Path, where: str
) -> DraftSection:
    """The section with a `vocabulary` that is not `auto`.

    Args:
        draft: the section; its directory is there.
        speculation: what is drafted with it.
        tokenizer: directory of the target's tokenizer.
        where: what to call the file in messages.

    Raises:
        ConfigError: options of the method do not go with a draft of another tokenizer.
    """
    if not isinstance(speculation, DraftModelSection):  # a method of one's own, which takes tokens as they are
        if draft.is_translated:
            raise ConfigError(
                f"{where}: draft.vocabulary: {draft.vocabulary} goes with method draft_target alone, but the method is "
                f"{speculation.method}: leave it out"
            )
        return draft.model_copy(update={"vocabulary": "same"})
    if draft.vocabulary == "auto":
        from trtrun.tokens.translation import choose_way

        way = choose_way(tokenizer, draft.model)
        if way == "text" and speculation.use_logits:
            way = "intersection"  # which alone has probabilities
        draft = draft.model_copy(update={"vocabulary": way})
    if draft.is_translated:
        for key in ("ahead", "parallel_drafting"):
            if getattr(speculation, key) == "on":
                raise ConfigError(
                    f"{where}: speculation.{key}: is on, but a draft whose tokenizer is not the target's "
                    f"(draft.vocabulary: {draft.vocabulary}) drafts step by step, behind each verdict: leave it out"
                )
    if draft.vocabulary == "text" and speculation.use_logits:
        raise ConfigError(
            f"{where}: speculation.use_logits: does not go with draft.vocabulary text, which proposes tokens "
            "without probabilities: leave it out, as sampled output is the target's own without it, or set "
            "draft.vocabulary to intersection"
        )
    return draft
