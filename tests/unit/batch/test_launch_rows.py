"""Rows of JSON lines: what a line means, which lines are rows, what is refused, and by which hash a row is known."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import launch.batch.input
import launch.batch.rows
from launch.batch.input import InputRows
from launch.batch.options import Part, SampledShare
from launch.batch.rows import PromptRow, refused_row
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.values import unique_keys
from trtrun.errors import ConfigError, InvalidRequestError


def write(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def read(tmp_path: Path, text: str | bytes, **defaults: object) -> list[PromptRow]:
    return list(InputRows((), write(tmp_path, text), defaults).read())


def test_defaults_are_overridden_by_the_row(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "a", "temperature": 0.5}\n\n{"prompt_token_ids": [1, 2]}\n')
    rows = list(InputRows(["p", "q"], file, {"temperature": 1.0, "max_tokens": 7}).read())
    assert [(row.index, row.line, row.prompt) for row in rows] == [
        (0, None, "p"),
        (1, None, "q"),
        (2, 1, "a"),
        (3, 3, (1, 2)),
    ]
    chosen = [(row.sampling.temperature, row.sampling.max_tokens) for row in rows if row.sampling is not None]
    assert chosen == [(1.0, 7), (1.0, 7), (0.5, 7), (1.0, 7)]


def test_what_the_model_says_of_sampling_is_no_part_of_the_input(tmp_path: Path) -> None:
    """`trtrun merge` compares rows with the same input without the model's files."""
    lines = (
        '{"prompt": "a"}',
        '{"prompt": "a", "temperature": null, "top_p": 0.5}',
        '{"prompt": "a", "temperature": 0}',
    )
    file, given = write(tmp_path, "\n".join(lines)), {"max_tokens": 7}
    rows = list(InputRows(["p"], file, given, of_model={"temperature": 0.6, "top_p": 0.9, "max_tokens": 3}).read())
    chosen = [(row.sampling.temperature, row.sampling.top_p, row.sampling.max_tokens) for row in rows if row.sampling]
    assert chosen == [(0.6, 0.9, 7), (0.6, 0.9, 7), (0.6, 0.5, 7), (0.0, 0.9, 7)]
    assert [row.input_hash for row in rows] == [row.input_hash for row in InputRows(["p"], file, given).read()]


@pytest.mark.parametrize(("share", "sampled"), [(0.0, []), (0.25, [3, 7]), (0.5, [1, 3, 5, 7]), (1.0, list(range(8)))])
def test_a_share_of_the_rows_of_training_data_is_sampled(tmp_path: Path, share: float, sampled: list[int]) -> None:
    """Each by its own seed, whatever part runs it; a row that names its own parameters keeps them."""
    file = write(tmp_path, '{"prompt": "a"}\n' * 7 + '{"prompt": "b", "temperature": 0.1, "seed": 5}\n')
    rows = list(InputRows((), file, {"max_tokens": 9}, None, SampledShare(share, 0.7, 100)).read())
    found = [row.sampling for row in rows if row.sampling is not None]
    assert [item.temperature for item in found[:7]] == [0.7 if index in sampled else 0.0 for index in range(7)]
    assert [item.seed for item in found[:7]] == [100 + index if index in sampled else None for index in range(7)]
    assert (found[7].temperature, found[7].seed) == (0.1, 5)
    assert all(row.is_data for row in rows)
    part = list(InputRows((), file, {"max_tokens": 9}, Part(2, 2), SampledShare(share, 0.7, 100)).read())
    assert [(row.sampling, row.input_hash) for row in part] == [(row.sampling, row.input_hash) for row in rows[4:]]


