"""The drafting methods: what each is called, where it runs, whether it needs a draft model or heads, its own options.

One table, read by the configuration, the command line, placement and start-up. A method is an entry here and a file in
`speculation/drafters`, which registers under the same name how its drafter is made. It knows no tensor and no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from typing_extensions import override

from parallel.topology import Role
from trtrun.configuration.drafting.head_methods import (
    AssistantSection,
    DFlashSection,
    Eagle3Section,
    EagleSection,
    MedusaSection,
    MTPSection,
)
from trtrun.configuration.drafting.speculation_section import (
    DEFAULT_METHOD,
    DraftingMethod,
    HybridOptions,
    OnOrOff,
    SpeculationSection,
)
from trtrun.configuration.drafting.speculation_section import (
    METHODS as METHODS,  # of those who import it from here it is full
)
from trtrun.configuration.drafting.text_methods import (
    LookaheadSection,
    PromptLookupSection,
    SuffixSection,
    TokenRecyclingSection,
)
from trtrun.configuration.engine_sections import DraftSection
from trtrun.errors import ConfigError

NO_DRAFTS = "none"


class DraftModelSection(HybridOptions, SpeculationSection):
    """Options of `draft_target`.

    Attributes:
        ahead: whether draft ranks draft for the likely verdicts of a round while the target verifies it: `on` where
            draft and target share no device, `auto` there unless CPU ranks outnumber the cores, and in rounds where it
            gains more than a fresh draft, as measured at the start and since; `off` never.
        parallel_drafting: whether all tokens of a draft come from one forward of a draft model that was trained with
            mask tokens (PARD): `auto` where its config.json names one, `on` refuses a draft without, `off` drafts token
            by token.
    """

    ahead: OnOrOff = "auto"
    parallel_drafting: OnOrOff = "auto"

    @property
    @override
    def drafting_ahead(self) -> Literal["auto", "on", "off"]:
        return self.ahead


_on_target = partial(DraftingMethod, Role.TARGET, needs_draft_model=False, has_probabilities=False)

METHODS |= {
    "draft_target": DraftingMethod(
        Role.DRAFT,
        needs_draft_model=True,
        has_probabilities=True,
        section=DraftModelSection,
        to_check="see whether draft.model was made for this target, and for texts like these",
    ),
    "ngram": _on_target(section=PromptLookupSection, to_check="prompt lookup finds only what a text repeats"),
    "suffix": _on_target(section=SuffixSection, to_check="suffix decoding finds only what texts repeat"),
    "token_recycling": _on_target(
        section=TokenRecyclingSection,
        to_check="token recycling looks one token back: larger trees (speculation.token_recycling_nodes) find more",
    ),
    "lookahead": _on_target(
        section=LookaheadSection, to_check="a wider window (speculation.lookahead_config) finds more"
    ),
    "medusa": _on_target(
        section=MedusaSection,
        to_check="see whether the heads were trained for this very target, and for texts like these",
        needs_heads=True,
    ),
    "eagle": _on_target(
        section=EagleSection,
        to_check="see whether the head was trained for this very target, and for texts like these",
        needs_heads=True,
        may_sit_apart=True,
        num_behind=1,
    ),
    "eagle3": _on_target(
        section=Eagle3Section,
        to_check="see whether the head was trained for this very target, for texts like these, and with the layers "
        "that trtrun plan names (speculation.eagle3_layers_to_capture)",
        needs_heads=True,
        may_sit_apart=True,
        num_behind=1,
    ),
    "mtp": _on_target(
        section=MTPSection,
        to_check="a layer that was trained for one token is seldom right further on: lower speculation.draft_len",
        needs_heads=True,
        drafts_from_target=True,
        may_sit_apart=True,
        num_behind=1,
        with_files="gemma4_mtp",
    ),
    "gemma4_mtp": _on_target(
        section=AssistantSection,
        to_check="see whether the assistant was released for this very target, and for texts like these",
        needs_heads=True,
        reads_keys=True,
    ),
    **dict.fromkeys(
        ("dflash", "dspark"),
        _on_target(
            section=DFlashSection,
            to_check="see whether the head was trained for this very target, for texts like these, and with the layers "
            "that trtrun plan names",
            needs_heads=True,
            num_behind=1,
            drafts_masked=True,
        ),
    ),
    NO_DRAFTS: DraftingMethod(None, needs_draft_model=False, has_probabilities=True),
}


def is_unknown(speculation: object) -> bool:
    """Whether a `speculation` section, checked or as the YAML file has it, names a method that there is not."""
    return _method_of(speculation) is None


def needs_draft_model(speculation: object) -> bool:
    """Whether the method of a `speculation` section, checked or as the YAML file has it, runs a draft model. True for
    one that is not known: what is wrong with it is the configuration's to say."""
    method = _method_of(speculation)
    return method is None or method.needs_draft_model


