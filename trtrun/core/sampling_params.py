"""How one completion's tokens are chosen: every parameter, checked against what the wire and the kernels can carry.

Plain data with validation. It knows no request, no model and no logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields

from trtrun.core.guide import Guide, read_guide
from trtrun.core.values import (
    read_bias,
    read_flag,
    read_integer,
    read_marks,
    read_number,
    read_optional_integer,
    read_optional_name,
    read_salt,
    read_sizes,
    read_texts,
    read_token_ids,
    read_token_sequences,
    show_value,
)
from trtrun.errors import InvalidRequestError, nearest

LARGEST_COUNT = 2**31 - 1
"""Where max_tokens, min_tokens and top_k are cut off: beyond any context and any vocabulary, within what travels."""

MOST_LOGPROBS = 20
"""Tokens of a position whose log probabilities are told beside its own, at most."""

MOST_TOKENS = 1 << 19
"""Token ids in one list: more than any vocabulary has."""

LOGITS_FIELDS = ("return_context_logits", "return_generation_logits")
"""Of SamplingParams: what comes of them is too large for texts such as JSON."""

_READERS: dict[str, Callable[[str, object], object]] = {
    **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "n"), read_integer),
    **dict.fromkeys(
        ("seed", "logprobs", "prompt_logprobs", "draft_len", "thinking_token_budget"), read_optional_integer
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), read_number
    ),
    **dict.fromkeys(("stop", "bad_words"), read_texts),
    **dict.fromkeys(("stop_token_ids", "draft_token_ids"), read_token_ids),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "stop_in_thoughts"), read_flag),
    **dict.fromkeys(LOGITS_FIELDS, read_flag),
    "logit_bias": read_bias,
    "lookahead_config": read_sizes,
    "stop_sequences": read_token_sequences,
    "guided": read_guide,
    "thinking_marks": read_marks,
    "lora_name": read_optional_name,
    "cache_salt": read_salt,
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Greedy unless `temperature` is above 0.

    Every field is exact under speculation: the output follows the target's distribution after these parameters. None
    in any field means its default. What cannot travel to the ranks, or cannot be computed there, is refused here.

    Attributes:
        temperature: 0 is greedy; between 1e-30 and 1e30 it divides the logits.
        top_k: keep the k most likely tokens; 0, or at least the vocabulary's size, keeps all. Cut off at 2**31 - 1.
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
        min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1].
        seed: makes the output repeatable, in [0, 2**63 - 1]; None draws one.
        max_tokens: most tokens to generate; a huge number means to the end of the context. Cut off at 2**31 - 1. 0 only
            reads the prompt, for `prompt_logprobs` and `return_context_logits`.
        min_tokens: before this many tokens no end-of-sequence or stop token id may be chosen; at most max_tokens.
        n: independent completions of the same prompt, 1 to 128.
        stop: strings that end the request, the first that is whole in the text, which is cut there; of several with the
            same last character the longest. At most 1,024, and 65,536 characters in all.
        include_stop_str_in_output: leave the stop string that ends the text at its end; what follows is cut off.
        stop_token_ids: tokens that end the request, beside the model's end-of-sequence tokens.
        stop_sequences: tokens, one behind the other, that end the request with the last of them, and stay. At most
            1,024, and 65,536 tokens in all. They end it before min_tokens, too.
        ignore_eos: go on after the model's end-of-sequence tokens.
        repetition_penalty: above 1 discourages tokens of prompt and output (CTRL, arXiv:1909.05858); 1e-6 to 1e6.
        presence_penalty: subtracted from the logits of tokens that the output has, in [-2, 2].
        frequency_penalty: subtracted once for each time the output has the token, in [-2, 2].
        logit_bias: token id to a number added to its logit, each in [-100, 100]. Ids may be texts of digits, as the
            keys of JSON objects are.
        bad_words: strings that must not be generated. At most 1,024, and 65,536 characters in all; what is longer than
            the whole text may become costs nothing.
        logprobs: how many alternatives to report a position, 0 to 20 (0 reports the chosen token alone); None reports
            nothing.
        prompt_logprobs: how many alternatives to report for each token of the prompt, beside the token itself, 0 to
            20; None reports nothing. Of the target's raw distribution. Such a prompt is computed whole, though parts of
            it are in the cache. Of `n` completions the first one carries them.
        return_context_logits: whether the target's logits behind each token of the prompt are reported. As of
            `prompt_logprobs`, the prompt is computed whole, and the first of `n` completions carries them.
        return_generation_logits: whether the logits are reported that each token was chosen from, before penalties,
            masks and temperature.
        draft_len: most draft tokens a round for this request, at most the configuration's; 0 is plain decoding while
            other requests are drafted for, None the configuration's. Tokens do not depend on it; with use_logits their
            distribution does not.
        draft_token_ids: a draft of the caller's own for what follows the prompt, accepted or rejected by the same rule
            as others. From the second output token on, draft_len of its tokens are verified a round for as long as the
            output is its start; behind its end, or the first token that differs, drafts are made as usual. It changes
            no text (with use_logits no distribution), and is not looked at where nothing is drafted for the row.
        lookahead_config: with the method lookahead, the request's own window size, n-gram size and verification set
            size, none of them more than the configuration's. It changes no text.
        guided: what the text must be: an object of one key, json, json_object, regex, choice or grammar.
        skip_special_tokens: leave special tokens out of the text. Else it has them as they are written, but for the
            model's end-of-sequence tokens; the tokens are the same, and stop strings are looked for in what it has.
        lora_name: an adapter that is loaded, which the target computes the request with; None is the base model.
        stop_in_thoughts: whether `stop` is looked for in thoughts, too; else from the mark behind them on.
        thinking_token_budget: most tokens of thoughts: behind these the mark that ends them must follow, and then the
            answer. Tokens count behind the mark in front. Thoughts that end before change nothing. None is no bound.
        thinking_marks: the texts in front of and behind thoughts; an empty first one where the output begins within
            them, as it does where the prompt ends with the mark. Further texts end thoughts, too, as calls of tools do.
        cache_salt: what is kept of the request is of use to requests with the same one alone, a text that only those
            know who may share it: blocks of keys and values. Past answers and token_recycling's table, which cannot be
            parted so, keep nothing of it. It changes no text. None shares with all others that have none.

    Raises:
        InvalidRequestError: a field has a value of the wrong kind or outside its range; the message names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    draft_len: int | None = None
    draft_token_ids: tuple[int, ...] = ()
    lookahead_config: tuple[int, ...] = ()
    guided: Guide | None = None
    skip_special_tokens: bool = True
    lora_name: str | None = None
    stop_in_thoughts: bool = True
    thinking_token_budget: int | None = None
    thinking_marks: tuple[str, ...] = ("<think>", "</think>")
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for item in _FIELDS:
            value = getattr(self, item.name)
            if value is item.default:
                continue
            if value is None:
                value = item.default if item.default_factory is MISSING else item.default_factory()
            object.__setattr__(self, item.name, _READERS[item.name](item.name, value))
        for name in ("top_k", "max_tokens", "min_tokens", "thinking_token_budget"):
            if (getattr(self, name) or 0) > LARGEST_COUNT:
                object.__setattr__(self, name, LARGEST_COUNT)
        self._check_ranges()

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> SamplingParams:
        """Build from a row of a JSON lines file; unknown names are refused with the nearest known one.

        Raises:
            InvalidRequestError: an unknown name or a value outside its range.
        """
        for name in values:
            if name not in _READERS:
                raise InvalidRequestError(f"unknown sampling parameter {show_value(name)}{nearest(name, _READERS)}")
        return cls(**dict(values))  # type: ignore[arg-type]

    @classmethod
    def from_checked(cls, values: Mapping[str, object]) -> SamplingParams:
        """Build from what `as_mapping` gave of parameters that are sound, in another process: nothing is looked at
        again, however long lists are."""
        parameters = object.__new__(cls)
        for item in _FIELDS:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            value = values.get(item.name, default)
            object.__setattr__(parameters, item.name, tuple(value) if isinstance(value, list) else value)
        object.__setattr__(parameters, "stop_sequences", tuple(map(tuple, parameters.stop_sequences)))
        if parameters.guided is not None:
            object.__setattr__(parameters, "guided", Guide(*parameters.guided))
        return parameters

    def with_seed(self) -> SamplingParams:
        """These parameters with a seed, which is drawn where there is none."""
        if self.seed is not None:
            return self
        return self._changed(seed=int.from_bytes(os.urandom(7), "little"))

    def with_salt(self, salt: str) -> SamplingParams:
        """These parameters with another `cache_salt`."""
        return self._changed(cache_salt=salt)

    def of_completion(self, index: int) -> SamplingParams:
        """The parameters of one of the `n` completions: they have a seed, which gives each its own."""
        assert self.seed is not None
        if self.n == 1:
            return self
        own = self._changed(seed=(self.seed + index) % 2**63, n=1)
        return own._changed(prompt_logprobs=None, return_context_logits=False) if index else own

    def _changed(self, **values: int | str | None) -> SamplingParams:
        """A copy with a few other values. It is not checked again: what it lists may be long, and n is up to 128."""
        other = object.__new__(SamplingParams)
        other.__dict__.update(self.__dict__, **values)
        return other

    def _check_ranges(self) -> None:
        # temperature and repetition_penalty: what float32 carries beside logits without a NaN on the way.
        fewest = 1 if self.prompt_logprobs is None and not self.return_context_logits else 0
        rules = (
            ("temperature", self.temperature == 0 or 1e-30 <= self.temperature <= 1e30, "0 or between 1e-30 and 1e30"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("max_tokens", self.max_tokens >= fewest, f"at least {fewest}"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("n", 1 <= self.n <= 128, "between 1 and 128"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "between 1e-6 and 1e6"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS, _OF_LOGPROBS),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MOST_LOGPROBS,
                _OF_LOGPROBS,
            ),
            ("draft_len", self.draft_len is None or 0 <= self.draft_len < 2**31, "0 (plain decoding) to 2**31 - 1"),
            ("thinking_token_budget", (self.thinking_token_budget or 0) >= 0, "0 or more"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2**63 - 1"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise InvalidRequestError(f"{name} must be {rule}, not {show_value(getattr(self, name))}")
        for name in ("stop_token_ids", "logit_bias", "draft_token_ids"):
            count = len(getattr(self, name))
            if count > MOST_TOKENS:
                raise InvalidRequestError(f"{name} has {count} entries; {MOST_TOKENS} are the most")
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        if self.draft_token_ids and self.draft_len == 0:
            raise InvalidRequestError("draft_token_ids are drafts, and draft_len 0 allows none: leave one of them out")
        biases = self.logit_bias.values()
        if biases and not -100 <= min(biases) <= max(biases) <= 100:
            token, value = next(item for item in self.logit_bias.items() if not -100 <= item[1] <= 100)
            raise InvalidRequestError(f"logit_bias of token {token} must be between -100 and 100, not {value!r}")

    def as_mapping(self) -> dict[str, object]:
        """What `from_mapping` makes the same of: the fields that are not their defaults, ready for JSON."""
        values = ((item, getattr(self, item.name)) for item in _FIELDS)
        return {item.name: value for item, value in values if value is not item.default}

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature == 0.0


_OF_LOGPROBS = f"between 0 and {MOST_LOGPROBS}"
_FIELDS = fields(SamplingParams)
