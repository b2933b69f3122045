"""Options of looking texts up, which several drafting methods have.

It knows no method, no tensor and no rank.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from trtrun.configuration.launch_config import Number, Section

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
        """That looking texts up takes in a round on each rank that does, at most."""
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
            target, and of eagle and eagle3, are then launched one by one.
        suffix_decoding_min_match_len: for how many tokens what stood before must be the row's last ones.
    """

    enable_suffix_decoding: bool = False
    suffix_decoding_min_match_len: Annotated[int, Number, Field(ge=1, le=MAX_TREE_DEPTH)] = 4

    @property
    def looks_texts_up(self) -> bool:
        """See SuffixOptions."""
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