def needs_heads(speculation: object) -> bool:
    """Whether the method of a `speculation` section, checked or as the YAML file has it, drafts with heads."""
    method = _method_of(speculation)
    return method is not None and method.needs_heads


def name_method(speculation: object, draft: object, target: object) -> object:
    """The `speculation` section with the method that is meant where heads that lie in the target's own files as a rule
    have a directory of their own. All are as the YAML file has them."""
    method = _method_of(speculation)
    if method is None or method.with_files is None or not isinstance(speculation, Mapping):
        return speculation
    if not isinstance(draft, Mapping) or not isinstance(target, Mapping):
        return speculation
    is_own = draft.get("model") in (None, target.get("model"))
    return speculation if is_own else {**speculation, "method": method.with_files}


def place_heads(speculation: object, draft: object, target: object) -> object:
    """What `draft` says of heads, with the target's directory where the method's heads lie in that; None where it says
    nothing. All are as the YAML file has them.

    Raises:
        ValueError: it names another directory.
    """
    method = _method_of(speculation)
    if method is None or not method.drafts_from_target or not isinstance(target, Mapping):
        return draft
    own, said = target.get("model"), {} if draft is None else draft
    if not isinstance(said, Mapping):
        return draft  # which is refused where it is read
    if said.get("model") not in (None, own):
        raise ValueError("draft.model: the heads of this method lie in the target's own files: leave it out")
    return {**said, "model": own}


def check_heads_devices(method: str, devices: Sequence[str], target_devices: Sequence[str]) -> None:
    """Refuse devices of heads' own.

    Raises:
        ValueError: the method's heads cannot have any, the target has one of them, or there are several.
    """
    if not METHODS[method].may_sit_apart:
        why = ", whose keys and values they read" if METHODS[method].reads_keys else ""
        raise ValueError(
            f"draft.devices: heads of method {method} sit on the target's devices{why}: leave it out or null"
        )
    shared = [device for device in devices if device in target_devices]
    if shared:
        raise ValueError(
            f"draft.devices: {shared[0]} is the target's, too: give the head a device of its own, or leave it out to "
            "have the head on the target's devices"
        )
    if len(devices) > 1:
        raise ValueError(
            f"draft.devices: a head with a device of its own is not shared out, but {len(devices)} are listed: name one"
        )


def _method_of(speculation: object) -> DraftingMethod | None:
    if isinstance(speculation, Mapping):
        name = speculation.get("method", DEFAULT_METHOD)
    else:
        name = getattr(speculation, "method", DEFAULT_METHOD)
    return METHODS.get(name) if isinstance(name, str) else None


def read_speculation(values: object) -> object:
    """The section of the method that `values` name; what is no mapping or names no method is left to the checks behind.

    Without drafts the options of every method are allowed and forgotten, so that one file serves both runs of a
    comparison.

    Raises:
        ValueError: an option of another method, or use_logits with a method that has no draft_probs.
    """
    if not isinstance(values, Mapping):
        return values
    name = values.get("method", DEFAULT_METHOD)
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        return values
    known = method.section.model_fields
    foreign = [key for key in values if key not in known and key in SpeculationSection.known_keys()]
    if name == NO_DRAFTS:
        return method.section.model_validate({key: value for key, value in values.items() if key not in foreign})
    if foreign:
        owners = [owner for owner, other in METHODS.items() if foreign[0] in other.section.model_fields]
        named = " and ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
        raise ValueError(f"{foreign[0]} is an option of method {named}, but the method is {name}: leave it out")
    section = method.section.model_validate(values)
    if section.use_logits and not method.has_probabilities:
        raise ValueError(
            f"use_logits does not go with method {name}, which proposes tokens without probabilities: leave it out; "
            "sampled output is the target's own without it"
        )
    return section


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
