"""Guides: what may ask for one, what is wrong with them and where, and what their matchers allow."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from guided_rows import EOS, PLAN, VOCABULARY, allowed, guide_of, tokens_of
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trtrun import SamplingParams
from trtrun.core.guide import MOST_GUIDE_CHARACTERS, Guide, GuideStart
from trtrun.core.nouns import WAITS, WAITS_ALONE, Draft, RowAdmission, Verdict
from trtrun.errors import InvalidRequestError
from trtrun.guiding import complaints
from trtrun.guiding import grammars as grammars_module
from trtrun.guiding import grammars as vocabulary
from trtrun.guiding.grammars import Grammars, Spelling
from trtrun.guiding.host_copies import HostDraft
from trtrun.guiding.masks import MaskMaker, mask_jobs
from trtrun.guiding.row_guide import FEW_TOKENS, Begun, RowGuide, Shares
from trtrun.guiding.row_guides import RowGuides
from trtrun.tokens.text import Tokenizer

COMPACT = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {"name": {"enum": ["forty two", "forty three"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LOOSE = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"enum": ["x", "yy", "zzz"]}}},
    "required": ["a", "b"],
}

BESIDE = {"x": {"y": {"type": "string"}}}
NOTHING = {"allOf": [{"type": "string"}, {"type": "null"}]}
WRONG = {"not": {"type": "null"}}
REFERENCES = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(3999)} | {"4000": {"const": 1}}


def test_guides_travel_as_they_came() -> None:
    for value in ({"json": LOOSE}, {"regex": "a+"}, {"choice": ["yes", "é"]}, {"grammar": 'start: "a"'}):
        sampling = SamplingParams(guided=value)  # type: ignore[arg-type]
        told = json.loads(json.dumps(sampling.as_mapping()))
        assert SamplingParams.from_mapping(told) == SamplingParams.from_checked(told) == sampling
    assert guide_of({"json": json.dumps(LOOSE)}) == guide_of({"json": LOOSE, "regex": None})
    assert guide_of({"json_object": True}) == guide_of({"json": {"type": "object"}})
    assert SamplingParams(guided={"json_object": False}).guided is None  # type: ignore[arg-type]
    assert list(json.loads(guide_of({"json": COMPACT}).text)["properties"]) == ["name", "age"]


def test_blanks_of_json_are_as_is_asked() -> None:
    spaced = {"type": "object", "x-guidance": {"whitespace_pattern": "[ ]{1,2}", "coerce_one_of": True}}
    kept = {"coerce_one_of": True}
    for value, options in (
        ({"json": spaced, "disable_any_whitespace": True}, kept | {"whitespace_flexible": False}),
        ({"json": spaced, "whitespace_pattern": "[ \\n]?"}, kept | {"whitespace_pattern": "[ \\n]?"}),
        ({"json": spaced, "disable_any_whitespace": False}, spaced["x-guidance"]),
        ({"json_object": True, "disable_any_whitespace": True}, {"whitespace_flexible": False}),
        ({"json": True, "whitespace_pattern": r"(?:\x20|\t){0,3}"}, {"whitespace_pattern": r"(?:\x20|\t){0,3}"}),
    ):
        assert json.loads(guide_of(value).text)["x-guidance"] == options
    assert guide_of({"json": False, "disable_any_whitespace": True}).text == "false"
    apart = {"item_separator": "[ \n]?, ", "key_separator": r": *", "whitespace_flexible": False}
    assert json.loads(guide_of({"json": {"x-guidance": apart}}).text)["x-guidance"] == apart


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is of JSON: leave it out with regex"),
        ({"json": {}, "disable_any_whitespace": "yes"}, "guided.disable_any_whitespace must be true or false"),
        (
            {"json": {}, "whitespace_pattern": "[ x]"},
            "guided.whitespace_pattern must be a regular expression of blanks",
        ),
        ({"json": {}, "whitespace_pattern": "[ {1}]"}, "guided.whitespace_pattern must be a regular expression of"),
        ({"json": {}, "whitespace_pattern": "5"}, "guided.whitespace_pattern must be a regular expression of blanks"),
        (
            {"json": {}, "whitespace_pattern": "[^ ]"},
            "guided.whitespace_pattern must be a regular expression of blanks",
        ),
        ({"json": {"x-guidance": 1}, "whitespace_pattern": " "}, "guided.json: x-guidance must be an object, not 1"),
        (
            {"json": {"x-guidance": {"whitespace_pattern": "a*"}}},
            "guided.json: x-guidance.whitespace_pattern must be a regular expression of blanks",
        ),
        ({"json": {"x-guidance": {"item_separator": ",?"}}}, 'x-guidance.item_separator must be "," with blanks'),
        ({"json": {"x-guidance": {"key_separator": ";"}}}, 'x-guidance.key_separator must be ":" with blanks'),
        ({"disable_any_whitespace": True}, "guided must have one of json"),
        ({"json": {}, "whitespace": " "}, "(did you mean 'whitespace_pattern'?)"),
        ({"jsn": {}}, "guided: unknown kind \"jsn\" (did you mean 'json'?)"),
        ({"json": {}, "regex": "a"}, "guided must have one of json, json_object, regex, choice, grammar, and has json"),
        ({}, "and has nothing"),
        ("json", "guided must be an object such as"),
        ({"json": 3}, "guided.json must be a JSON schema, which is an object, not 3"),
        ({"json": "{"}, "guided.json is no JSON: Expecting"),
        ({"json": '{"a":1,"a":2}'}, 'guided.json is no JSON: the key "a" stands twice'),
        ({"json": {"const": float("nan")}}, "guided.json cannot be written as JSON"),
        ({"choice": []}, "guided.choice must be a list of texts"),
        ({"choice": ["a", 1]}, "guided.choice must be a list of texts"),
        ({"choice": ["\ud800"]}, "half of a surrogate pair"),
        ({"regex": ""}, "guided.regex must be a text that is not empty"),
        ({"regex": "x" * (MOST_GUIDE_CHARACTERS + 1)}, "131072 are the most"),
        ({"json_object": 1}, "guided.json_object must be true or false"),
    ],
)
def test_what_is_no_guide_is_refused_in_a_line(value: object, said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(guided=value)  # type: ignore[arg-type]
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"json": {"properties": {"a": {"items": {"type": "strin"}}}}}, "at /properties/a/items: Invalid type: strin"),
        ({"json": {"$defs": {"x": {"minLength": -1, "type": "string"}}, "$ref": "#/$defs/x"}}, "at /$defs/x: Expected"),
        ({"json": {"properties": {"a/b": {"$ref": "#/definitions/x"}}}}, "at /properties/a~1b: Pointer"),
        ({"json": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(a"}]}}, "at /anyOf/1: regex"),
        ({"json": {"type": "object", "properties": 5}}, "at its root: properties must be an object"),
        ({"regex": "(a"}, "the regular expression cannot be followed: at 1(8): invalid regex"),
        ({"regex": "(?=a)b"}, "look-ahead and look-behind, is not supported"),
        ({"grammar": "start: foo"}, 'the grammar cannot be followed: at 1(8): unknown name: "foo"'),
        ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
        ({"grammar": "hello"}, "Expected ::= at line 1"),
        ({"grammar": "root ::= root"}, "no text is as it says"),
        ({"grammar": 'root ::= (("a")*)*'}, "the grammar cannot be followed: 3(12): Expected value"),
        (
            {"json": {"type": "object", "properties": {"a": False}, "required": ["b"], "additionalProperties": False}},
            "at its root: Unsatisfiable schema",
        ),
        ({"regex": "a|\\"}, "it ends with a backslash"),
        ({"choice": ["yes", "no<|endoftext|>no"]}, "the list of texts has <|endoftext|> in a text"),
        ({"regex": r"x<\|endoftext\|>y"}, "the regular expression has <|endoftext|> in a text"),
        ({"json": {"properties": {"a": {"enum": [1, ["<|endoftext|>"]]}}}}, "the JSON schema has <|endoftext|>"),
        ({"json": {"properties": {"<|endoftext|>": {}}}}, "the JSON schema has <|endoftext|>"),
        ({"json": {"type": "string", "pattern": r"<\|endoftext\|>"}}, "the JSON schema has <|endoftext|>"),
        ({"grammar": r'root ::= "\"<|endoftext|>" [0-9]'}, "the grammar has <|endoftext|> in a text"),
        ({"grammar": r"start: /a<\|endoftext\|>/"}, "the grammar has <|endoftext|> in a text"),
        ({"json": {"$ref": "#/$defs/0", "$defs": REFERENCES}}, "refers to 4000 parts; 600 are the most"),
        (
            {"grammar": "start: a0\n" + "\n".join(f'a{n}: "x" | a{n + 1}' for n in range(4000))},
            "the grammar has 4001 rules",
        ),
        ({"json": {"type": "integer", "multipleOf": 999983}}, "multipleOf takes too much"),
        ({"json": {"type": "integer", "multipleOf": 1048576}}, "multipleOf takes too much"),
        ({"json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (7, 11, 1.3, 17)]}}, "multipleOf takes"),
        ({"grammar": 'start: %json {"type": "integer", "multiple\\u004ff": 999983}'}, "multipleOf takes too much"),
        ({"grammar": f'start: %json {{"multipleOf": {"7" * 5000}}}'}, "multipleOf takes too much"),
        ({"json": {**BESIDE, "properties": {"a": {"$ref": "#/x/y"}, "b": WRONG}}}, "at /properties/b: Unimplemented"),
        ({"json": {**BESIDE, "$defs": {"a": NOTHING}, "patternProperties": {"^[a%]": WRONG}}}, "/^[a%]: Unimplemented"),
        ({"json": {"$id": "http://x/y", "items": {"$ref": "http://x/y#/z"}, "z": WRONG}}, "at /items: Unimplemented"),
        ({"json": {"x-guidance": 5, "properties": {"a": BESIDE["x"]["y"]}}}, "at its root: "),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "Use anyOf, or set coerce_one_of"),
        ({"regex": "a{9999}"}, "leaves no choice for 9999 tokens; 8192 are the most"),
    ],
)
def test_what_cannot_be_followed_is_said_with_its_place(grammars: Grammars, value: object, said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        grammars.check(guide_of(value))
    assert said in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "value",
    [
        {"json": {"type": "null", "description": "before <|endoftext|>", "title": "<|endoftext|>"}},
        {"json": {"properties": {"title": {"type": "string"}}}},
        {"grammar": 'start: "a" <|endoftext|>'},
        {"regex": r"a\\"},
        {"grammar": "root ::= " + '"a"? ' * 600},
        {"json": {"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 64000}, "c": {"multipleOf": 99}}}},
    ],
)
def test_what_only_looks_like_one_of_these_is_followed(grammars: Grammars, value: object) -> None:
    grammars.check(guide_of(value))


def test_a_schema_that_is_nested_deep_and_wrong_is_refused(grammars: Grammars) -> None:
    depth = 300
    with pytest.raises(InvalidRequestError, match="cannot be followed at"):
        grammars.check(Guide("json", '{"items":' * depth + json.dumps(WRONG) + "}" * depth))


def test_no_part_is_tried_any_more_once_that_has_taken_long(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complaints, "_MOST_SECONDS", -1.0)
    with pytest.raises(InvalidRequestError, match="at its root: Unimplemented"):
        grammars.check(guide_of({"json": {"properties": {"unseen": WRONG}}}))


def test_each_of_many_choices_can_be_written(grammars: Grammars, tokenizer: Tokenizer) -> None:
    texts = ["", *(f"item {number}" for number in range(1022)), "item 9"]
    for text in (texts[0], texts[9], texts[90], texts[1022]):
        matcher = grammars.matcher(guide_of({"choice": texts}))
        assert all(map(matcher.consume_token, tokenizer.encode(text))) and matcher.is_accepting(), matcher.get_error()


def test_what_takes_long_to_build_is_refused_each_time(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = guide_of({"regex": "[p-q]{3}"})
    with monkeypatch.context() as patch:
        patch.setattr(grammars_module, "_MOST_SECONDS", -1.0)
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="longer than -1 s to build"):
                grammars.check(guide)
    assert not grammars.has(guide)
    grammars.check(guide)


def test_few_are_kept_where_they_took_long(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(Spelling.of(tokenizer, VOCABULARY, (EOS,)).read())
    first, second, third = (guide_of({"regex": f"[x-z]{{{count}}}"}) for count in (2, 3, 4))
    grammars.check(first)
    grammars.check(second)
    assert grammars.has(first) and grammars.has(second)
    monkeypatch.setattr(grammars_module, "_MOST_SECONDS_KEPT", -1.0)
    grammars.check(third)
    assert [grammars.has(guide) for guide in (first, second, third)] == [False, False, True]


def test_grammars_are_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = guide_of({"regex": "[a-c]{3}"})
    grammars.check(guide)
    monkeypatch.setattr(grammars_module, "_grammar", lambda guide: pytest.fail("compiled again"))
    first, second = grammars.matcher(guide), grammars.matcher(guide)
    token = allowed(first)[0]
    assert first.consume_token(token)
    assert allowed(first) != allowed(second)


def test_without_a_tokenizer_or_an_end_nothing_is_guided(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        Spelling.of(None, VOCABULARY, (EOS,))
    with pytest.raises(InvalidRequestError, match="names none"):
        Spelling.of(tokenizer, VOCABULARY, ())


@pytest.mark.parametrize("schema", [COMPACT, LOOSE])
def test_what_may_come_next_depends_on_the_text_alone(grammars: Grammars, schema: dict[str, Any]) -> None:
    """Not on how a matcher has come there: by what it was asked on the way, at once, or on a fork."""
    for seed in range(12):
        choose = random.Random(seed)
        walking, text = grammars.matcher(guide_of({"json": schema})), list[int]()
        for _ in range(30):
            options = allowed(walking)
            at_once = grammars.matcher(guide_of({"json": schema}))
            assert not text or at_once.consume_tokens(text)
            fork = walking.deep_copy()
            assert allowed(at_once) == allowed(fork) == options
            forced = walking.compute_ff_tokens()
            assert not forced or options == forced[:1]
            fork.try_consume_tokens([choose.choice(options)])
            text.append(choose.choice(options))
            assert walking.consume_token(text[-1])


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_of_a_draft_are_those_of_its_tokens(grammars: Grammars, tokenizer: Tokenizer, threads: int) -> None:
    matcher = grammars.matcher(guide_of({"json": COMPACT}))
    chain = tokenizer.encode('{"name":"forty t', add_special_tokens=False)
    (wrong,) = tokenizer.encode("x", add_special_tokens=False)
    draft = HostDraft(
        Draft(torch.tensor([[*chain, wrong, wrong], [*chain, wrong, wrong]]), torch.tensor([len(chain) + 2, 2]))
    )
    width = len(chain) + 3
    jobs = [job for place in range(3) for job in mask_jobs(matcher.deep_copy(), place * width, draft, place)]
    bits = torch.zeros((3 * width, VOCABULARY // 32), dtype=torch.int32)
    MaskMaker(VOCABULARY, threads).fill(bits, jobs)
    for place, known in enumerate((len(chain), 2, 0)):
        walking = matcher.deep_copy()
        for step in range(width):
            found = tokens_of(bits[place * width + step])
            assert found == (allowed(walking) if step <= known else [])
            if step < known:
                assert walking.consume_token(chain[step])


def test_masks_of_a_tree_are_those_of_its_nodes(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(guide_of({"choice": ["yes", "yes sir", "no"]}))
    yes, no, wrong = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("y", "no", "x"))
    tokens = torch.tensor([[EOS, no, wrong, yes, wrong]])
    paths = torch.tensor([[[1, 0, -1], [3, 2, 4], [2, 4, -1]]])
    jobs = mask_jobs(matcher, 0, HostDraft(Draft(tokens, torch.tensor([3]), paths=paths)), 0)
    bits = torch.zeros((6, VOCABULARY // 32), dtype=torch.int32)
    MaskMaker(VOCABULARY, 1).fill(bits, jobs)
    found = [tokens_of(line) for line in bits]
    after_yes = matcher.deep_copy()
    assert after_yes.consume_token(yes)
    assert found[0] == allowed(matcher) and {yes, no} <= {*found[0]} and wrong not in found[0]
    assert found[1 + 1] == [EOS] and found[1 + 3] == allowed(after_yes)
    assert found[1 + 2] == found[1 + 4] == []  # not reached


def test_a_text_that_is_not_its_grammars_ends_there(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = RowGuide(Begun(grammars.matcher(guide_of({"choice": ["no"]}))))
    (no,) = tokenizer.encode("no", add_special_tokens=False)
    guide.follow([no, EOS, EOS])
    assert guide.matcher is not None and allowed(guide.matcher) == [EOS]
    guide.follow([no])
    assert guide.matcher is None and not guide.waits, "no other matcher would follow it"


def test_a_bound_that_others_have_used_up_is_ones_own_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matchers of one grammar share their lexer's states: which of them finds none left depends on the others. What a
    row goes on with then is compiled beside the rounds, once for all rows that are in need of it."""
    found_anew, main, build = list[bool](), get_ident(), Grammars.matcher

    def matcher(grammars: Grammars, guide: Guide, *, anew: bool = False) -> LLMatcher:
        assert get_ident() != main, "in the thread of rounds"
        found_anew.append(anew)
        return build(grammars, guide, anew=anew)

    few = LLParserLimits(max_lexer_states=200, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "limits", lambda: few)
    guide = guide_of({"regex": "((a|b)*a(a|b){9}c?){2,9}((a|b)*b(a|b){8}d?)*"})
    grammars = Grammars(Spelling.of(tokenizer, VOCABULARY, (EOS,)).read())
    grammars.check(guide)
    monkeypatch.setattr(Grammars, "matcher", matcher)
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab"]
    guides = RowGuides(lambda: grammars, VOCABULARY, torch.device("cpu"))
    texts: list[list[int]] = [[], [], [], []]

    def admit(row: int, waits: int = WAITS) -> None:
        guides.build(GuideStart(guide, tuple(texts[row]), waits == WAITS_ALONE))
        guides.begin_round(replace(PLAN, dropped_rows=(row,), admissions=(admission_of(row, guide, texts[row]),)))

    for row in range(len(texts)):
        admit(row)
    choose, rows, num_waits = random.Random(0), [*range(len(texts))], 0
    for _ in range(30):
        masks = guides.masks(rows, 0)
        while waiting := guides.waiting(rows):
            num_waits += len(waiting)
            assert masks is not None and not any(tokens_of(masks.bits[place]) for place in waiting)
            for place, how in waiting.items():
                admit(rows[place], how)
            masks = guides.masks(rows, 0)
        assert masks is not None
        assert all({*letters} <= {*tokens_of(line)} for line in masks.bits)
        gained = [choose.choice(letters) for _ in rows]
        for text, token in zip(texts, gained, strict=True):
            text.append(token)
        guides.note_verdict(rows, Verdict(torch.ones(len(rows), dtype=torch.int64), torch.tensor(gained).unsqueeze(1)))
    assert num_waits >= len(rows) > sum(found_anew) > 0, (num_waits, found_anew)


