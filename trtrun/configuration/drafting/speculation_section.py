"""What all drafting methods have: the options of a `speculation` section, how large drafts are, and a table of methods.

It knows no method: those are entered by `drafting_methods`, and their own options are in `text_methods` and
`head_methods`. It knows no tensor and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, field_validator, model_validator
from typing_extensions import override

from parallel.topology import Role
from trtrun.configuration.drafting.draft_trees import ChoiceTree, DynamicTree
from trtrun.configuration.process_sections import Number, Section
from trtrun.errors import nearest, shorten

MAX_DRAFT_LEN = 32
MAX_TREE_DEPTH = 64
MAX_CACHED_REQUESTS = 1 << 20
MAX_CACHED_TOKENS = 1 << 22
CACHED_TOKEN_BYTES = 136
"""Of a token of past answers on a device, while they are sorted."""


class SuffixOptions(Section):
    """How what followed a row's last tokens before is looked up: with the names of vLLM and arctic-inference, by
    `suffix`, and by methods that draft with a model.

    Attributes:
        suffix_decoding_max_tree_depth: most of the row's last tokens that are looked for.
        suffix_decoding_max_spec_factor: a match of n tokens is followed for this factor times n tokens at most; vLLM's
            is 1. Left out: for draft_len tokens, as so many of each row are verified in a round in any case.
        suffix_decoding_max_spec_offset: added to that many tokens.
        suffix_decoding_min_token_prob: how likely a draft token must be: the share of the places with that match that
            went on up to it.
        suffix_decoding_max_cached_requests: past requests whose answers all rows are looked up in, too; the oldest go
            first. 0 keeps none: with others, whatever their API keys, a client may tell by how fast its own text comes
            what answers to other clients were like. Requests with a `cache_salt` are not among them.
        suffix_decoding_max_cached_tokens: of these answers that are kept. Each takes 136 bytes on each device that
            drafts; on CPUs, sorting 65536 takes some 20 milliseconds, after each round in which requests end.
    """

    suffix_decoding_max_tree_depth: Annotated[int, Number, Field(ge=1, le=MAX_TREE_DEPTH)] = 24
    suffix_decoding_max_spec_factor: Annotated[float, Number, Field(ge=0, le=MAX_DRAFT_LEN)] | None = None
    suffix_decoding_max_spec_offset: Annotated[float, Number, Field(ge=-MAX_TREE_DEPTH, le=MAX_DRAFT_LEN)] = 0.0
    suffix_decoding_min_token_prob: Annotated[float, Number, Field(ge=0, le=1)] = 0.1
    suffix_decoding_max_cached_requests: Annotated[int, Number, Field(ge=0, le=MAX_CACHED_REQUESTS)] = 0
    suffix_decoding_max_cached_tokens: Annotated[int, Number, Field(ge=2, le=MAX_CACHED_TOKENS)] = 65536

    @model_validator(mode="after")
    def _check_cached(self) -> SuffixOptions:
        tokens, requests = "suffix_decoding_max_cached_tokens", "suffix_decoding_max_cached_requests"
        if tokens in self.model_fields_set and requests not in self.model_fields_set:
            raise ValueError(f"{tokens} is of use with {requests} alone: set that, or leave it out")
        return self

    @property
    def looks_texts_up(self) -> bool:
        """Whether it does at all."""
        return True

    @property
    def search_bytes(self) -> int:
        """Bytes that looking texts up takes in a round on each rank that does, at most."""
        if not self.looks_texts_up:
            return 0
        cached = self.suffix_decoding_max_cached_tokens if self.suffix_decoding_max_cached_requests else 0
        return (64 << 20) + CACHED_TOKEN_BYTES * cached


class HybridOptions(SuffixOptions):
    """Options of methods that draft with a model, and go by texts where these say more: as arctic-inference's and
    TensorRT-LLM's suffix decoding beside a model.

    Attributes:
        enable_suffix_decoding: whether a row whose last tokens stood before gets what followed there, by the rule of
            `suffix`, in place of the model's draft; not with use_logits. On GPUs the steps of a draft model beside the
            target, and of eagle, eagle3 and mtp, are then launched one by one.
        suffix_decoding_min_match_len: for how many tokens what stood before must be the row's last ones.
    """

    enable_suffix_decoding: bool = False
    suffix_decoding_min_match_len: Annotated[int, Number, Field(ge=1, le=MAX_TREE_DEPTH)] = 4

    @property
    @override
    def looks_texts_up(self) -> bool:
        return self.enable_suffix_decoding

    @model_validator(mode="after")
    def _check_hybrid(self) -> HybridOptions:
        if not self.enable_suffix_decoding:
            idle = [key for key in HybridOptions.model_fields if key in self.model_fields_set]
            idle = [key for key in idle if key != "enable_suffix_decoding"]
            if idle:
                raise ValueError(
                    f"{idle[0]} is of use with enable_suffix_decoding: true alone: set that, or leave it out"
                )
            return self
        if getattr(self, "use_logits", False):
            raise ValueError(
                "use_logits does not go with enable_suffix_decoding, whose tokens have no probabilities: leave one of "
                "them out"
            )
        if self.suffix_decoding_min_match_len > self.suffix_decoding_max_tree_depth:
            raise ValueError(
                f"suffix_decoding_min_match_len is {self.suffix_decoding_min_match_len} and "
                f"suffix_decoding_max_tree_depth {self.suffix_decoding_max_tree_depth}: set it to that or less"
            )
        return self


DEFAULT_METHOD = "draft_target"


def _as_word(value: object) -> object:
    """YAML reads a bare on or off as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


