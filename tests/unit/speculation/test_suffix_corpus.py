"""A corpus for SuffixDecoding: what is read of files, what is found in it, and that no text depends on it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from pipelines import configuration, make_llm, prompt_of, run_alone, tokens_of

from launch.jobs.check.preflight import check_models
from launch.jobs.placement.memory import JobMemory
from trtrun import SamplingParams
from trtrun.core.nouns import RoundPlan
from trtrun.errors import ConfigError
from trtrun.speculation.drafters.lookup import SuffixDrafter
from trtrun.speculation.suffixes.continuations import MOST_PLACES, SuffixRule
from trtrun.speculation.suffixes.corpus import SortedCorpus, bytes_of_corpus, sort_places
from trtrun.speculation.suffixes.search import SuffixSearch, last_tokens
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.corpus import read_corpus

COUNT = 24
VOCABULARY = 260


def sorted_corpus(texts: Sequence[Sequence[int]], most: int) -> SortedCorpus:
    tokens = torch.tensor([token for text in texts for token in (*text, -1)], dtype=torch.int32)
    order, num_places = sort_places(tokens, most)
    return SortedCorpus(tokens, order, most, num_places)


def found_by_hand(texts: Sequence[list[int]], row: list[int], most: int, count: int) -> list[tuple[int, list[int]]]:
    """Every place where at least the row's last token stood: how many of them, and what stands behind."""
    found = []
    for text in texts:
        for start in range(1, len(text)):
            sizes = range(min(most, start, len(row)), 0, -1)
            longest = next((size for size in sizes if text[start - size : start] == row[-size:]), 0)
            found += [(longest, text[start : start + count])] if longest else []
    return sorted(found, reverse=True)


@pytest.mark.parametrize("size", [3, 40, 700])
def test_it_finds_the_places_of_longest_match(size: int) -> None:
    """In corpora that one step of a search is enough for, and in others."""
    chance = random.Random(size)
    lengths: Counter[int] = Counter()
    for _ in range(12):
        texts = [[chance.randrange(3) for _ in range(chance.randint(1, size))] for _ in range(chance.randint(1, 9))]
        texts.append([0, 1])
        rows = [[chance.randrange(3) for _ in range(chance.randint(1, 30))] for _ in range(5)]
        rows += [text[:-1] for text in texts[:3] if 1 < len(text) < 90]
        most = chance.choice([1, 2, 5, 24, 64])
        token_ids = torch.full((len(rows), 100), 1, dtype=torch.int32)
        for index, row in enumerate(rows):
            token_ids[index, : len(row)] = torch.tensor(row)
        wanted = last_tokens(token_ids, torch.tensor([len(row) for row in rows]), most)
        matched, tokens, counts = sorted_corpus(texts, most).find(wanted, 4)
        assert matched.shape == (len(rows), MOST_PLACES)
        for index, row in enumerate(rows):
            expected = found_by_hand(texts, row, most, 4)
            found = [
                (length, behind[:count])
                for length, behind, count in zip(
                    matched[index].tolist(), tokens[index].tolist(), counts[index].tolist(), strict=True
                )
                if length
            ]
            assert [length for length, _ in found] == [length for length, _ in expected[:MOST_PLACES]]
            longer = [place for place in expected if place[0] > (found[-1][0] if len(found) == MOST_PLACES else 0)]
            assert sorted(found, reverse=True)[: len(longer)] == longer
            assert not Counter((a, tuple(b)) for a, b in found) - Counter((a, tuple(b)) for a, b in expected)
            lengths.update(length for length, _ in found)
    assert len(lengths) > (4 if size > 3 else 1)


def test_the_longest_match_counts_wherever_it_is() -> None:
    def propose(row: list[int], texts: Sequence[Sequence[int]]) -> list[int]:
        state: Any = SimpleNamespace(token_ids=torch.tensor([row], dtype=torch.int32), lengths=torch.tensor([len(row)]))
        plan = RoundPlan(
            0, (), (), np.zeros((0, 3), np.int32), (), np.zeros(1, np.int32), np.full(1, 3), np.zeros(1), 40
        )
        rule = SuffixRule(8, None, 0.0, 0.1)
        draft = SuffixDrafter(state, SuffixSearch(state, rule, sorted_corpus(texts, 8))).propose(plan, [])
        return draft.tokens[0, : int(draft.draft_lens[0])].tolist()

    assert propose([1, 2, 3], [[1, 2, 3, 4, 5], [9, 3, 7, 7]]) == [4, 5]
    assert propose([1, 2, 3], [[1, 2, 3], [5, 5, 6]]) == [], "nothing of the next text"
    assert propose([3, 8, 2, 3], [[2, 3, 4, 6, 7]]) == [4, 6, 7], "a longer match than its own"
    assert propose([2, 3, 8, 2, 3], [[9, 3, 4]]) == [8, 2, 3], "a shorter one"
    assert propose([3, 8, 5, 3], [[9, 3, 4, 4, 4]]) == [8, 5, 3], "its own, of places that say as much"
    assert propose([3, 8, 5, 3], [[9, 3, 4, 4, 4]] * 2) == [4, 4, 4], "what most places say, of equal matches"


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("corpus") / "target", seed=1, tokenizer=True)


