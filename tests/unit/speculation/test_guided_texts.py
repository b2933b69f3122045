"""Guided texts with speculation are plain guided decoding's, to the token, greedy and by seed, for every drafter; and
greedy ones are transformers' with a logits processor of the same grammar engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from pipelines import Reference, make_llm
from transformers import LogitsProcessor

from trtrun import LLM, SamplingParams
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.outputs import GUIDE_ENDED, RequestOutput
from trtrun.guiding import grammars as grammars_module
from trtrun.guiding import row_guide
from trtrun.guiding.grammars import Grammars, Spelling
from trtrun.guiding.masks import RoundBudget
from trtrun.guiding.row_guide import RowGuide, Shares

TARGET, DRAFT = ASSETS / "target", ASSETS / "draft"
COUNT = 32
RECORD = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX, CHOICE = r"[0-9]{3}-[a-z]{2,5}(, [A-Z]{2,4}){0,3}\.", ["yes", "no", "maybe so"]
SUM = 'root ::= "(" sum ")"\nsum ::= [0-9] | sum "+" [0-9]'
GUIDES: list[Any] = [{"json": RECORD}, {"regex": REGEX}, {"choice": CHOICE}, {"grammar": SUM}, {"json_object": True}]
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.9, "seed": 8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]
PROMPTS = ["def main(", "The record is: "]
ASKED = [
    (prompt, SamplingParams(max_tokens=COUNT, guided=guide, **way))
    for guide in [*GUIDES, None]
    for number, way in enumerate(WAYS)
    for prompt in PROMPTS[min(number, 1) :]
]
FEW = {"max_batch_size": 12}
"""Rows come and go, and are of all kinds."""


def run(llm: LLM, asked: Sequence[tuple[str, SamplingParams]] = ASKED) -> list[tuple[int, ...]]:
    outputs = llm.generate([prompt for prompt, _ in asked], [sampling for _, sampling in asked])
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.completions[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    """The tokens of each request; some of them are looked at alone, too."""
    with make_llm(TARGET) as llm:
        found = run(llm)
        assert all(run(llm, [ASKED[place]]) == [found[place]] for place in range(0, len(ASKED), 5))
        check_texts(llm, found)
        return found


def check_texts(llm: LLM, found: Sequence[tuple[int, ...]]) -> None:
    """Texts that ended are what they had to be."""
    assert llm.tokenizer is not None
    num_whole = dict.fromkeys(("json", "regex", "choice", "grammar"), 0)
    for (_, sampling), tokens in zip(ASKED, found, strict=True):
        if sampling.guided is None or tokens[-1] != 0:
            continue
        text = llm.tokenizer.decode(tokens)
        kind, guide = sampling.guided
        num_whole[kind] += 1
        if kind == "json":
            jsonschema.validate(json.loads(text), json.loads(guide))
        elif kind == "regex":
            assert re.fullmatch(REGEX, text)
        elif kind == "choice":
            assert text in CHOICE
        else:
            assert re.fullmatch(r"\([0-9](\+[0-9])*\)", text)
    assert all(num_whole.values()), num_whole


CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]
TREE = {"method": "eagle3", "eagle_topk": 3, "max_total_draft_tokens": 10, "draft_len": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft": {"draft": DRAFT, "speculation": {"draft_len": 4}, "scheduler": {**FEW, "plans_ahead": 1}},
    "parallel": {"draft": ASSETS / "pard_draft", "speculation": {"draft_len": 4}},
    "ngram": {"speculation": {"method": "ngram", "draft_len": 4}},
    "suffix": {"speculation": {"method": "suffix", "draft_len": 4}},
    "recycling": {"speculation": {"method": "token_recycling"}},
    "lookahead": {"speculation": {"method": "lookahead"}},
    "medusa": {"heads": ASSETS / "medusa", "speculation": {"method": "medusa"}},
    "medusa-tree": {"heads": ASSETS / "medusa", "speculation": {"method": "medusa", "medusa_choices": CHOICES}},
    "eagle3": {"heads": ASSETS / "eagle3", "speculation": {"method": "eagle3"}},
    "eagle3-tree": {"heads": ASSETS / "eagle3", "speculation": TREE},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_no_guided_text(plain: list[tuple[int, ...]], name: str) -> None:
    settings = {"scheduler": FEW, **DRAFTERS[name]}
    count = 15 if name == "lookahead" else len(ASKED)  # its rounds are large
    # Where nobody has penalties trees are verified another way.
    simple = [place for place, (_, sampling) in enumerate(ASKED) if sampling.repetition_penalty == 1.0]
    with make_llm(TARGET, settings.pop("draft", None), **settings) as llm:
        assert run(llm, ASKED[:count]) == plain[:count]
        if name.endswith("tree"):
            assert run(llm, [ASKED[place] for place in simple]) == [plain[place] for place in simple]
        assert llm.statistics()["mean_acceptance_length"] > 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_must_follow_is_drafted(name: str) -> None:
    """Of a text that is the only one no draft token is rejected, nor is one left out."""
    text = "the colour of the record is not known, and whoever looks for it is asked to wait"
    settings = dict(DRAFTERS[name])
    with make_llm(TARGET, settings.pop("draft", None), **settings) as llm:
        sampling = SamplingParams(max_tokens=60, guided={"choice": [text]}, temperature=1.0, seed=3)
        (output,) = llm.generate([PROMPTS[0]], sampling)
        (completion,) = output.completions
        assert completion.text == text
        origins = completion.token_origins[: len(completion.token_ids) - 8]
        assert "r" not in origins and origins.count("p") == 1 and origins.count("a") > 12, origins


def test_what_came_with_a_request_goes_on_behind_what_must_follow() -> None:
    guided: Any = {"regex": "the record is [a-z]{12}"}
    sampling = SamplingParams(max_tokens=30, guided=guided, temperature=1.0, seed=3)
    with make_llm(TARGET, speculation={"method": "ngram", "draft_len": 4}) as llm:
        (first,) = llm.generate([PROMPTS[0]], sampling)
        tokens = first.completions[0].token_ids
        (second,) = llm.generate([PROMPTS[0]], replace(sampling, draft_token_ids=tokens[:-1]))
        assert second.completions[0].token_ids == tokens
        origins = second.completions[0].token_origins
        assert first.completions[0].token_origins.startswith("paabp"), "two tokens must follow the first"
        assert origins.startswith("paaaab") and "r" not in origins, origins


def test_greedy_texts_do_not_depend_on_how_drafts_are_accepted(plain: list[tuple[int, ...]]) -> None:
    speculation = {"draft_len": 4, "use_logits": True}
    with make_llm(TARGET, DRAFT, speculation=speculation, scheduler=FEW) as llm:
        found = run(llm)
        check_texts(llm, found)
    greedy = [place for place, (_, sampling) in enumerate(ASKED) if sampling.is_greedy]
    assert [found[place] for place in greedy] == [plain[place] for place in greedy]


def test_preempted_rows_follow_their_text_again(plain: list[tuple[int, ...]]) -> None:
    small = {"max_tokens": 96, "block_size": 16, "enable_block_reuse": False}
    with make_llm(TARGET, DRAFT, kv_cache=small, scheduler={"max_batch_size": 16}) as llm:
        outputs = llm.generate([prompt for prompt, _ in ASKED], [sampling for _, sampling in ASKED])
        assert [output.completions[0].token_ids for output in outputs] == plain
        again = [output.completions[0].statistics.num_preemptions > 0 for output in outputs]
        assert any(preempted and sampling.guided for preempted, (_, sampling) in zip(again, ASKED, strict=True))


class Guided(LogitsProcessor):  # type: ignore[misc]
    """Masks what a grammar forbids, as transformers has it done."""

    def __init__(self, matcher: LLMatcher, num_prompt: int) -> None:
        self.matcher, self.num_prompt = matcher, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > self.num_prompt:
            assert self.matcher.consume_token(int(input_ids[0, -1]))
        bits = torch.zeros(scores.shape[1] // 32, dtype=torch.int32)
        self.matcher.unsafe_compute_mask_ptr(bits.data_ptr(), 4 * len(bits))
        is_allowed = ((bits.unsqueeze(1) >> torch.arange(32)) & 1).flatten().bool()
        return scores.masked_fill(~is_allowed, -torch.inf)


def test_greedy_texts_are_those_of_transformers() -> None:
    reference = Reference(TARGET)
    asked = [(prompt, SamplingParams(max_tokens=24, guided=guide)) for guide in GUIDES for prompt in PROMPTS]
    with make_llm(TARGET, DRAFT, dtype="float32", speculation={"draft_len": 4}) as llm:
        found = run(llm, asked)
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(prompt) for prompt, _ in asked]
        grammars = Grammars(Spelling.of(llm.tokenizer, 4096, (0,)).read())
    for prompt, (_, sampling), tokens in zip(prompts, asked, found, strict=True):
        assert sampling.guided is not None
        ids = torch.tensor([prompt])
        output = reference.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
            logits_processor=[Guided(grammars.matcher(sampling.guided), len(prompt))],
        )
        assert tuple(output[0, len(prompt) :].tolist()) == tokens


def test_completions_of_one_prompt_are_guided_each() -> None:
    sampling = SamplingParams(max_tokens=COUNT, guided={"regex": REGEX}, temperature=1.0, seed=3, n=4)
    with make_llm(TARGET, DRAFT) as llm:
        (output,) = llm.generate([PROMPTS[1]], sampling)
        texts = [completion.text for completion in output.completions if completion.finish_reason == "stop"]
        assert len(set(texts)) > 1 and all(re.fullmatch(REGEX, text) for text in texts)


def failed(outputs: Sequence[RequestOutput]) -> list[str | None]:
    return [output.error for output in outputs]


@pytest.mark.parametrize("drafts", [False, True])
def test_the_end_of_the_grammar_is_the_end(drafts: bool) -> None:
    """Beyond it there are end tokens alone; who forbids these gets an error, as does one whose grammar grows too large,
    and rows beside them go on."""
    choice = SamplingParams(max_tokens=6, guided={"choice": ["no"]})
    with make_llm(TARGET, DRAFT if drafts else None, speculation={"draft_len": 3} if drafts else {}) as llm:
        ended, going_on, held, free = llm.generate(
            [PROMPTS[0]] * 4,
            [choice, replace(choice, ignore_eos=True), replace(choice, min_tokens=4), SamplingParams(max_tokens=6)],
        )
        assert ended.completions[0].text == "no" and ended.completions[0].finish_reason == "stop"
        assert ended.completions[0].token_ids[-1] == 0 and len(ended.completions[0].token_ids) < 6
        tokens = going_on.completions[0].token_ids
        length = len(ended.completions[0].token_ids)
        assert tokens == (*ended.completions[0].token_ids, *[0] * (6 - length))
        assert going_on.completions[0].finish_reason == "length"
        assert held.error == GUIDE_ENDED and free.error is None


@pytest.mark.parametrize("drafts", [False, True])
def test_a_grammar_that_becomes_too_expensive_ends_its_own_row(
    drafts: bool, monkeypatch: pytest.MonkeyPatch, plain: list[tuple[int, ...]]
) -> None:
    few = LLParserLimits(max_items_in_row=100, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "limits", lambda: few)
    growing: Any = {"grammar": 'start: x x x x\nx: "b"* | x x'}
    sampling = SamplingParams(max_tokens=60, guided=growing, logit_bias={0: -100.0})
    with make_llm(TARGET, DRAFT if drafts else None) as llm:
        prompts = [PROMPTS[0], *(prompt for prompt, _ in ASKED[:2])]
        outputs = llm.generate(prompts, [sampling, *(sampling for _, sampling in ASKED[:2])])
        assert failed(outputs) == [GUIDE_ENDED, None, None]
        assert [output.completions[0].token_ids for output in outputs[1:]] == plain[:2]


def test_bad_guides_are_refused_beside_others() -> None:
    wrong = SamplingParams(guided={"json": {"type": "strin"}})
    with make_llm(TARGET) as llm:
        refused, fine = llm.generate(PROMPTS, [wrong, SamplingParams(max_tokens=2)])
        assert refused.error == "guided: the JSON schema cannot be followed at its root: Invalid type: strin"
        assert fine.error is None


def test_rows_that_wait_for_their_guide_say_what_they_would(
    plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round has nothing left for guides now and then, and what a matcher shares with others is used up: the rows lose
    their places, and go on behind what is built beside the rounds."""
    choose = random.Random(4)
    follow = RowGuide.follow

    def follow_shared(guide: RowGuide, tokens: Sequence[int]) -> None:
        """What a matcher of the row's own has used up would be its text's fault: such a row ends."""
        follow(guide, tokens)
        if guide.matcher is not None and guide._shares is not Shares.NOBODY and choose.random() < 0.14:
            guide.give_up(guide.matcher)

    monkeypatch.setattr(RoundBudget, "is_spent", property(lambda budget: choose.random() < 0.14))
    monkeypatch.setattr(row_guide, "depends_on_others", lambda failed: True)
    monkeypatch.setattr(RowGuide, "follow", follow_shared)
    with make_llm(TARGET, DRAFT, speculation={"draft_len": 3}, scheduler=FEW) as llm:
        assert run(llm) == plain
        statistics = llm.engine.statistics()
        llm.check_idle()
    assert statistics["num_guide_waits"] > 20 and statistics["guides_work_s"] > 0
