"""The fields of requests of the OpenAI API, one table: whose each is, what it does, or at which values it is taken.

Clients were written for several servers, and send what these know. null is nothing, whatever the name. A field that has
its effect is read by `types`. One that changes no text is passed over. One that would change the answer, and is not
supported, is taken at the values that change nothing, and refused by name at others. docs/serve.md shows the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any

OPENAI, VLLM, SGLANG, LLAMA_CPP, OTHERS, OWN = "OpenAI", "vLLM", "SGLang", "llama.cpp", "others", "trtrun"


class Endpoint(Enum):
    """Kinds of requests that may have a field."""

    COMPLETIONS = "completions"
    CHATS = "chats"


class Treatment(Enum):
    """What becomes of a field."""

    EFFECT = auto()
    """It is read."""

    IGNORED = auto()
    """It changes no text, and is not looked at."""

    NEUTRAL = auto()
    """It is taken at `neutral` values alone."""


@dataclass(frozen=True)
class Field:
    """A field of requests.

    Attributes:
        name: as JSON has it.
        owner: whose name it is.
        treatment: what becomes of it.
        says: what it means here, or what to give instead.
        neutral: values at which it asks for nothing; null is one for every field.
        endpoint: that has it; None for both.
    """

    name: str
    owner: str
    treatment: Treatment
    says: str = ""
    neutral: tuple[Any, ...] = ()
    endpoint: Endpoint | None = None


def _read(owner: str, endpoint: Endpoint | None = None, /, **says: str) -> Iterator[Field]:
    """Fields that have their effect."""
    return (Field(name, owner, Treatment.EFFECT, text, endpoint=endpoint) for name, text in says.items())


def _ignored(owner: str, *names: str) -> Iterator[Field]:
    """Fields that change no text."""
    return (Field(name, owner, Treatment.IGNORED) for name in names)


def _only(owner: str, /, **neutral: tuple[Any, ...]) -> Iterator[Field]:
    """Fields that are taken at some values alone."""
    return (Field(name, owner, Treatment.NEUTRAL, neutral=values) for name, values in neutral.items())


def _instead(owner: str, says: str, /, **neutral: tuple[Any, ...]) -> Iterator[Field]:
    """Fields that are taken at some values alone; another field does what they ask for."""
    return (Field(name, owner, Treatment.NEUTRAL, says, values) for name, values in neutral.items())


_THINKING = 'chat_template_kwargs, such as {"enable_thinking": false}'

FIELDS: tuple[Field, ...] = (
    *_read(
        OPENAI,
        model="may be left out: the one that there is; or an adapter",
        n="1 to 128",
        max_tokens="-1 is to the end of the context; 0 with echo or prompt_logprobs",
        temperature="",
        top_p="0 is greedy",
        seed="-1 draws one; others below 0 count from 2**63",
        stop="empty texts are left out",
        presence_penalty="",
        frequency_penalty="",
        logit_bias="",
        logprobs="completions: 0 to 20; chats: true or false",
        response_format="text, json_object, json_schema; of this and of what is guided below: guided.md",
        echo="completions: texts begin with their prompt, and logprobs with those of its tokens",
        stream="",
        stream_options="below",
    ),
    *_read(OPENAI, Endpoint.COMPLETIONS, prompt="a text, token ids, or a list of both"),
    *_read(
        OPENAI,
        Endpoint.CHATS,
        messages="above",
        max_completion_tokens="goes before max_tokens",
        top_logprobs="0 to 20",
        prediction="a draft for the answer, as text: verified as draft_token_ids are, it changes no text",
        tools="functions that may be called: tools.md",
        tool_choice="none, auto, required, a function, or allowed_tools",
        parallel_tool_calls="false: one call at most",
        reasoning_effort="goes to the chat template; refused where the template has no such setting. none also sets "
        "enable_thinking to false, where the template has that",
    ),
    *_read(
        VLLM,
        top_k="0 and -1 keep all",
        min_p="",
        prompt_logprobs="0 to 20, not in streams: log probabilities of the prompt's tokens; below",
        repetition_penalty="",
        skip_special_tokens="false: texts have special tokens as they are written, but for those that end them",
        include_stop_str_in_output="whether the stop string that ends a text is left at its end",
        min_tokens="",
        thinking_token_budget="most tokens of thoughts, behind which their end must follow: tools.md; -1: no bound",
        ignore_eos="",
        stop_token_ids="",
        bad_words="",
        cache_salt="a secret: what is kept of the request, such as blocks of its prompt, is shared with requests of "
        "the same one alone",
        add_special_tokens="whether the tokenizer adds its special tokens to a text; completions: true, chats: false",
        truncate_prompt_tokens="so many tokens of a prompt are kept; -1: as many as the context has room for",
        truncation_side="where truncate_prompt_tokens cuts: left, or right",
        request_id="the answer's id ends with it",
        return_token_ids="choices have token_ids",
        return_tokens_as_token_ids="logprobs name tokens as token_id:N",
        guided_json="a JSON schema",
        guided_json_object="true: any JSON object",
        guided_regex="",
        guided_choice="a list of texts",
        guided_grammar="GBNF or Lark",
        guided_whitespace_pattern="a regular expression of blanks: those between the parts of JSON",
        structured_outputs="one of json, json_object, regex, choice, grammar; with disable_any_whitespace, "
        "whitespace_pattern, which are of JSON, also that of response_format",
    ),
    *_read(SGLANG, regex="as guided_regex", ebnf="as guided_grammar"),
    *_read(LLAMA_CPP, grammar="as guided_grammar", json_schema="as guided_json; {} is none"),
    *_read(
        VLLM,
        Endpoint.CHATS,
        add_generation_prompt="to the chat template; true, unless continue_final_message is",
        continue_final_message="the last message is gone on with",
        chat_template_kwargs="further values for the chat template",
        documents="to the chat template",
        include_reasoning="false: what is thought is not told",
    ),
    *_read(OTHERS, Endpoint.CHATS, thinking_budget="as thinking_token_budget"),
    *_read(OWN, Endpoint.CHATS, stop_in_thoughts="true: stop strings count in thoughts, too, not behind them alone"),
    *_read(SGLANG, Endpoint.CHATS, separate_reasoning="false: what is thought is told as text"),
    *_read(
        OWN,
        draft_len="most draft tokens a round for this request: 0 is plain decoding; at most speculation.draft_len",
        draft_token_ids="below",
        guided="one of json, json_object, regex, choice, grammar",
        lookahead_config="with the method lookahead: the request's own [window size, n-gram size, verification set "
        "size], at most speculation.lookahead_config; changes no text",
        lora_name="an adapter, as the name of a model is one",
        return_token_origins="choices have token_origins, below",
        return_token_texts="choices have token_texts: each token's part of the text, before stop strings are cut off; "
        "a character of several tokens is its last one's, those of byte tokens are the next token's",
    ),
    *_ignored(
        OPENAI,
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    ),
    *_ignored(
        VLLM,
        "spaces_between_special_tokens",
        "guided_decoding_backend",
        "session_id",
        "stream_interval",
        "mm_payload",
    ),
    *_ignored(SGLANG, "rid", "stream_reasoning", "custom_labels"),
    *_ignored(
        LLAMA_CPP,
        "cache_prompt",
        "id_slot",
        "slot_id",
        "n_keep",
        "n_discard",
        "mirostat_tau",
        "mirostat_eta",
        "dynatemp_exponent",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "xtc_threshold",
    ),
    *_only(
        OPENAI,
        suffix=("",),
        best_of=(1,),
        modalities=(["text"],),
        audio=(),
        verbosity=("medium",),
        web_search_options=(),
        moderation=(),
    ),
    *_instead(OPENAI, "tools", functions=([],)),
    *_instead(OPENAI, "tool_choice", function_call=("none", "auto")),
    *_only(
        VLLM,
        logprob_token_ids=(),
        allowed_token_ids=(),
        length_penalty=(1,),
        early_stopping=(False,),
        use_beam_search=(False,),
        priority=(0,),
        watermarking=(False,),
        chat_template=(),
        media_io_kwargs=({},),
        mm_processor_kwargs=({},),
        prompt_embeds=(),
        structural_tag=(),
        kv_transfer_params=({},),
        ec_transfer_params=({},),
        vllm_xargs=({},),
        logits_processors=([],),
        repetition_detection=(),
        return_token_offsets=(False,),
        return_prompt_text=(False,),
        return_weight_versions=(False,),
        routed_experts_prompt_start=(0,),
        return_mm_kwargs=(False,),
    ),
    *_only(
        SGLANG,
        stop_regex=([],),
        lora_path=(),
        session_params=({},),
        custom_params=({},),
        custom_logit_processor=(),
        watermark=(),
        return_hidden_states=(False,),
        return_routed_experts=(False,),
        routed_experts_start_len=(0,),
        return_cached_tokens_details=(False,),
        return_spec_tokens_details=(False,),
        return_prompt_token_ids=(False,),
        return_meta_info=(False,),
        images_config=({},),
        use_audio_in_video=(False,),
        data_parallel_rank=(),
        extra_key=(),
        input_ids=(),
    ),
    *_only(
        LLAMA_CPP,
        mirostat=(0,),
        typical_p=(1,),
        tfs_z=(1,),
        dynatemp_range=(0,),
        dry_multiplier=(0,),
        xtc_probability=(0,),
        top_n_sigma=(-1,),
        repeat_last_n=(-1,),
        penalize_nl=(True,),
        min_keep=(0,),
        n_indent=(0,),
        t_max_predict_ms=(0, -1),
        grammar_lazy=(False,),
        lora=([],),
        samplers=(),
        post_sampling_probs=(False,),
        timings_per_token=(False,),
        return_progress=(False,),
        response_fields=([],),
    ),
    *_instead(LLAMA_CPP, "max_tokens", n_predict=()),
    *_instead(LLAMA_CPP, "repetition_penalty", repeat_penalty=(1,)),
    *_instead(LLAMA_CPP, "logprobs", n_probs=(0,)),
    *_instead(LLAMA_CPP, "return_token_ids", return_tokens=(False,)),
    *_instead(SGLANG, "include_stop_str_in_output", no_stop_trim=(False,)),
    *_instead(OTHERS, _THINKING, enable_thinking=(), thinking=()),
    *_instead(OTHERS, "reasoning_effort", reasoning=()),
)
"""All of them."""

BY_NAME: Mapping[str, Field] = {field.name: field for field in FIELDS}


@cache
def fields_of(endpoint: Endpoint) -> Mapping[str, Field]:
    """Fields that a body may have, by name."""
    return {field.name: field for field in FIELDS if field.endpoint in (None, endpoint)}