HUGE = 10**30
BAD_LINES: list[tuple[str | bytes, str]] = [
    ("{", "not valid JSON at character 2 of the line: "),
    ('{"prompt": "a",}', "not valid JSON at character 16 of the line: "),
    ("[1]", "a row must be an object such as"),
    ("null", "not null"),
    ('{"prompt": 3}', '"prompt" must be a text, not 3'),
    ('{"prompt": null}', '"prompt" must be a text, not null'),
    ('{"prompt_token_ids": [1, true]}', "list of whole numbers, not [1, true]"),
    ('{"prompt_token_ids": "12"}', "list of whole numbers"),
    ("{}", 'one of "prompt", "prompt_token_ids" and "messages"'),
    ('{"prompt": "a", "max_token": 3}', "did you mean 'max_tokens'?"),
    ('{"prompt": "a", "messages": []}', 'one of "prompt", "prompt_token_ids" and "messages"'),
    ('{"messages": "hello"}', 'messages must be a list with one message at least, not "hello"'),
    ('{"messages": [{"role": "you", "content": "a"}]}', "messages[0].role must be one of system"),
    ('{"messages": [{"role": "user", "content": "a"}], "tools": [5]}', "tools[0] must be an object, not 5"),
    ('{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 5}', "chat_template_kwargs must be"),
    ('{"prompt": "a", "tools": []}', '"tools" is of chats: give "messages" instead of "prompt", or leave it out'),
    ('{"prompt": "a", "return_context_logits": true}', "return_context_logits: rows have no logits"),
    ('{"prompt": "a", "\\ud800": 3}', "unknown key '\\ud800'"),
    ('{"prompt": "a\\ud800b"}', '"prompt" holds \\ud800, half of a surrogate pair'),
    ('{"prompt": "a", "stop": "\\udfff"}', "stop holds \\udfff, half of a surrogate pair"),
    ('{"prompt": "a", "bad_words": ["\\udfff"]}', "bad_words holds \\udfff, half of a surrogate pair"),
    ('{"prompt": "a", "stop_token_ids": 3}', "stop_token_ids must be a list of whole numbers, not 3"),
    ('{"prompt": "a", "stop_token_ids": [true]}', "stop_token_ids must be a list of whole numbers, not [true]"),
    (f'{{"prompt": "a", "stop_token_ids": [{HUGE}]}}', "is not a token id, a whole number from 0 to 2147483647"),
    ('{"prompt": "a", "logit_bias": {"x": 1}}', 'logit_bias: "x" is not a token id'),
    ('{"prompt": "a", "logit_bias": {"5": 1, "05": 2}}', "logit_bias: token 5 stands twice"),
    ('{"prompt": "a", "logit_bias": {"5": true}}', "logit_bias of token 5 must be a finite number, not true"),
    ('{"prompt": "a", "logit_bias": false}', "logit_bias must be an object of token ids and numbers, not false"),
    ('{"prompt": "a", "ignore_eos": "false"}', 'ignore_eos must be true or false, not "false"'),
    ('{"prompt": "a", "stop": {"a": 1}}', 'stop must be a text or a list of texts, not {"a": 1}'),
    ('{"prompt": "a", "stop": false}', "stop must be a text or a list of texts, not false"),
    ('{"prompt": "a", "stop": 5}', "stop must be a text or a list of texts, not 5"),
    ('{"prompt": "a", "bad_words": [""]}', "bad_words must not hold an empty text"),
    (f'{{"prompt": "a", "temperature": {10**400}}}', "temperature must be a finite number, not 1000"),
    ('{"prompt": "a", "temperature": 1e-300}', "temperature must be 0 or between 1e-30 and 1e30, not 1e-300"),
    ('{"prompt": "a", "repetition_penalty": 1e308}', "repetition_penalty must be between 1e-6 and 1e6, not 1e+308"),
    ('{"prompt": "a", "top_p": NaN}', "top_p must be a finite number, not NaN"),
    ('{"prompt": "a", "max_tokens": 4.0}', "max_tokens must be a whole number, not 4.0"),
    ('{"prompt": "a", "max_tokens": ' + "9" * 5000 + "}", "a number has more digits than"),
    (f'{{"prompt": "a", "seed": {2**63}}}', "seed must be between 0 and 2**63 - 1, not 9223372036854775808"),
    ('{"prompt": "a", "max_tokens": 2, "max_tokens": 4}', 'the key "max_tokens" stands twice'),
    ('{"prompt": ' + "[" * 950 + "]" * 950 + "}", '"prompt" must be a text'),
    ("[" * 100000, "nested too deeply"),
    ('{"prompt": "a", "stop": ' + "[" * 100000 + "]" * 100000 + "}", "nested too deeply"),
    (b'{"prompt": "ab\xff"}', "not UTF-8 text: byte 15 of the line, 0xff, is not valid there"),
    (b'{"prompt": "\xc3\xa4\xed\xa0\x80"}', "not UTF-8 text: byte 15 of the line, 0xed"),
    (b"\0\0\0", "not valid JSON at character 1"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES)
def test_a_bad_row_is_refused_with_its_reason_and_the_others_go_on(
    tmp_path: Path, line: str | bytes, said: str
) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    good, bad, other = read(tmp_path, b'{"prompt": "good"}\n\n' + raw + b'\n{"prompt": "other"}')
    assert (good.prompt, other.prompt) == ("good", "other")
    assert (bad.prompt, bad.sampling, bad.name) == (None, None, "row 1 (line 3)")
    assert said in str(bad.error) or (said.startswith('"prompt" must be') and "nested too deeply" in str(bad.error))
    assert str(bad.error).isprintable()
    json.dumps(refused_row(bad, str(bad.error)), allow_nan=False).encode()
    # The words are those of whoever writes JSON.
    assert not {"None", "True", "False", "NoneType", "dict", "tuple", "str", "int"} & set(str(bad.error).split())


def test_a_key_that_stands_twice_is_found_by_looking_at_each_key_a_few_times() -> None:
    class Key(str):
        num_comparisons = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Key.num_comparisons += 1
            return str.__eq__(self, str(other))

    keys = [Key(f"{number:x}") for number in range(2000)]
    with pytest.raises(InvalidRequestError, match='the key "7cf" stands twice'):
        unique_keys([(key, 0) for key in [*keys, Key(keys[-1])]])
    assert Key.num_comparisons < 4 * len(keys)  # one of all pairs would be 2,000,000


TOO_LONG: list[tuple[str, list[object], str]] = [
    ("bad_words", ["a"] * 1025, "has 1025 entries; 1024 are the most"),
    ("stop", ["a"] * 1025, "has 1025 entries; 1024 are the most"),
    ("bad_words", ["a" * 40_000, "b" * 40_000], "is 80000 characters long in all; 65536 are the most"),
    ("stop", ["a" * 65_537], "is 65537 characters long in all; 65536 are the most"),
    ("stop_token_ids", [1] * 524_289, "has 524289 entries; 524288 are the most"),
    ("draft_token_ids", [1] * 524_289, "has 524289 entries; 524288 are the most"),
]


@pytest.mark.parametrize("place", range(len(TOO_LONG)))
def test_lists_that_would_hold_up_all_rows_are_refused(tmp_path: Path, place: int) -> None:
    name, values, said = TOO_LONG[place]
    refused, whole = read(tmp_path, json.dumps({"prompt": "a", name: values}) + '\n{"prompt": "b"}\n')
    assert refused.error is not None and refused.error.endswith(f"{name} {said}") and whole.error is None


class CountedWords(list[str]):
    """Words that count how often they are gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[str]:
        self.num_passes += 1
        return super().__iter__()


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_too_many_words_are_refused_without_a_look_at_them(name: str) -> None:
    words = CountedWords(["os"] * 1025)
    with pytest.raises(InvalidRequestError, match=f"{name} has 1025 entries; 1024 are the most"):
        SamplingParams.from_mapping({name: words})
    assert words.num_passes <= 1, "once to make a list of them"


def test_anything_unexpected_while_one_row_is_read_is_that_rows_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(values: object) -> SamplingParams:
        raise ZeroDivisionError("by\nnothing")

    rows = InputRows((), write(tmp_path, '{"prompt": "a"}\n'))
    monkeypatch.setattr(SamplingParams, "from_mapping", fail)
    (row,) = rows.read()
    assert row.error == "not a valid row: ZeroDivisionError: by\\nnothing"


def test_what_a_refusal_shows_is_bounded(tmp_path: Path) -> None:
    megabyte = "x" * 1_000_000
    lines = [
        json.dumps({"prompt": "a", "max_tokens": megabyte}),
        json.dumps({"prompt": "a", megabyte: 1}),
        json.dumps({"prompt": [megabyte]}),
        json.dumps(megabyte),
    ]
    for row in read(tmp_path, "\n".join(lines)):
        assert 10 < len(str(row.error)) < 800
    assert len(str(refused_row(row, megabyte)["error"])) < 1100


def test_null_stands_for_the_default_in_every_field(tmp_path: Path) -> None:
    names = [name for name in SamplingParams.__dataclass_fields__]
    line = json.dumps({"prompt": "a", "prompt_token_ids": None, **dict.fromkeys(names)})
    (row,) = read(tmp_path, line)
    assert row.sampling == SamplingParams()
    (row,) = read(tmp_path, line, max_tokens=5, seed=3)
    assert row.sampling == SamplingParams(max_tokens=5, seed=3)
    (given,) = read(tmp_path, '{"prompt": "a"}', max_tokens=5)
    (null,) = read(tmp_path, '{"prompt": "a", "max_tokens": null}', max_tokens=5)
    assert null.input_hash == given.input_hash


def test_huge_counts_mean_all_and_travel() -> None:
    sampling = SamplingParams(max_tokens=HUGE, min_tokens=HUGE, top_k=HUGE)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (2**31 - 1,) * 3
    with pytest.raises(InvalidRequestError, match="min_tokens is 2147483647, more than max_tokens, 5"):
        SamplingParams(max_tokens=5, min_tokens=HUGE)
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 1, not a value of kind int"):
        SamplingParams(max_tokens=-(10**5000))


def test_lines_end_with_a_line_feed_and_nothing_else(tmp_path: Path) -> None:
    prompt = "one\u2028two\x0b\x85three"
    (row,) = read(tmp_path, json.dumps({"prompt": prompt}, ensure_ascii=False) + "\r\n")
    assert row.prompt == prompt
    first, second = read(tmp_path, '{"prompt": "ab",\r"max_tokens": 2}\r\n \r\n{"prompt": "b"}')
    assert (first.error, first.prompt, second.index, second.line) == (None, "ab", 1, 3)


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (row,) = read(tmp_path, mark + b'{"prompt": "a"}\n')
    assert (row.error, row.prompt) == (None, "a")
    assert row.input_hash == read(tmp_path, b'{"prompt": "a"}\n')[0].input_hash
    with pytest.raises(ConfigError, match="has no rows"):
        InputRows((), write(tmp_path, mark + b"\n"))


@pytest.mark.parametrize("length", [35, 36, 37, 69, 70, 71, 72, 105, 200])
def test_a_line_of_any_length_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    for module in (launch.batch.input, launch.batch.rows):
        monkeypatch.setattr(module, "LONGEST_LINE", 35)
    line = json.dumps({"prompt": "x" * (length - 15)})  # with its line end of this length
    first, second = read(tmp_path, f'{line}\n{{"prompt": "b"}}\n')
    assert (first.error is None) == (length <= 35)
    assert (second.index, second.line, second.prompt) == (1, 2, "b")
    (last,) = read(tmp_path, line)
    assert (last.error is None) == (length - 1 <= 35)


@pytest.mark.parametrize(
    ("start", "said"),
    [(b"\x1f\x8b\x08", "is compressed (gzip): unpack it first"), (b"\xff\xfe{\0", "is UTF-16 text: write it as UTF-8")],
)
def test_a_file_of_another_kind_is_refused_as_a_whole(tmp_path: Path, start: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        InputRows((), write(tmp_path, start + os.urandom(50)))
    assert said in str(raised.value)


def test_a_file_without_rows_and_a_bad_default_are_errors_of_the_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rows"):
        InputRows((), write(tmp_path, "\n \n\u2003\n"))
    with pytest.raises(ConfigError, match="nothing to do"):
        InputRows()
    with pytest.raises(ConfigError, match="File name too long"):
        InputRows((), Path("x" * 5000))
    for path in (Path("/dev/null"), tmp_path):
        with pytest.raises(ConfigError, match="is not a file: it is read more than once"):
            InputRows((), path)
    with pytest.raises(InvalidRequestError, match="top_p"):
        InputRows(["a"], None, {"top_p": 2.0})
    with pytest.raises(InvalidRequestError, match="top_p"):
        InputRows((), write(tmp_path, '{"prompt": "a"}'), {"top_p": 2.0})


def test_rows_that_nobody_wants_are_counted_and_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "".join(f'\n{{"prompt": "{index}"}}\n \n' for index in range(10)))
    parsed: list[int] = []
    read_line = launch.batch.input.read_line

    def count(index: int, *arguments: object) -> PromptRow:
        parsed.append(index)
        return read_line(index, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(launch.batch.input, "read_line", count)
    rows = InputRows(["first"], file, {}, Part(2, 3))
    assert (len(rows), rows.indexes, parsed) == (4, range(3, 7), [])
    assert [(row.index, row.prompt) for row in rows.read(lambda index: index != 5)] == [(3, "2"), (4, "3"), (6, "5")]
    assert parsed == [3, 4, 6]
    reader = rows.of_part(None).read()
    assert [next(reader).prompt for _ in range(3)] == ["first", "0", "1"]
    assert parsed[3:] == [1, 2]  # one after another: nothing is read ahead


def test_a_file_that_becomes_shorter_is_told(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n')
    rows = InputRows((), file)
    assert len(rows) == 2
    write(tmp_path, '{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="has fewer rows than when the run began"):
        list(rows.read())
    write(tmp_path, '{"prompt": "a"}\n' * 3)
    assert len(list(rows.read())) == 2  # what came later belongs to another run


def test_the_hash_is_of_the_row_and_the_defaults_that_it_takes(tmp_path: Path) -> None:
    def hashes(text: str, defaults: dict[str, object]) -> list[str]:
        return [row.input_hash for row in InputRows((), write(tmp_path, text), defaults).read()]

    plain = '{"prompt": "a", "max_tokens": 5}\n{"prompt": "a"}\n{bad'
    assert hashes(plain, {}) == hashes('{"max_tokens":5,"prompt":"\\u0061"}\n\n {"prompt":"a"}\n{bad', {})
    assert hashes(plain, {})[:2] != hashes(plain, {"max_tokens": 9})[:2]
    assert hashes(plain, {})[0] == hashes(plain, {"max_tokens": 9})[0]  # the row names its own
    assert len(set(hashes(plain, {}))) == 3
    assert hashes(plain, {})[1] == next(InputRows(["a"]).read()).input_hash


def test_hashes_stay_as_they_were_so_that_earlier_outputs_can_be_resumed(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a"}',
        '{"max_tokens": 5, "prompt": "\\u00e4\\ud83d\\ude00"}',
        '{"prompt_token_ids": [1, 2, 3], "temperature": 0.5, "seed": null}',
        '{"prompt": "b", "logit_bias": {"7": -3.5}, "stop": ["x", "y"], "n": 2, "logprobs": 0}',
        '{"promt": "b"}',
        "[1]",
    ]
    # Written down from version 0.1.0.
    plain = "732acbb3e402e912 dd0553153aaaccee 17187d0ca10772c1 425f23e25d8dbabf 3bee5b0444089ffd 080a9ed428559ef6"
    given = "c4e37544acbc16f4 5285edfc827b012a a932a090b5c8bdc6 b8aa5237571668fc 23b219e0b35fcf59 080a9ed428559ef6"
    text = "\n".join(lines)
    assert [row.input_hash for row in read(tmp_path, text)] == plain.split()
    assert [row.input_hash for row in read(tmp_path, text, max_tokens=9, stop=("q",))] == given.split()
    prompts = InputRows(["def f(", "\u00e4"], None, {"temperature": 0.8, "ignore_eos": True})
    assert [row.input_hash for row in prompts.read()] == ["ec56d9b50bbc66ae", "b0f2be587d01f0ea"]
