"""What the scheduler must stay within: numbers from the configuration and from the size of the KV store.

Plain data with validation; it knows no plan and no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.draft_trees import read_sizes
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.configuration.drafting.speculation_section import MatchRule
from trtrun.configuration.drafting.text_methods import LookaheadSection
from trtrun.errors import ConfigError, InvalidRequestError, PromptTooLongError
from trtrun.kvcache.window_blocks import WindowRule


def most_unfed(draft_len: int, *, drafts_in_parallel: bool) -> int:
    """Tokens at a row's end that the draft store may lack after a round in which it was fed and up to `draft_len`
    tokens were drafted for it: the newest, and the one before it, which may be the bonus hole; all that it gained where
    drafts are made in parallel."""
    return max(2, draft_len + 1) if drafts_in_parallel else 2


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of the running batch.

    Attributes:
        max_batch_size: rows of the running batch.
        max_num_tokens: tokens of one round, over all rows: prefill chunks, and for each decode row its newest token and
            its draft.
        max_seq_len: tokens of one request, prompt and output, in the target's context.
        draft_max_seq_len: the draft engine's context; None where there is no draft engine.
        draft_len: most tokens drafted for a row in one round, by whatever drafter; 0 where nothing is drafted.
        block_size: tokens of one KV block.
        num_blocks: blocks of the KV store, the null block among them.
        enable_block_reuse: whether full verified blocks are shared between requests.
        plans_ahead: how many plans may be out without their results when the next is made: 0 or 1.
        max_waiting: most requests in the waiting queue; None for no limit.
        prompt_tile: tokens of the tiles that the target's ranks cut prompts into; None where they cut none.
        draft_nodes: tokens of a row's draft, all of which are verified, by how many of them follow one another, from 0
            to draft_len; empty where drafts are chains.
        drafts_in_parallel: whether the draft engine drafts all tokens of a row in one forward, so that its store has
            none of them.
        num_behind: tokens behind a block on which what a draft store keeps of it depends: 1 where that is one of heads,
            which keep at each position what depends on the next token; else 0.
        most_chunk: tokens of a prompt that a row reads in a round, at most; None where the round alone bounds it.
        most_reported: positions of prompts whose logits a round reports, at most, or a tile; and of tokens, or one a
            row; None for no limit.
        match_rule: which matches drafts are made of, where their numbers follow from these; else None.
        lookahead: window size, n-gram size and verification set size, where the method is lookahead; else empty.
        has_longer_context: whether the target's context is longer than max_seq_len, which may then be raised.
        windows: what layers with windows need of a row; None where they keep all.
        num_places: of the store of these layers, the null place among them.
        num_snapshots: of rows' states, the null snapshot among them; 0 where there are none.
        max_shared_tokens: tokens of a round that is not for one prompt alone; None for max_num_tokens.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    draft_max_seq_len: int | None
    draft_len: int
    block_size: int
    num_blocks: int
    enable_block_reuse: bool = True
    plans_ahead: int = 0
    max_waiting: int | None = None
    prompt_tile: int | None = None
    draft_nodes: tuple[int, ...] = ()
    drafts_in_parallel: bool = False
    num_behind: int = 0
    lookahead: tuple[int, ...] = ()
    match_rule: MatchRule | None = None
    most_chunk: int | None = None
    most_reported: int | None = None
    has_longer_context: bool = True
    windows: WindowRule | None = None
    num_places: int = 0
    num_snapshots: int = 0
    max_shared_tokens: int | None = None

    @classmethod
    def of(cls, config: RuntimeConfig, context: int, draft_context: int | None, num_blocks: int) -> SchedulerLimits:
        """The limits of a configuration, for models with these contexts (the draft's is None without a draft model) and
        KV stores of `num_blocks` blocks; without what else follows from the models."""
        return cls(
            max_batch_size=config.scheduler.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_seq_len=context,
            draft_max_seq_len=min(context, draft_context) if draft_context is not None else None,
            draft_len=config.draft_len,
            block_size=config.kv_cache.block_size,
            num_blocks=num_blocks,
            enable_block_reuse=config.kv_cache.enable_block_reuse,
            plans_ahead=config.plans_ahead,
            max_waiting=config.scheduler.max_waiting,
            draft_nodes=config.draft_nodes if config.max_paths > 1 else (),
            num_behind=METHODS[config.speculation.method].num_behind,
            match_rule=config.speculation.match_rule if config.is_paced else None,
            lookahead=tuple(config.speculation.sizes) if isinstance(config.speculation, LookaheadSection) else (),
        )

    def __post_init__(self) -> None:
        least = 0 if self.windows is None else self.windows.blocks_per_row + 1
        rules = (
            ("max_batch_size", self.max_batch_size >= 1, "at least 1"),
            ("max_num_tokens", self.max_num_tokens >= 1, "at least 1"),
            ("max_shared_tokens", 1 <= self.shared_tokens <= self.max_num_tokens, "1 to max_num_tokens"),
            ("max_seq_len", self.max_seq_len >= 2, "at least 2, one prompt token and one output token"),
            ("draft_max_seq_len", self.draft_max_seq_len is None or self.draft_max_seq_len >= 1, "at least 1"),
            ("draft_len", self.draft_len >= 0, "at least 0"),
            ("block_size", self.block_size >= 1, "at least 1"),
            ("num_blocks", self.num_blocks >= 2, "at least 2, the null block and one more"),
            ("plans_ahead", self.plans_ahead in (0, 1), "0 or 1"),
            ("max_waiting", self.max_waiting is None or self.max_waiting >= 1, "at least 1"),
            ("prompt_tile", self.prompt_tile is None or self.prompt_tile >= 1, "at least 1"),
            ("num_behind", self.num_behind in (0, 1), "0 or 1"),
            ("most_chunk", self.most_chunk is None or self.most_chunk >= 1, "at least 1"),
            ("most_reported", self.most_reported is None or self.most_reported >= 1, "at least 1"),
            ("num_snapshots", self.num_snapshots != 1 and self.num_snapshots >= 0, "0, or at least 2"),
            ("num_places", self.num_places >= least, f"at least {least}, those of a row and the null place"),
            ("draft_nodes", len(self.draft_nodes) in (0, self.draft_len + 1), "of each number up to draft_len"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    @property
    def shared_tokens(self) -> int:
        """Tokens of a round with rows that decode, or with several prompts."""
        return self.max_num_tokens if self.max_shared_tokens is None else self.max_shared_tokens

    def num_verified(self, draft_len: int) -> int:
        """Tokens of a round that a row takes whose draft has `draft_len`, one behind the other: these and its newest,
        and those of a tree that are beside."""
        return 1 + (self.draft_nodes[draft_len] if self.draft_nodes else draft_len)

    def longest_draft(self, most: int, num_tokens: int) -> int:
        """How many tokens may follow one another, `most` at most, in a draft of up to `num_tokens` in all."""
        if not self.draft_nodes:
            return min(most, max(0, num_tokens))
        return next((length for length in range(most, 0, -1) if self.draft_nodes[length] <= num_tokens), 0)

    def longest_reported(self, num_rows: int) -> int:
        """Tokens that are drafted for each of `num_rows` whose tokens' logits are reported, at most: a row may gain one
        more."""
        return self.draft_len if self.most_reported is None else max(0, self.most_reported // num_rows - 1)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens that the whole KV store holds."""
        return (self.num_blocks - 1) * self.block_size

    @cached_property
    def max_length(self) -> int:
        """Tokens at which a request ends with reason "length": the context's end, or the whole store's."""
        return min(self.max_seq_len, self.num_stored_tokens)

    @property
    def max_prompt_length(self) -> int:
        """Tokens of the longest prompt that can run: one more has to fit behind it."""
        return self.max_length - 1

    @property
    def has_draft_store(self) -> bool:
        """Whether a draft engine keeps keys and values of rows, or heads do."""
        return self.draft_max_seq_len is not None or self.num_behind > 0

    @property
    def may_sit_out(self) -> bool:
        """Whether rounds may be left out of the draft store where nothing is drafted, and fed later: not where it is
        fed with what the target computed in the round."""
        return self.num_behind == 0

    def most_unfed(self, draft_len: int) -> int:
        """Most tokens that a draft store lacks (`most_unfed`); heads lack what the target itself does."""
        if self.num_behind:
            return 1
        return most_unfed(draft_len, drafts_in_parallel=self.drafts_in_parallel)

    def check_draft_len(self, draft_len: int | None) -> None:
        """Refuse a request whose own draft_len is more than is ever drafted; None is the configuration's.

        Raises:
            InvalidRequestError: it is.
        """
        if draft_len is None or draft_len <= self.draft_len:
            return
        if not self.draft_len:
            raise InvalidRequestError(f"draft_len is {draft_len}, but nothing is drafted here: leave it out")
        raise InvalidRequestError(
            f"draft_len is {draft_len}, more than speculation.draft_len, which is {self.draft_len}: "
            "give that or less, or leave it out"
        )

    def check_lookahead(self, sizes: tuple[int, ...]) -> None:
        """Refuse a request whose own lookahead_config is more than the configuration's, or none that there is.

        Raises:
            InvalidRequestError: it is.
        """
        if not sizes:
            return
        if not self.lookahead:
            raise InvalidRequestError("lookahead_config is for speculation.method lookahead: leave it out")
        try:
            read_sizes(sizes)
        except ValueError as error:
            raise InvalidRequestError(f"lookahead_config: {error}") from None
        if any(own > most for own, most in zip(sizes, self.lookahead, strict=True)):
            raise InvalidRequestError(
                f"lookahead_config is {list(sizes)}, more than speculation.lookahead_config, which is "
                f"{list(self.lookahead)}: give that or less, or leave it out"
            )

    def check_prompt(self, length: int) -> None:
        """Refuse a prompt of `length` tokens that can never run.

        Raises:
            InvalidRequestError: it is empty.
            PromptTooLongError: it is longer than the context, or than the whole KV store.
        """
        if length == 0:
            raise InvalidRequestError("the prompt has 0 tokens; give at least 1")
        # OpenAI's, Anthropic's and llama.cpp's words: programs look for them (LangChain, litellm, to shorten).
        if length > self.max_seq_len - 1:
            advice = "shorten it"
            if self.has_longer_context:
                advice += " or raise scheduler.max_seq_len within the target's context"
            raise PromptTooLongError(
                f"the prompt is too long: it has {length} tokens, and this model's maximum context length is "
                f"{self.max_seq_len} (max_seq_len {self.max_seq_len}), which leaves room for {self.max_seq_len - 1}; "
                f"{advice}"
            )
        if length + 1 > self.num_stored_tokens:
            raise PromptTooLongError(
                f"the prompt is too long: it has {length} tokens, which exceeds the available context size: it needs "
                f"{length + 1} in the KV store, which holds "
                f"{self.num_stored_tokens} ({self.num_blocks - 1} blocks of {self.block_size}); "
                "shorten it or raise kv_cache.max_tokens or kv_cache.free_memory_fraction"
            )