def test_rows_and_texts_become_tokens(tmp_path: Path, target: Path) -> None:
    spelled = [token for text in ("ab", "cd") for token in (*_spell(target, text), -1)]
    rows = [{"prompt_token_ids": [1, 2], "token_ids": [3], "text": "never read"}, {"error": "refused"}, {"text": "ab"}]
    file = write_rows(tmp_path / "a.jsonl", [*rows, {"token_ids": [4]}, {"prompt": "a", "text": "b"}])
    assert read_corpus(file, target, VOCABULARY, 99).tolist() == [1, 2, 3, -1, *spelled[:3], 4, -1, *spelled[:3]]
    assert read_corpus(file, target, VOCABULARY, 2).tolist() == [1, 2]
    text = tmp_path / "a.txt"
    text.write_text("ab\ncd\n", encoding="utf-8")
    assert read_corpus(text, target, VOCABULARY, 99).tolist() == _spell(target, "ab\ncd\n")
    assert read_corpus(text, target, VOCABULARY, 3).tolist() == _spell(target, "ab\n")


def _spell(target: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(target / "tokenizer.json")).encode(text).ids
    return ids


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"", "give JSON lines, in a file that ends in .jsonl, or text, in one that ends in .txt"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"token_ids": [1]}\n{"a": 1}\n', "line 2: needs 'prompt_token_ids' or 'prompt'"),
        ("a.jsonl", b"{\n", "line 1: not valid JSON"),
        ("a.jsonl", b"[1]\n", "line 1: a row must be an object, not [1]"),
        ("a.jsonl", b'{"token_ids": ["a"]}\n', "line 1: 'token_ids' must be a list of token ids, not ['a']"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: 'text' must be a text, not 3"),
        ("a.jsonl", b'{"token_ids": [1, 260]}\n', "is another vocabulary's: it holds token 260"),
        ("a.jsonl", b'{"token_ids": [-1]}\n', "is another vocabulary's"),
        ("a.txt", b"a\xff\n", "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line_before_ranks_start(
    tmp_path: Path, target: Path, name: str, content: bytes, said: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    config = configuration(target, None, speculation={"method": "suffix", "suffix_corpus": str(file)})
    with pytest.raises(ConfigError) as caught:
        check_models(JobSpec(config))
    assert said in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_the_users_home_is_found(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write_rows(tmp_path / "home.jsonl", [{"token_ids": [4, 5]}])
    config = configuration(target, None, speculation={"method": "suffix", "suffix_corpus": "~/home.jsonl"})
    assert config.speculation.suffix_corpus == file


def test_a_missing_file_and_a_missing_tokenizer_are_told(tmp_path: Path) -> None:
    bare = make_checkpoint(tmp_path / "bare")
    for place, said in ((tmp_path / "no.txt", "no such file"), (tmp_path, "is no file: name a file of texts")):
        with pytest.raises(ConfigError, match=said):
            configuration(bare, None, speculation={"method": "suffix", "suffix_corpus": str(place)})
    file = write_rows(tmp_path / "a.jsonl", [{"text": "ab"}])
    with pytest.raises(ConfigError, match=r"holds text, and .* has no tokenizer"):
        make_llm(bare, speculation={"method": "suffix", "suffix_corpus": str(file)})
    write_rows(file, [{"token_ids": [1]}, {"token_ids": [2]}])
    with pytest.raises(ConfigError, match="holds no text of two tokens or more"):
        make_llm(bare, speculation={"method": "suffix", "suffix_corpus": str(file)})


@pytest.mark.parametrize("max_paths", [1, 2])
def test_texts_that_the_corpus_has_take_few_rounds_and_others_are_the_same(
    tmp_path: Path, target: Path, max_paths: int
) -> None:
    prompts = [prompt_of(length, seed=length) for length in (5, 30, 12, 21)]
    sampling = [SamplingParams(max_tokens=COUNT, seed=index, temperature=index % 2) for index in range(4)]
    with make_llm(target) as llm:
        expected = run_alone(llm, prompts, sampling)
    known = [{"prompt_token_ids": prompt, "token_ids": text} for prompt, (text,) in zip(prompts, expected, strict=True)]
    file = write_rows(tmp_path / "a.jsonl", known[:2])
    speculation = {"method": "suffix", "draft_len": 5, "max_paths": max_paths, "suffix_corpus": str(file)}
    with make_llm(target, speculation=speculation) as llm:
        outputs = llm.generate(prompts, sampling)
        llm.check_idle()
    assert tokens_of(outputs) == expected
    rounds = [output.completions[0].statistics.num_rounds for output in outputs]
    assert rounds[:2] == [COUNT // 6] * 2, "an answer that is in it, greedy or by seed, is drafted whole"


def test_its_memory_is_counted(tmp_path: Path, target: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"token_ids": [1, 2, 3] * 1000}])
    speculation = {"method": "suffix", "suffix_corpus": str(file), "suffix_corpus_max_tokens": 2000}

    def planned(**options: object) -> int:
        config = configuration(target, None, speculation={**speculation, **options})
        return sum(JobMemory.read(JobSpec(config)).shard_bytes(0))

    assert planned() - planned(suffix_corpus=None) == bytes_of_corpus(2000, 24)
    with make_llm(target, speculation=speculation) as llm:
        assert 0 <= planned() - llm.report.ranks[0].shard_bytes < 500
