"""What a draft with another tokenizer has in common with its target, read from their directories.

It knows the configuration and tokenizers. It does not know ranks, nor how drafts are translated.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtrun.start.job_spec import JobSpec
from trtrun.tokens.translation import Vocabularies, read_vocabularies


def read_draft_vocabularies(spec: JobSpec) -> Vocabularies:
    """The vocabularies of target and draft, where the tokenizers are not the same.

    Raises:
        CheckpointError: a tokenizer is missing or damaged, or cannot be matched.
    """
    config = spec.config
    assert config.draft is not None
    ends = (spec.model_of(role).eos_token_ids for role in ("target", "draft"))
    return read_vocabularies(config.tokenizer or config.target.model, config.draft.model, *ends)


@dataclass(frozen=True)
class DraftTranslation:
    """How drafts get from one vocabulary to the other.

    Attributes:
        vocabulary: `draft.vocabulary`, which is not `auto` any more.
        common_tokens: that both have.
        target_tokens, draft_tokens: of each vocabulary, without a model's padding.
    """

    vocabulary: str
    common_tokens: int
    target_tokens: int
    draft_tokens: int

    @classmethod
    def of(cls, spec: JobSpec) -> DraftTranslation | None:
        """The way of a job's drafts; None where nothing is translated.

        Raises:
            CheckpointError: see `read_draft_vocabularies`.
        """
        draft = spec.config.draft
        if draft is None or not draft.is_translated:
            return None
        common = read_draft_vocabularies(spec).common
        return cls(draft.vocabulary, len(common.draft_of), common.num_target, common.num_draft)

    def describe(self) -> str:
        """One line."""
        made = "are among the tokens that both have" if self.vocabulary == "intersection" else "become tokens as text"
        share, own = (self.common_tokens / max(1, size) for size in (self.target_tokens, self.draft_tokens))
        return (
            f"the draft has another tokenizer (draft.vocabulary: {self.vocabulary}): drafts {made}; "
            f"{self.common_tokens} tokens meet, {share:.0%} of the target's {self.target_tokens} and {own:.0%} of the "
            f"draft's {self.draft_tokens}"
        )