OnOrOff = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_word)]
"""Of an option that has an answer of its own where it is left out."""


class DraftSize(NamedTuple):
    """How large a row's draft is: paths from its newest token to a leaf, one of a chain; and tokens in all."""

    paths: int
    nodes: int

    @classmethod
    def of(cls, tree: ChoiceTree | DynamicTree | None, draft_len: int) -> DraftSize:
        """Size of a tree that is cut off behind so many tokens; of a chain where there is no tree."""
        if tree is None or not draft_len:
            return cls(1, draft_len)
        if isinstance(tree, DynamicTree):
            return cls(tree.num_paths(draft_len), tree.num_nodes(draft_len))
        tree = tree.cut(draft_len)
        return cls(len(tree.paths), len(tree.nodes))


class MatchRule(NamedTuple):
    """Which matches a drafter finds.

    Attributes:
        fewest: of a row's last tokens that must have stood before.
        most: of them that are looked for, the longest match counts.
        takes_first: of several places the first; else the latest, and the match is followed as long as it is right.
        has_others: whether it finds some in other texts, too.
    """

    fewest: int
    most: int
    takes_first: bool = False
    has_others: bool = False


class SpeculationSection(Section):
    """How tokens are proposed and accepted; a method with options of its own has a section of its own below.

    Attributes:
        method: `draft_target` drafts with the draft model; `ngram`, `suffix` with what texts repeat; `token_recycling`
            with what the target held likely before; `lookahead` with n-grams of its guesses; others with heads; `none`
            runs it alone. Only the draft model and heads with files of their own need `draft`.
        draft_len: tokens drafted in one round, one behind the other, at most.
        use_logits: accept sampled tokens by the ratio of target_probs to draft_probs instead of by equality; with
            `draft_target` alone.
        pacing: `measured` drafts fewer tokens where fewer pay more (many rows, a poor draft), by times of this run and
            earlier ones, or half a second of rounds at start; `fixed` always drafts draft_len. use_logits is always
            `fixed`: the tokens of a seed depend on the draft there, and must not depend on times.
        forced_acceptance: for `bench` with dummy weights: tokens that a row gains in a round on average, whatever the
            target says. Every result names it, and the texts are nobody's.
    """

    method: str = DEFAULT_METHOD
    draft_len: Annotated[int, Number, Field(ge=1, le=MAX_DRAFT_LEN)] = 4
    use_logits: bool = False
    pacing: Literal["measured", "fixed"] = "measured"
    forced_acceptance: Annotated[float, Number, Field(ge=1, le=MAX_DRAFT_LEN + 1)] | None = None

    @model_validator(mode="after")
    def _check_forced_acceptance(self) -> SpeculationSection:
        if self.forced_acceptance is None:
            return self
        if self.use_logits:
            raise ValueError("forced_acceptance does not go with use_logits: leave one of them out")
        if self.forced_acceptance > self.draft_len + 1:
            raise ValueError(
                f"forced_acceptance is {self.forced_acceptance:g}, but a round with a draft_len of {self.draft_len} "
                f"gains {self.draft_len + 1} tokens at most"
            )
        return self

    @property
    def drafting_ahead(self) -> Literal["auto", "on", "off"]:
        """Whether draft ranks with devices of their own draft for the likely verdicts of a round while the target
        verifies it; `auto` unless CPU ranks outnumber the cores."""
        return "off"

    @property
    def tree_key(self) -> str:
        """The option that says how large draft trees are."""
        return "max_paths"

    @property
    def way_to_chains(self) -> str:
        """What to do so that drafts are chains, for people."""
        return f"leave speculation.{self.tree_key} out"

    def size_of(self, draft_len: int) -> DraftSize:
        """How large a row's draft of so many tokens, one behind the other, is, at most."""
        return DraftSize(1, draft_len)

    @property
    def match_rule(self) -> MatchRule | None:
        """Which matches drafts are made of, where they are made of texts alone; None where they are made otherwise."""
        return None

    @property
    def most_fed(self) -> int:
        """Nodes of a row's draft tree that heads with a store feed at once, at most; 0 where drafts are chains."""
        return 0

    @property
    def search_bytes(self) -> int:
        """What looking texts up takes in a round on each rank that drafts, at most."""
        return 0

    def kept_bytes(self, vocab_size: int, max_rows: int) -> int:
        """What the method keeps on each rank that drafts, for a target's vocabulary and so many rows."""
        return 0

    @classmethod
    def known_keys(cls) -> list[str]:
        """Keys of all methods: which of them a section may hold depends on its method."""
        return list(dict.fromkeys(key for method in METHODS.values() for key in method.section.model_fields))

    @field_validator("method")
    @classmethod
    def _check_method(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"unknown method {shorten(value)}{_ELSEWHERE.get(value) or nearest(value, METHODS)}")
        return value


