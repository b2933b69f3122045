"""Options of the drafting methods with heads.

It knows no tensor and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from trtrun.configuration.drafting.draft_trees import (
    MOST_NODES,
    Choice,
    ChoiceTree,
    DynamicTree,
    read_choices,
    read_eagle_choices,
)
from trtrun.configuration.drafting.speculation_section import DraftSize, HybridOptions, OnOrOff, SpeculationSection
from trtrun.configuration.process_sections import Number

MAX_TOPK = 32


def _as_choices(value: object) -> object:
    return None if value is None else read_choices(value)


def _as_eagle_choices(value: object) -> object:
    return None if value is None else read_eagle_choices(value)


class _ChoicesSection(HybridOptions, SpeculationSection):
    """Options of a method with a tree of ranks, which its key and draft_len say together."""

    CHOICES_KEY: ClassVar[str]
    READ_CHOICES: ClassVar[Callable[[object], tuple[Choice, ...]]]

    @model_validator(mode="before")
    @classmethod
    def _take_depth(cls, values: object) -> object:
        """Draft as deep as the tree is. What is wrong with it is said at its key."""
        if not isinstance(values, Mapping) or values.get(cls.CHOICES_KEY) is None or "draft_len" in values:
            return values
        try:
            choices = cls.READ_CHOICES(values[cls.CHOICES_KEY])
        except ValueError:
            return values
        return {**values, "draft_len": ChoiceTree.of(choices).depth}

    @model_validator(mode="after")
    def _check_depth(self) -> Self:
        choices = getattr(self, self.CHOICES_KEY)
        depth = self.draft_len if choices is None else ChoiceTree.of(choices).depth
        if self.draft_len > depth:
            raise ValueError(
                f"draft_len is {self.draft_len}, but {self.CHOICES_KEY} are {depth} deep: set it to {depth} or less, "
                "or leave it out"
            )
        if self.enable_suffix_decoding and self.static_tree is not None:
            raise ValueError(f"enable_suffix_decoding does not go with a tree: leave {self.CHOICES_KEY} out")
        return self

    @property
    def tree(self) -> ChoiceTree | DynamicTree | None:
        """The draft tree, no deeper than draft_len, or its bounds; None where drafts are chains."""
        return self.static_tree

    @override
    def size_of(self, draft_len: int) -> DraftSize:
        return DraftSize.of(self.tree, draft_len)

    @property
    @override
    def tree_key(self) -> str:
        return self.CHOICES_KEY

    @property
    def static_tree(self) -> ChoiceTree | None:
        """The tree of ranks, no deeper than draft_len; None where it is a chain or there is none."""
        choices = getattr(self, self.CHOICES_KEY)
        if choices is None:
            return None
        tree = ChoiceTree.of(choices).cut(self.draft_len)
        return None if len(tree.paths) == 1 and tree == ChoiceTree.chain(tree.depth) else tree


class MedusaSection(_ChoicesSection):
    """Options of `medusa`. Each head drafts one token, so draft_len is at most the number of heads. A chain takes the
    likeliest token of each; a tree the likely ones, so that more is accepted and more has to be verified: on CPUs,
    where each token costs, a chain is faster.

    Known trees, of 63 tokens each: `mc_sim_7b_63`, `vicuna_7b_stage1`, `vicuna_7b_stage2`, `vicuna_13b_stage1`,
    `vicuna_13b_stage2`, `vicuna_33b_stage1`, `vicuna_33b_stage2`, `zephyr_stage2`.

    Attributes:
        medusa_choices: a draft tree, as in TensorRT-LLM: paths of ranks without the root, such as
            `[[0], [1], [0, 0]]`, or a known tree's name. draft_len is its depth where left out, and cuts a deeper one.
            Left out: a chain.
    """

    CHOICES_KEY: ClassVar[str] = "medusa_choices"
    READ_CHOICES: ClassVar[Callable[[object], tuple[Choice, ...]]] = staticmethod(read_choices)

    medusa_choices: Annotated[tuple[Choice, ...] | None, BeforeValidator(_as_choices)] = None

    @property
    def tree(self) -> ChoiceTree | None:
        """The draft tree, no deeper than draft_len; None where drafts are chains."""
        return self.static_tree


class EagleSection(_ChoicesSection):
    """Options of `eagle`, and of `eagle3`, too. A head of EAGLE-1, which is EAGLE-2's as well, drafts step by step from
    what leaves the target's final norm.

    Drafts are chains, or trees: of a shape that is known (`eagle_choices`), or of one that follows from how likely
    tokens are (`eagle_topk`, as in EAGLE-2). More of a tree is accepted, and more has to be verified: on CPUs,
    where each token costs, a chain is faster.

    Attributes:
        eagle_choices: a draft tree, as in TensorRT-LLM: paths of ranks without the root, such as
            `[[0], [1], [0, 0]]`, or `mc_sim_7b_63`, the reference's of 25 tokens. draft_len is its depth where left
            out, and cuts a deeper one.
        eagle_topk: of a dynamic tree, as in SGLang: tokens of each depth that are continued, and continuations of each
            that are looked at. 1 is a chain.
        max_total_draft_tokens: tokens of a dynamic tree that are kept, the likeliest, as in TensorRT-LLM, without the
            row's newest one. Left out: eagle_topk times draft_len.
        ahead: whether a head with a device of its own (`draft.devices`) goes on, while the target verifies, from the
            likely verdicts with states of its own: as of `draft_target`; `auto` leaves it, too, where drafts are trees
            or texts are looked up.
    """

    CHOICES_KEY: ClassVar[str] = "eagle_choices"
    READ_CHOICES: ClassVar[Callable[[object], tuple[Choice, ...]]] = staticmethod(read_eagle_choices)

    eagle_choices: Annotated[tuple[Choice, ...] | None, BeforeValidator(_as_eagle_choices)] = None
    eagle_topk: Annotated[int, Number, Field(ge=1, le=MAX_TOPK)] = 1
    max_total_draft_tokens: Annotated[int, Number, Field(ge=1, le=MOST_NODES)] | None = None
    ahead: OnOrOff = "auto"

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        kept = self.max_total_draft_tokens
        if self.eagle_choices is not None and self.eagle_topk > 1:
            raise ValueError("eagle_choices and eagle_topk are two trees: leave one of them out")
        if self.enable_suffix_decoding and self.eagle_topk > 1:
            raise ValueError("enable_suffix_decoding does not go with a tree: leave eagle_topk out")
        if kept is not None and self.eagle_topk == 1:
            raise ValueError("max_total_draft_tokens is of dynamic trees: set eagle_topk to 2 or more, or leave it out")
        for key in ("draft_len", "eagle_topk"):
            if kept is not None and kept < getattr(self, key):
                raise ValueError(
                    f"max_total_draft_tokens is {kept}, but {key} is {getattr(self, key)}: set it to that or more, or "
                    f"lower {key}"
                )
        return self

    @model_validator(mode="after")
    def _check_ahead(self) -> Self:
        if self.ahead == "on" and self.tree is not None:
            raise ValueError(f"ahead does not go with a tree: leave it out, or {self.way_to_chains}")
        if self.ahead == "on" and self.enable_suffix_decoding:
            raise ValueError("ahead does not go with enable_suffix_decoding here: leave one of them out")
        return self

    @property
    @override
    def drafting_ahead(self) -> Literal["auto", "on", "off"]:
        return "off" if self.tree is not None or self.enable_suffix_decoding else self.ahead

    @property
    def tree(self) -> ChoiceTree | DynamicTree | None:
        """The draft tree, no deeper than draft_len, or its bounds; None where drafts are chains."""
        if self.eagle_topk == 1:
            return self.static_tree
        kept = self.max_total_draft_tokens
        if kept is None:
            kept = min(MOST_NODES, self.eagle_topk * self.draft_len)
        return DynamicTree(self.eagle_topk, kept, self.draft_len)

    @property
    @override
    def tree_key(self) -> str:
        return self.CHOICES_KEY if self.eagle_topk == 1 else "max_total_draft_tokens"

    @property
    @override
    def way_to_chains(self) -> str:
        if self.eagle_topk == 1:
            return super().way_to_chains
        kept = "" if self.max_total_draft_tokens is None else " and max_total_draft_tokens"
        return f"leave speculation.eagle_topk{kept} out"

    @property
    @override
    def most_fed(self) -> int:
        if isinstance(self.tree, DynamicTree):
            return self.tree.top_k
        return 0 if self.tree is None else max(1, self.tree.most_continued)


class Eagle3Section(EagleSection):
    """Options of `eagle3`, beside those of `eagle`. The head drafts step by step from hidden states of the target: from
    those of which layers, its config.json says in one of two ways, or not at all. Where drafts are seldom right, see
    whether `trtrun plan` names the layers that it was trained with.

    Attributes:
        eagle3_layers_to_capture: layers of the target, from 0, whose output the head reads, as in TensorRT-LLM, such as
            `[1, 15, 28]`; -1 is the embedding. Left out: what config.json says, or else 1, N // 2 - 1 and N - 4 of N.
    """

    eagle3_layers_to_capture: tuple[Annotated[int, Number, Field(ge=-1, le=4095)], ...] | None = None


class MTPSection(EagleSection):
    """Options of `mtp`, which are those of `eagle`. The head is the layer for multi-token prediction that the target's
    own files hold (Qwen3-Next, Qwen3.5, GLM-4.5, DeepSeek-V3): `draft` is left out, or names a device alone. Beyond the
    first token it goes on with its own states.
    """


class AssistantSection(HybridOptions, SpeculationSection):
    """Options of `gemma4_mtp`. The head is an assistant of a Gemma 4 target (`-it-assistant`), which attends in the
    target's own keys and values and keeps none: `mtp` means it where `draft.model` names one. Drafts are chains.
    """


class DFlashSection(HybridOptions, SpeculationSection):
    """Options of `dflash` and `dspark`. Their heads draft all tokens of a row in one forward, of its newest token and
    mask tokens behind it; draft_len is at most what a head was trained for. In DSpark, what is said of a place depends
    on the token before, too. On GPUs what they compute is launched one by one, without graphs.
    """