def admission_of(row: int, guide: Guide, output: Sequence[int] = ()) -> RowAdmission:
    return RowAdmission(row, row, np.array([1, *output], dtype=np.int32), 1, 0, False, SamplingParams(guided=guide))


def test_a_row_is_not_begun_anew_again_and_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    little = LLParserLimits(step_lexer_fuel=200, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "limits", lambda: little)
    grammars = Grammars(Spelling.of(tokenizer, VOCABULARY, (EOS,)).read())
    failed = grammars.matcher(guide_of({"regex": "[a-z]{400}"}))
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    assert not all(failed.consume_token(letter) for _ in range(400))
    waits = {
        Shares.ALL: (WAITS, WAITS),
        Shares.FEW: (WAITS_ALONE, WAITS),
        Shares.NOBODY: (0, WAITS_ALONE),
    }
    for shares, expected in waits.items():
        for num_tokens, how in zip((FEW_TOKENS - 1, FEW_TOKENS), expected, strict=True):
            guide = RowGuide(Begun(grammars.matcher(guide_of({"regex": "a*"})), None, shares), 7)
            guide.follow([letter] * num_tokens)
            assert guide.matcher is not None
            guide.give_up(failed)
            assert guide.matcher is None and guide.waits == how, (shares, num_tokens)