@dataclass(frozen=True)
class DraftingMethod:
    """What must be known of a method before anything of it runs.

    Attributes:
        placement: the ranks that draft; None where none do.
        needs_draft_model: whether a draft model runs on ranks of its own, from the `draft` section.
        has_probabilities: whether it can tell the distributions that it drew its tokens from (use_logits).
        section: its `speculation` section. More than one path of a row (`size_of`) is for methods on the target ranks.
        to_check: what to look at where drafts are seldom right.
        find_taps: tells of a `speculation` section and the target's number of layers at which boundaries the drafter
            reads hidden states (models/decoder.py); for one on the target ranks without heads, which say it themselves.
        needs_heads: whether it drafts with heads, from the directory `draft.model`: layers that read what the target
            computes, on its ranks (heads/heads.py).
        drafts_from_target: whether its heads lie in the target's own files, so that `draft` names no model.
        may_sit_apart: whether its heads may have a rank of their own, which is told what they read.
        num_behind: 1 where the drafter keeps keys and values of each token in the target's blocks, which depend on the
            token behind it: blocks are reused only where that is the same, too. Else 0.
        drafts_masked: whether its heads draft all tokens of a row in one forward, without graphs on GPUs.
        reads_keys: whether its heads attend in the target's own keys and values, and keep none.
        with_files: of heads in the target's own files, the method that is meant where `draft` names other files.
    """

    placement: Role | None
    needs_draft_model: bool
    has_probabilities: bool
    section: type[SpeculationSection] = SpeculationSection
    to_check: str = "the drafter may be another model's"
    find_taps: Callable[[SpeculationSection, int], Sequence[int]] = lambda section, num_layers: ()
    needs_heads: bool = False
    drafts_from_target: bool = False
    may_sit_apart: bool = False
    num_behind: int = 0
    drafts_masked: bool = False
    reads_keys: bool = False
    with_files: str | None = None


_ELSEWHERE = {
    "pard": ": a draft with a mask token drafts by method draft_target; name its directory as draft.model",
    "hybrid": ": name the model's method, and set enable_suffix_decoding",
}
"""What is no method here though others call it one: what to set."""

METHODS: dict[str, DraftingMethod] = {}
"""All methods by name, in the order in which they are shown; `drafting_methods` enters them."""
