"""Bad words: both ways of finding them against the obvious one; and what they take is what they are long in all."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fronts import TOKENIZER
from sampling_reference import admission, seeded

from trtrun.api.prompts import PromptReader
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.nouns import RoundPlan, RowAdmission
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import NO_LISTS, TokenLists, TokenSequences
from trtrun.models.config import read_model_config
from trtrun.sampling import penalties as bad_words
from trtrun.sampling.penalties import BadWords
from trtrun.sampling.row_sampling import RowSampling
from trtrun.wire.plans import decode_plan, encode_plan

CPU = torch.device("cpu")
VOCAB = 9


def expected_bans(words: Sequence[Sequence[int]], text: Sequence[int], vocabulary: int) -> list[bool]:
    """Which tokens must not follow a text."""
    endings = [tuple(text[len(text) - size :]) for size in range(len(text) + 1)]
    banned = {word[-1] for word in words if tuple(word[:-1]) in endings}
    return [token in banned for token in range(vocabulary)]


@pytest.mark.parametrize("way", ["_ban_by_search_", "_ban_by_comparing_"])
def test_both_ways_find_what_a_text_ends_with(way: str) -> None:
    generator = random.Random(5)
    for _ in range(300):
        few = generator.choice((1, 2, 4))  # tokens, so that words are each other's endings
        words = [
            [generator.randrange(few) for _ in range(generator.randint(0, 5))] + [generator.randrange(VOCAB + 2)]
            for _ in range(generator.randint(1, 12))
        ]
        length, positions = generator.randint(1, 8), generator.randint(1, 4)
        row = [generator.randrange(few) for _ in range(length)]
        drafts = [generator.choice((-1, 2**40 + 1, *range(few))) for _ in range(positions - 1)]
        found = BadWords(TokenSequences.of(words), VOCAB, CPU)
        logits = torch.zeros(positions, VOCAB)
        getattr(found, way)(
            logits,
            torch.tensor([*row, *[1] * 6], dtype=torch.int32),  # anything behind its length
            torch.tensor(length),
            torch.tensor(drafts, dtype=torch.int64) if drafts else None,
        )
        for position in range(positions):
            wanted = expected_bans(words, row + drafts[:position], VOCAB)
            assert torch.isneginf(logits[position]).tolist() == wanted, (words, row, drafts, position)


def many_words(longest: int) -> list[list[int]]:
    """Two thousand short words, and one long one."""
    generator = random.Random(1)
    words = [[generator.randrange(3000) for _ in range(3)] for _ in range(2000)]
    return [*words, [generator.randrange(3000) for _ in range(longest)]]


def test_one_long_word_costs_its_length_and_not_that_of_all() -> None:
    words = many_words(40_000)
    num_tokens = sum(map(len, words))
    found = BadWords(TokenSequences.of(words), 3000, CPU)
    compared = sum(array.numel() for array in found._compared)
    assert compared <= 2 * num_tokens + 3 * len(words)
    assert sum(map(len, found._sorted.reversed_bytes)) <= 4 * num_tokens


class CountedBytes(bytes):
    """Counts how often anything is compared with them."""

    num_comparisons = 0

    def __lt__(self, other: bytes) -> bool:
        CountedBytes.num_comparisons += 1
        return bytes.__lt__(self, other)

    def startswith(self, *arguments: object) -> bool:
        CountedBytes.num_comparisons += 1
        return bytes.startswith(self, *arguments)  # type: ignore[arg-type]


def test_a_search_looks_at_few_of_many_words() -> None:
    words = many_words(3)
    found = BadWords(TokenSequences.of(words), 3000, CPU)._sorted
    text = CountedBytes(np.array(words[7][:-1][::-1], bad_words._TOKEN).tobytes())
    assert words[7][-1] in found.find(text)
    assert CountedBytes.num_comparisons <= 16


def test_words_that_are_all_each_others_endings() -> None:
    """The worst for the sorted list: each of them matches."""
    words = [[1] * size + [2 + size % 7] for size in range(1, 360)]
    found = BadWords(TokenSequences.of(words), VOCAB, CPU)
    for length in (1, 5, 400):
        ways = []
        for way in (found._ban_by_search_, found._ban_by_comparing_):
            logits = way(torch.zeros(1, VOCAB), torch.ones(400, dtype=torch.int32), torch.tensor(length), None)
            ways.append(torch.isneginf(logits)[0].tolist())
        assert ways[0] == ways[1] == expected_bans(words, [1] * length, VOCAB)


def reader() -> PromptReader:
    return PromptReader(read_model_config(ASSETS / "target"), TOKENIZER)


def test_words_that_no_text_can_hold_are_left_out() -> None:
    assert TOKENIZER is not None
    long_word = "".join(random.Random(3).choices("abcdefghijklmnopqrstuvwxyz", k=62_000))
    sampling = SamplingParams(bad_words=(long_word, "os.path.join", "os"), max_tokens=8, n=3)
    requests = list(reader().requests((5, 6), sampling, iter(range(9)).__next__, 4096))
    words = requests[0].lists.bad_words
    assert 0 < words.lengths.max() <= 10 and words.lengths.sum() < 40
    assert len(words) == len(TOKENIZER.bad_word_ids(["os.path.join", "os"]))
    assert all(request.lists is requests[0].lists for request in requests)
    short = reader().requests((5, 6), sampling, iter(range(9)).__next__, 3)
    assert next(short).lists.bad_words.lengths.max() <= 3


def test_sequences_within_a_length_and_a_vocabulary() -> None:
    sequences = TokenSequences.of([[1, 2, 3], [9], [1, 9], [4, 4]])
    kept = sequences.within(2, 9)
    assert kept.tokens.tolist() == [4, 4] and kept.lengths.tolist() == [2]
    assert sequences.within(3, 10) is sequences
    assert len(TokenSequences.of([]).within(1, 1)) == 0


def of_rows(count: int, lists: TokenLists) -> tuple[RowAdmission, ...]:
    """Rows as the completions of one prompt have them."""
    tokens = np.array([1, 2], dtype=np.int32)
    return tuple(RowAdmission(row, row, tokens, 2, 0, False, seeded(), lists) for row in range(count))


def long_lists() -> TokenLists:
    return TokenLists.of(range(3000), dict.fromkeys(range(3000), 1.5), many_words(50))


def test_rows_of_one_request_share_their_tables_and_what_travels() -> None:
    def plan(count: int, lists: TokenLists) -> RoundPlan:
        rows = np.zeros(0, dtype=np.int32)
        updates = np.zeros((0, 3), dtype=np.int32)
        return RoundPlan(0, (), of_rows(count, lists), updates, (), rows, rows, rows, 0)

    sizes = {
        (count, lists is NO_LISTS): len(encode_plan(plan(count, lists)))
        for count in (1, 32)
        for lists in (NO_LISTS, long_lists())
    }
    assert sizes[32, False] - sizes[1, False] == sizes[32, True] - sizes[1, True]
    sampling = RowSampling(64, 3000, "cpu")
    came = decode_plan(encode_plan(plan(32, long_lists()))).admissions
    sampling.admit(came)
    later = [RowAdmission(40, 40, came[0].tokens, 2, 0, False, seeded(), long_lists())]
    sampling.admit(later)  # the same words, from another plan
    assert len({id(steps.tables) for steps in sampling.steps([*range(32), 40])}) == 1
    for row in (*range(32), 40):
        sampling.drop(row)
    assert not sampling._tables._kept


def test_completions_are_made_without_going_through_the_lists_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(
        n=128, seed=2**63 - 2, stop_token_ids=range(4000), logit_bias=dict.fromkeys(range(4000), 1)
    )
    checks = []
    monkeypatch.setattr(SamplingParams, "_check_ranges", lambda self: checks.append(self))
    requests = list(reader().requests((5,), sampling, iter(range(128)).__next__, 100))
    assert not checks
    assert [request.sampling.seed for request in requests[:3]] == [2**63 - 2, 2**63 - 1, 0]
    assert {request.sampling.n for request in requests} == {1}
    assert all(request.sampling.logit_bias is sampling.logit_bias for request in requests)
    assert all(request.stop_ids is requests[0].stop_ids for request in requests)


def test_bans_follow_the_row_that_has_them() -> None:
    sampling = RowSampling(3, VOCAB, "cpu")
    sampling.admit([admission(0, [1, 2], seeded(), bad_word_ids=((2, 5),)), admission(1, [1, 2], seeded())])
    token_ids = torch.tensor([[1, 2, 0, 0], [1, 2, 0, 0], [0] * 4], dtype=torch.int32)
    out = sampling.process(torch.zeros(2, 1, VOCAB), [0, 1], torch.tensor([2, 2]), token_ids)
    assert torch.isneginf(out).nonzero().tolist() == [[0, 0, 5]]
    assert sampling.may_forbid_all([0, 1]) and not sampling.may_forbid_all([1])
    sampling.drop(0)
    assert not sampling.may_forbid_all([0, 1])