def test_a_bound_of_the_text_alone_ends_its_row_and_compiles_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other matcher would pass it, too."""
    few = LLParserLimits(max_items_in_row=20, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "limits", lambda: few)
    grammars = Grammars(Spelling.of(tokenizer, VOCABULARY, (EOS,)).read())
    properties = {f"k{number}": {"type": "integer"} for number in range(100)}
    guide = guide_of({"json": {"type": "object", "properties": properties}})
    guides = RowGuides(lambda: grammars, VOCABULARY, torch.device("cpu"))
    rows = [0, 1]
    guides.begin_round(replace(PLAN, admissions=tuple(admission_of(row, guide) for row in rows)))
    assert guides.masks(rows, 0) is not None
    monkeypatch.setattr(grammars_module, "LLMatcher", lambda *_, **__: pytest.fail("compiled again"))
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    guides.note_verdict(rows, Verdict(torch.ones(2, dtype=torch.int64), torch.full((2, 1), brace)))
    masks = guides.masks(rows, 0)
    assert masks is not None and not masks.bits.any() and guides.waiting(rows) == {}


def test_a_mask_that_cannot_be_made_allows_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no end of the text, which the engine's own would be."""
    few = LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "limits", lambda: few)
    grammars = Grammars(Spelling.of(tokenizer, VOCABULARY, (EOS,)).read())
    guide = guide_of({"regex": "((a|b)*a(a|b){9}c?){2,9}((a|b)*b(a|b){8}d?)*"})
    guides = RowGuides(lambda: grammars, VOCABULARY, torch.device("cpu"))
    guides.begin_round(replace(PLAN, admissions=(admission_of(0, guide),)))
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab"]
    choose, text = random.Random(1), list[int]()
    while True:
        masks = guides.masks([0], 0)
        assert masks is not None
        found = {*tokens_of(masks.bits[0])}
        if guides.waiting([0]):
            assert not found
            guides.begin_round(replace(PLAN, admissions=(admission_of(0, guide, text),)))
            continue
        if not found:
            break
        assert {*letters} <= found, len(text)
        text.append(choose.choice(letters))
        guides.note_verdict([0], Verdict(torch.tensor([1]), torch.tensor([[text[-1]]])))
    assert len(text) > 5


def test_a_tokenizer_that_cannot_be_read_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def read(tokenizer: str, **options: Any) -> LLTokenizer:
        tried.append(tokenizer)
        return LLTokenizer(tokenizer, **options)

    monkeypatch.setattr(vocabulary, "LLTokenizer", read)
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    spelling = Spelling(json.dumps(words), 2, (1,))
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match=r"cannot be followed with the target's tokenizer: \w"):
            spelling.read()
    assert len(tried) == 1
