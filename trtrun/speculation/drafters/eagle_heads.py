"""The drafting methods `eagle`, `eagle3` and `mtp`: a head on the target ranks, or on a rank of its own.

This module knows which drafter a rank needs. It does not know how any of them drafts.
"""

from __future__ import annotations

from trtrun.configuration.drafting.draft_trees import ChoiceTree, DynamicTree
from trtrun.configuration.drafting.head_methods import EagleSection
from trtrun.errors import ConfigError
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.drafters.eagle import ApartEagleDrafter, EagleDrafter


@DRAFTERS.register("eagle")
@DRAFTERS.register("eagle3")
@DRAFTERS.register("mtp")
def make_eagle_drafter(context: DrafterContext) -> Drafter:
    """The head over the target's rows, or over rows of its own.

    Raises:
        ConfigError: the tree wants more tokens behind a node than there are.
    """
    section = context.section
    assert isinstance(section, EagleSection) and context.heads is not None
    tree, most = section.tree, context.target_vocab_size
    if isinstance(tree, DynamicTree) and tree.top_k > most:
        raise ConfigError(f"speculation.eagle_topk is {tree.top_k}, but the target has {most} tokens")
    if isinstance(tree, ChoiceTree) and tree.num_ranks > most:
        raise ConfigError(f"speculation.eagle_choices name rank {tree.num_ranks - 1}, but the target has {most} tokens")
    if context.target is not None:
        return EagleDrafter(context.heads, section.draft_len, tree, section)
    if context.guess_space is not None and context.guess_space.most_guesses and tree is None:
        from trtrun.speculation.ahead.heads import AheadEagleDrafter  # which imports this package

        return AheadEagleDrafter(
            context.heads, section.draft_len, section, most, context.guess_space, context.guess_steps
        )
    return ApartEagleDrafter(context.heads, section.draft_len, tree, section)
