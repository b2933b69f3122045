"""The drafting methods: what each is called, where it runs, whether it needs a draft model or heads, its own options.

One table, read by the configuration, the command line, placement and start-up. A method is an entry here and a file in
`speculation/drafters`, which registers under the same name how its drafter is made. It knows no tensor and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from parallel.topology import Role
from trtrun.configuration.dynamic_tree import DynamicTree
from trtrun.configuration.launch_config import FilePath, Number, Section
from trtrun.configuration.lookahead_windows import LOOKAHEAD_ROUNDS_KEPT, LookaheadSizes, read_sizes
from trtrun.configuration.medusa_choices import MOST_NODES, Choice, ChoiceTree, read_choices, read_eagle_choices
from trtrun.configuration.recycling_trees import recycling_tree
from trtrun.configuration.suffix_options import MAX_DRAFT_LEN, HybridOptions, SuffixOptions
from trtrun.errors import nearest, shorten

MAX_LOOKUP = 32
MAX_PATHS = 32
MAX_TOPK = 32
MAX_CORPUS_TOKENS = 1 << 28
MAX_RECYCLED = 64
MAX_TREE_NODES = 256
DEFAULT_LOOKUP = 5
DEFAULT_METHOD = "draft_target"
NO_DRAFTS = "none"


class SpeculationSection(Section):
    """How tokens are proposed and accepted; a method with options of its own has a section of its own below.

    Attributes:
        method: `draft_target` drafts with the draft model; `ngram`, `suffix` with what texts repeat; `token_recycling`
            with what the target held likely before; `lookahead` with n-grams of its guesses; `medusa`, `eagle3` with
            heads on its devices; `none` runs it alone. Only the draft model and heads need `draft`.
        draft_len: tokens drafted in one round, one behind the other, at most.
        use_logits: accept sampled tokens by the ratio of target_probs to draft_probs instead of by equality; with
            `draft_target` alone.
        pacing: `measured` drafts fewer tokens where the run's own times say that fewer pay more (many rows, a poor
            draft), and on CPUs measures rounds at start for that; `fixed` always drafts draft_len. use_logits is always
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

    @classmethod
    def known_keys(cls) -> list[str]:
        """Keys of all methods: which of them a section may hold depends on its method."""
        return list(dict.fromkeys(key for method in METHODS.values() for key in method.section.model_fields))

    @field_validator("method")
    @classmethod
    def _check_method(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"unknown method {shorten(value)}{nearest(value, METHODS)}")
        return value


