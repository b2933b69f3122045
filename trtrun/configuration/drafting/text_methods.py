"""Options of the drafting methods that need no model: what texts repeat, and what the target has said before.

It knows no tensor and no rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from trtrun.configuration.drafting.draft_trees import (
    LOOKAHEAD_ROUNDS_KEPT,
    ChoiceTree,
    LookaheadSizes,
    read_sizes,
    recycling_tree,
)
from trtrun.configuration.drafting.speculation_section import (
    MAX_DRAFT_LEN,
    DraftSize,
    MatchRule,
    SpeculationSection,
    SuffixOptions,
)
from trtrun.configuration.process_sections import FilePath, Number

MAX_LOOKUP = 32
MAX_PATHS = 32
MAX_CORPUS_TOKENS = 1 << 28
MAX_RECYCLED = 64
MAX_TREE_NODES = 256
DEFAULT_LOOKUP = 5


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

    @override
    def size_of(self, draft_len: int) -> DraftSize:
        return DraftSize(self.max_paths, self.max_paths * draft_len)

    @property
    @override
    def search_bytes(self) -> int:
        return 20 << 20

    @property
    def match_rule(self) -> MatchRule | None:
        """How matches are found that drafts are made of: the longest within the range, and the first of these."""
        return MatchRule(*self.lookup_range, takes_first=True)

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

    @property
    def match_rule(self) -> MatchRule | None:
        """How matches are found: the longer, the better, and three tokens tell most of that."""
        has_others = self.suffix_corpus is not None or self.suffix_decoding_max_cached_requests > 0
        return MatchRule(1, min(3, self.suffix_decoding_max_tree_depth), has_others=has_others)

    @override
    def size_of(self, draft_len: int) -> DraftSize:
        return DraftSize(self.max_paths, self.max_paths * draft_len)


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
    @override
    def tree_key(self) -> str:
        return "lookahead_config"

    @property
    @override
    def way_to_chains(self) -> str:
        return "set speculation.method to another, as this one has no chains"

    @property
    def sizes(self) -> LookaheadSizes:
        """Sizes of window, n-grams and verification set."""
        return self.lookahead_config

    @override
    def size_of(self, draft_len: int) -> DraftSize:
        if not draft_len:
            return DraftSize(1, 0)
        tree = self.sizes.tree(draft_len)
        return DraftSize(len(tree.paths), tree.num_nodes)

    @property
    @override
    def search_bytes(self) -> int:
        return 64 << 20

    def kept_bytes(self, vocab_size: int, max_rows: int) -> int:
        """Bytes of windows and pools."""
        return max_rows * self.sizes.window * self.sizes.ngram * (8 + 4 * LOOKAHEAD_ROUNDS_KEPT)


class TokenRecyclingSection(SpeculationSection):
    """Options of `token_recycling`. A table on the target's device keeps, of each token of the vocabulary, the tokens
    that the target held likeliest behind it last, in whatever row: token_recycling_top_k times 8 bytes a token. All
    requests of a job share it, and with it whoever sends them: texts do not depend on it, but how fast they come does.
    It keeps nothing of requests with a `cache_salt`.

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
    @override
    def tree_key(self) -> str:
        return "token_recycling_nodes"

    @property
    def tree(self) -> ChoiceTree | None:
        """The draft tree; None where drafts are chains."""
        if self.token_recycling_nodes is None or self.token_recycling_nodes == self.draft_len:
            return None
        tree = recycling_tree(self.draft_len, self.token_recycling_top_k, self.token_recycling_nodes)
        return None if len(tree.paths) == 1 else tree

    @override
    def size_of(self, draft_len: int) -> DraftSize:
        return DraftSize.of(self.tree, draft_len)

    def kept_bytes(self, vocab_size: int, max_rows: int) -> int:
        """Bytes of the table, and of when each of its lines was written."""
        return (vocab_size + 1) * 8 * (self.token_recycling_top_k + 1)