def _as_word(value: object) -> object:
    """YAML reads a bare on or off as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class DraftModelSection(HybridOptions, SpeculationSection):
    """Options of `draft_target`.

    Attributes:
        ahead: whether draft ranks draft for the likely verdicts of a round while the target verifies it: `on` where
            draft and target share no device, `auto` there unless CPU ranks outnumber the cores, `off` never.
        parallel_drafting: whether all tokens of a draft come from one forward of a draft model that was trained with
            mask tokens (PARD): `auto` where its config.json names one, `on` refuses a draft without, `off` drafts token
            by token.
    """

    ahead: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_word)] = "auto"
    parallel_drafting: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_word)] = "auto"

    @property
    def drafting_ahead(self) -> Literal["auto", "on", "off"]:
        """See SpeculationSection."""
        return self.ahead


def _as_choices(value: object) -> object:
    return None if value is None else read_choices(value)


def _as_eagle_choices(value: object) -> object:
    return None if value is None else read_eagle_choices(value)


class PromptLookupSection(SpeculationSection):
    """Options of `ngram`, with vLLM's names and defaults: each of the two takes the other's value, 5 where none is set.

    Attributes:
        prompt_lookup_min: fewest of the row's last tokens that must have occurred before.
        prompt_lookup_max: most of them that are looked for. The longest match counts.
        max_paths: earlier continuations that are proposed at once, as a draft tree; 1 proposes the best alone. The
            target then verifies up to max_paths times draft_len tokens of a row in a round.
    """

    prompt_lookup_min: Annotated[int, Number, Field(ge=1, le=MAX_LOOKUP)] | None = None
    prompt_lookup_max: Annotated[int, Number, Field(ge=1, le=MAX_LOOKUP)] | None = None
    max_paths: Annotated[int, Number, Field(ge=1, le=MAX_PATHS)] = 1

    @model_validator(mode="after")
    def _check_order(self) -> PromptLookupSection:
        fewest, most = self.lookup_range
        if fewest > most:
            raise ValueError(f"prompt_lookup_min is {fewest} and prompt_lookup_max {most}: set it to that or less")
        return self

    @property
    def lookup_range(self) -> tuple[int, int]:
        """prompt_lookup_min and prompt_lookup_max with their defaults."""
        fewest, most = self.prompt_lookup_min, self.prompt_lookup_max
        return fewest or most or DEFAULT_LOOKUP, most or fewest or DEFAULT_LOOKUP


class SuffixSection(SuffixOptions, SpeculationSection):
    """Options of `suffix`, beside those of [looking texts up](#looking-texts-up).

    Attributes:
        max_paths: continuations that are proposed at once, as a draft tree; 1 proposes the likeliest alone. The target
            then verifies up to max_paths times draft_len tokens of a row in a round.
        suffix_corpus: a file of texts that all rows are looked up in, beside their own: JSON lines (.jsonl) with
            `prompt_token_ids` or `prompt`, `token_ids` or `text`, as trtrun writes them, or text (.txt). Every host of
            the job must have it; one rank reads it.
        suffix_corpus_max_tokens: of the file that are kept; each takes 8 bytes on each of the target's devices, and at
            the start about 80 on the host that reads them.
    """

    max_paths: Annotated[int, Number, Field(ge=1, le=MAX_PATHS)] = 1
    suffix_corpus: FilePath | None = None
    suffix_corpus_max_tokens: Annotated[int, Number, Field(ge=2, le=MAX_CORPUS_TOKENS)] = 1_000_000


class DraftSize(NamedTuple):
    """How large a row's draft is: paths from its newest token to a leaf, one of a chain; and tokens in all."""

    paths: int
    nodes: int

    @classmethod
    def of(cls, tree: ChoiceTree | DynamicTree | None, draft_len: int) -> DraftSize:
        """Of a tree, cut off behind so many tokens; of a chain without one."""
        if tree is None or not draft_len:
            return cls(1, draft_len)
        if isinstance(tree, DynamicTree):
            return cls(tree.num_paths(draft_len), tree.num_nodes(draft_len))
        tree = tree.cut(draft_len)
        return cls(len(tree.paths), len(tree.nodes))


class LookaheadSection(SpeculationSection):
    """Options of `lookahead`. In each round the target computes a window of guesses of what comes further on, from
    which n-grams come, and up to so many n-grams that begin with the row's newest token: all in all
    (W + G) * (N - 1) - 1 tokens of each row. It pays where the target has time to spare, as GPUs have with few rows.

    Attributes:
        lookahead_config: `[W, N, G]`, as in TensorRT-LLM: columns of the window, tokens of an n-gram, and n-grams that
            are verified; the least is `[2, 2, 1]`. draft_len is W + N - 3, the window's depth, where left out, and cuts
            off columns where it is less.
    """

    lookahead_config: Annotated[LookaheadSizes, BeforeValidator(read_sizes)] = LookaheadSizes(4, 3, 4)

    @model_validator(mode="before")
    @classmethod
    def _take_depth(cls, values: object) -> object:
        """Draft as deep as the window is. What is wrong with it is said at its key."""
        if not isinstance(values, Mapping) or values.get("lookahead_config") is None or "draft_len" in values:
            return values
        try:
            sizes = read_sizes(values["lookahead_config"])
        except ValueError:
            return values
        return {**values, "draft_len": min(sizes.depth, MAX_DRAFT_LEN)}

    @model_validator(mode="after")
    def _check_window(self) -> LookaheadSection:
        most = min(self.lookahead_config.depth, MAX_DRAFT_LEN)
        if self.draft_len > most:
            raise ValueError(
                f"draft_len is {self.draft_len}, but lookahead_config makes drafts of {most} tokens, one behind the "
                "other, at most: set it to that or less, or leave it out"
            )
        return self

    @property
    def tree_key(self) -> str:
        """See SpeculationSection."""
        return "lookahead_config"

    @property
    def sizes(self) -> LookaheadSizes:
        """Of window, n-grams and verification set."""
        return self.lookahead_config

    def size_of(self, draft_len: int) -> DraftSize:
        """How large a draft of so many tokens, one behind the other, is."""
        if not draft_len:
            return DraftSize(1, 0)
        tree = self.sizes.tree(draft_len)
        return DraftSize(len(tree.paths), tree.num_nodes)


class TokenRecyclingSection(SpeculationSection):
    """Options of `token_recycling`. A table on the target's device keeps, of each token of the vocabulary, the tokens
    that the target held likeliest behind it last, in whatever row: token_recycling_top_k times 8 bytes a token. All
    requests of a job share it, and with it whoever sends them: texts do not depend on it, but how fast they come does.

    Attributes:
        token_recycling_top_k: tokens that are kept of each.
        token_recycling_nodes: tokens of a draft tree, of those that are likely to be right as deep as draft_len; 80 in
            the paper, with a draft_len of 6. Each of them is verified. Left out: a chain.
    """

    token_recycling_top_k: Annotated[int, Number, Field(ge=1, le=MAX_RECYCLED)] = 8
    token_recycling_nodes: Annotated[int, Number, Field(ge=1, le=MAX_TREE_NODES)] | None = None

    @model_validator(mode="after")
    def _check_nodes(self) -> TokenRecyclingSection:
        if self.token_recycling_nodes is not None and self.token_recycling_nodes < self.draft_len:
            raise ValueError(
                f"token_recycling_nodes is {self.token_recycling_nodes}, but draft_len {self.draft_len}: set it to "
                "that or more, or leave it out for a chain"
            )
        return self

    @property
    def tree_key(self) -> str:
        """See SpeculationSection."""
        return "token_recycling_nodes"

    @property
    def tree(self) -> ChoiceTree | None:
        """The draft tree; None where drafts are chains."""
        if self.token_recycling_nodes is None or self.token_recycling_nodes == self.draft_len:
            return None
        tree = recycling_tree(self.draft_len, self.token_recycling_top_k, self.token_recycling_nodes)
        return None if len(tree.paths) == 1 else tree

    def size_of(self, draft_len: int) -> DraftSize:
        """How large a draft of so many tokens, one behind the other, is."""
        return DraftSize.of(self.tree, draft_len)


class _ChoicesSection(HybridOptions, SpeculationSection):
    """Of a method with a tree of ranks: what its key and draft_len say together."""

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

    def size_of(self, draft_len: int) -> DraftSize:
        """How large a draft of so many tokens, one behind the other, is."""
        return DraftSize.of(self.tree, draft_len)

    @property
    def tree_key(self) -> str:
        """See SpeculationSection."""
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


class Eagle3Section(_ChoicesSection):
    """Options of `eagle3`. The head drafts step by step from hidden states of the target: from those of which layers,
    its config.json says in one of two ways, or not at all. Where drafts are seldom right, see whether `trtrun plan`
    names the layers that it was trained with.

    Drafts are chains, or trees: of a shape that is known (`eagle_choices`), or of one that follows from how likely
    tokens are (`eagle_topk`, as in EAGLE-2). More of a tree is accepted, and more has to be verified: on CPUs,
    where each token costs, a chain is faster.

    Attributes:
        eagle3_layers_to_capture: layers of the target, from 0, whose output the head reads, as in TensorRT-LLM, such as
            `[1, 15, 28]`; -1 is the embedding. Left out: what config.json says, or else 1, N // 2 - 1 and N - 4 of N.
        eagle_choices: a draft tree, as in TensorRT-LLM: paths of ranks without the root, such as
            `[[0], [1], [0, 0]]`, or `mc_sim_7b_63`, the reference's of 25 tokens. draft_len is its depth where left
            out, and cuts a deeper one.
        eagle_topk: of a dynamic tree, as in SGLang: tokens of each depth that are continued, and continuations of each
            that are looked at. 1 is a chain.
        max_total_draft_tokens: tokens of a dynamic tree that are kept, the likeliest, as in TensorRT-LLM, without the
            row's newest one. Left out: eagle_topk times draft_len.
    """

    CHOICES_KEY: ClassVar[str] = "eagle_choices"
    READ_CHOICES: ClassVar[Callable[[object], tuple[Choice, ...]]] = staticmethod(read_eagle_choices)

    eagle3_layers_to_capture: tuple[Annotated[int, Number, Field(ge=-1, le=4095)], ...] | None = None
    eagle_choices: Annotated[tuple[Choice, ...] | None, BeforeValidator(_as_eagle_choices)] = None
    eagle_topk: Annotated[int, Number, Field(ge=1, le=MAX_TOPK)] = 1
    max_total_draft_tokens: Annotated[int, Number, Field(ge=1, le=MOST_NODES)] | None = None

    @model_validator(mode="after")
    def _check_tree(self) -> Eagle3Section:
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
    def tree_key(self) -> str:
        """See SpeculationSection."""
        return self.CHOICES_KEY if self.eagle_topk == 1 else "max_total_draft_tokens"

    @property
    def most_fed(self) -> int:
        """Nodes of a row's tree that the head feeds at once, at most; 0 where drafts are chains."""
        if isinstance(self.tree, DynamicTree):
            return self.tree.top_k
        return 0 if self.tree is None else max(1, self.tree.most_continued)


@dataclass(frozen=True)
class DraftingMethod:
    """What must be known of a method before anything of it runs.

    Attributes:
        placement: the ranks that draft; None where none do.
        needs_draft_model: whether a draft model runs on ranks of its own, from the `draft` section.
        has_probabilities: whether it can tell the distributions that it drew its tokens from (use_logits).
        section: its `speculation` section.
        find_taps: tells of a `speculation` section and the target's number of layers at which boundaries the drafter
            reads hidden states (models/taps.py); for one on the target ranks without heads, which say it themselves.
        to_check: what to look at where drafts are seldom right.
        find_max_paths: tells of a `speculation` section how many paths a row's draft may have (Draft.paths); more than
            one for methods on the target ranks alone.
        needs_heads: whether it drafts with heads on the target ranks, from the directory `draft.model`: layers that
            read what the target computes, and have no rank and no rows (models/heads.py).
        find_most_fed: tells of a `speculation` section how many nodes of a row's draft tree heads with a store feed at
            once, at most; 0 where drafts are chains.
        find_size: tells of a `speculation` section how large a draft of so many tokens, one behind the other, is, where
            its paths share tokens; None where each path has tokens of its own.
        num_behind: 1 where the drafter keeps keys and values of each token in the target's blocks, which depend on the
            token behind it: blocks are reused only where that is the same, too. Else 0.
        find_search_bytes: tells of a `speculation` section what looking texts up takes in a round on each of its ranks,
            at most.
        find_bytes: tells of a `speculation` section, a vocabulary and a number of rows what the method keeps on each of
            its ranks.
    """

    placement: Role | None
    needs_draft_model: bool
    has_probabilities: bool
    section: type[SpeculationSection] = SpeculationSection
    to_check: str = "the drafter may be another model's"
    find_taps: Callable[[SpeculationSection, int], Sequence[int]] = lambda section, num_layers: ()
    find_max_paths: Callable[[SpeculationSection], int] = lambda section: 1
    needs_heads: bool = False
    find_most_fed: Callable[[SpeculationSection], int] = lambda section: 0
    find_size: Callable[[SpeculationSection, int], DraftSize] | None = None
    num_behind: int = 0
    find_search_bytes: Callable[[SpeculationSection], int] = lambda section: 0
    find_bytes: Callable[[SpeculationSection, int, int], int] = lambda section, vocab_size, max_rows: 0

    def size_of(self, section: SpeculationSection, draft_len: int) -> DraftSize:
        """How large a row's draft of `draft_len` tokens, one behind the other, is, at most."""
        if self.find_size is not None:
            return self.find_size(section, draft_len)
        paths = self.find_max_paths(section)
        return DraftSize(paths, paths * draft_len)


def _tree_size(section: SpeculationSection, draft_len: int) -> DraftSize:
    assert isinstance(section, _ChoicesSection | TokenRecyclingSection | LookaheadSection)
    return section.size_of(draft_len)


def _most_fed(section: SpeculationSection) -> int:
    assert isinstance(section, Eagle3Section)
    return section.most_fed


def _lookahead_bytes(section: SpeculationSection, vocab_size: int, max_rows: int) -> int:
    """Windows and pools."""
    assert isinstance(section, LookaheadSection)
    return max_rows * section.sizes.window * section.sizes.ngram * (8 + 4 * LOOKAHEAD_ROUNDS_KEPT)


def _recycled_bytes(section: SpeculationSection, vocab_size: int, max_rows: int) -> int:
    """The table, and when each of its lines was written."""
    assert isinstance(section, TokenRecyclingSection)
    return (vocab_size + 1) * 8 * (section.token_recycling_top_k + 1)


def _max_paths(section: SpeculationSection) -> int:
    return section.max_paths if isinstance(section, PromptLookupSection | SuffixSection) else 1


def _suffix_bytes(section: SpeculationSection) -> int:
    assert isinstance(section, SuffixOptions)
    return section.search_bytes


METHODS: dict[str, DraftingMethod] = {
    "draft_target": DraftingMethod(
        Role.DRAFT,
        needs_draft_model=True,
        has_probabilities=True,
        section=DraftModelSection,
        find_search_bytes=_suffix_bytes,
        to_check="see whether draft.model was made for this target, and for texts like these",
    ),
    "ngram": DraftingMethod(
        Role.TARGET,
        needs_draft_model=False,
        has_probabilities=False,
        section=PromptLookupSection,
        to_check="prompt lookup finds only what a text repeats",
        find_max_paths=_max_paths,
        find_search_bytes=lambda section: 20 << 20,
    ),
    "suffix": DraftingMethod(
        Role.TARGET,
        needs_draft_model=False,
        has_probabilities=False,
        section=SuffixSection,
        to_check="suffix decoding finds only what texts repeat",
        find_max_paths=_max_paths,
        find_search_bytes=_suffix_bytes,
    ),
    "token_recycling": DraftingMethod(
        Role.TARGET,
        needs_draft_model=False,
        has_probabilities=False,
        section=TokenRecyclingSection,
        to_check="token recycling looks one token back: larger trees (speculation.token_recycling_nodes) find more",
        find_size=_tree_size,
        find_bytes=_recycled_bytes,
    ),
    "lookahead": DraftingMethod(
        Role.TARGET,
        needs_draft_model=False,
        has_probabilities=False,
        section=LookaheadSection,
        to_check="a wider window (speculation.lookahead_config) finds more",
        find_size=_tree_size,
        find_search_bytes=lambda section: 64 << 20,
        find_bytes=_lookahead_bytes,
    ),
    "medusa": DraftingMethod(
        Role.TARGET,
        needs_draft_model=False,
        has_probabilities=False,
        section=MedusaSection,
        find_search_bytes=_suffix_bytes,
        to_check="see whether the heads were trained for this very target, and for texts like these",
        needs_heads=True,
        find_size=_tree_size,
    ),
    "eagle3": DraftingMethod(
        Role.TARGET,
        needs_draft_model=False,
        has_probabilities=False,
        section=Eagle3Section,
        find_search_bytes=_suffix_bytes,
        to_check="see whether the head was trained for this very target, for texts like these, and with the layers "
        "that trtrun plan names (speculation.eagle3_layers_to_capture)",
        needs_heads=True,
        find_size=_tree_size,
        find_most_fed=_most_fed,
        num_behind=1,
    ),
    NO_DRAFTS: DraftingMethod(None, needs_draft_model=False, has_probabilities=True),
}
"""All methods by name, in the order in which they are shown."""


def needs_draft_model(speculation: object) -> bool:
    """Whether the method of a `speculation` section, checked or as the YAML file has it, runs a draft model. True for
    one that is not known: what is wrong with it is the configuration's to say."""
    method = _method_of(speculation)
    return method is None or method.needs_draft_model


def needs_heads(speculation: object) -> bool:
    """Whether the method of a `speculation` section, checked or as the YAML file has it, drafts with heads."""
    method = _method_of(speculation)
    return method is not None and method.needs_heads


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
        raise ValueError(
            f"{foreign[0]} is an option of method {' and '.join(owners)}, but the method is {name}: leave it out"
        )
    section = method.section.model_validate(values)
    if section.use_logits and not method.has_probabilities:
        raise ValueError(
            f"use_logits does not go with method {name}, which proposes tokens without probabilities: leave it out; "
            "sampled output is the target's own without it"
        )
    return section
