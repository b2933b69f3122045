"""Lookahead decoding: what it proposes, as plain Python says it, and that nothing of a text depends on it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from lookups import COUNT, check_greedy, check_sampled
from mixed_rows import PROMPTS, mixed_sampling
from pipelines import configuration, make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.configuration.drafting.draft_trees import LOOKAHEAD_ROUNDS_KEPT, LookaheadSizes
from trtrun.core.nouns import Draft, RoundPlan, RowAdmission, Step
from trtrun.errors import ConfigError, InvalidRequestError
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.drafters import lookahead
from trtrun.speculation.drafters.lookahead import LookaheadDrafter
from trtrun.speculation.trees import path_tokens, verify_paths
from trtrun.speculation.verify import Verification

VOCABULARY = 13


def next_token(text: Sequence[int]) -> int:
    """A target that looks two tokens back."""
    return (3 * text[-1] + 5 * text[-2] + text[-1] * text[-2] // 4 + 1) % VOCABULARY


class Alone:
    """A group of one rank."""

    decides = True

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


class PlainRow:
    """One row's window, pool and text, by the paper's rules."""

    def __init__(self, text: list[int], sizes: LookaheadSizes, most: LookaheadSizes) -> None:
        self.text, self.sizes, self.most = text, sizes, most
        self.rounds: list[list[tuple[int, ...]]] = []
        self.window = self.fillers()

    def fillers(self) -> list[list[int]]:
        """Tokens of the text, by level and column of the largest window."""
        count, width = len(self.text), self.most.window
        return [
            [self.text[(count + 1 + level * width + column) * 7919 % count] for column in range(width)]
            for level in range(self.most.ngram)
        ]

    def candidates(self) -> list[list[int]]:
        """What followed the newest token in the text, the latest first, and what the pool has, the latest first."""
        newest, most = self.text[-1], 4 * self.most.verified
        behind = self.sizes.ngram - 1
        places = [place for place in range(len(self.text) - 1) if self.text[place] == newest][::-1]
        found = [self.text[place + 1 : place + 1 + behind] for place in places[:most]]
        pooled = [ngram[1:] for of_round in self.rounds[::-1] for ngram in of_round if ngram[0] == newest]
        found += [list(ngram) for ngram in pooled[:most]]
        kept: list[list[int]] = []
        for place, one in enumerate(found):
            others = [other for at, other in enumerate(found) if at < place or (at > place and len(other) > len(one))]
            if not any(other[: len(one)] == one for other in others):
                kept.append(one)
        return kept[: self.sizes.verified]

    def paths(self, most: int, draft_len: int) -> list[list[int]]:
        """Tokens along each path that is there, cut off at `most`: the columns that fit `draft_len` whole in the
        largest window, then candidates."""
        window, found = self.window, []
        num_columns = min(self.most.window, max(0, draft_len - self.most.ngram + 3))
        for column in range(num_columns):
            first = window[0][1 : min(column + 1, self.sizes.window)]
            own = [window[level][column] for level in range(1, self.sizes.ngram - 1)]
            path = first + (own if column < self.sizes.window else [])
            found.append(path[: max(0, most)])
        if self.most.ngram == 2:
            found = [path for path in found[-1:] if num_columns > 1]
        found += [one[: max(0, most)] for one in self.candidates()]
        missing = self.most.verified - len(self.candidates())
        return found + [[]] * missing

    def move(self, gained: Sequence[int], most: int, draft_len: int) -> None:
        """A round is over."""
        level, width = self.sizes.ngram - 2, self.most.window
        if not draft_len:
            self.text += gained
            self.window = self.fillers()
            return
        num_columns = min(width, max(0, draft_len - self.most.ngram + 3))
        window = [line[:] for line in self.window]
        window[0][0] = self.text[-1]
        ngrams, said = [], {}
        for column in range(min(num_columns, self.sizes.window)):
            if column + level <= most:
                before = self.text[:-1] + window[0][: column + 1]
                before += [window[deeper][column] for deeper in range(1, level + 1)]
                said[column] = next_token(before)
                ngrams.append((*[window[depth][column] for depth in range(level + 1)], said[column]))
        self.text += gained
        if num_columns:
            self.rounds = [*self.rounds, ngrams][-LOOKAHEAD_ROUNDS_KEPT:]
        fillers = self.fillers()
        window[level + 1] = [said.get(column, fillers[-1][column]) for column in range(width)]
        for depth in range(self.most.ngram - 1):
            for column in range(width):
                source = column + len(gained) - 1
                if source < self.sizes.window:
                    fillers[depth][column] = window[depth + 1][source]
        self.window = fillers


class Rows:
    """Rows of a target that is `next_token`, one of them with sizes of its own."""

    def __init__(self, texts: Sequence[list[int]], sizes: LookaheadSizes, own: LookaheadSizes) -> None:
        self.plain = [PlainRow(list(text), own if row == 1 else sizes, sizes) for row, text in enumerate(texts)]
        sampling = RowSampling(len(texts), VOCABULARY, "cpu")
        asked = [SamplingParams(seed=row, lookahead_config=own if row == 1 else ()) for row in range(len(texts))]
        empty = np.zeros(1, np.int32)
        self.admissions = tuple(RowAdmission(row, row, empty, 1, 0, False, one) for row, one in enumerate(asked))
        sampling.admit(list(self.admissions))
        token_ids = torch.zeros((len(texts), 400), dtype=torch.int32)
        lengths = torch.zeros(len(texts), dtype=torch.int64)
        self.state: Any = SimpleNamespace(token_ids=token_ids, lengths=lengths, sampling=sampling)
        self.drafter = LookaheadDrafter(self.state, Alone(), sizes)
        self._write()

    def _write(self) -> None:
        for row, plain in enumerate(self.plain):
            self.state.token_ids[row, : len(plain.text)] = torch.tensor(plain.text, dtype=torch.int32)
            self.state.lengths[row] = len(plain.text)

    def replace(self, row: int, text: list[int]) -> None:
        """Another request has the row."""
        old = self.plain[row]
        self.plain[row] = PlainRow(text, old.sizes, old.most)
        self._write()

    def play(self, lens: Sequence[int], admitted: Sequence[int]) -> tuple[list[list[list[int]]], list[int]]:
        """A round of all rows in reverse: the paths that were proposed, and how many tokens each row gained."""
        order = list(reversed(range(len(self.plain))))
        none, rows = np.zeros((0, 3), np.int32), np.array(order, np.int32)
        asked = np.array([lens[row] for row in order], np.int32)
        admissions = tuple(self.admissions[row] for row in admitted)
        plan = RoundPlan(0, (), admissions, none, (), rows, asked, np.zeros_like(rows), 400)
        self.drafter.begin_round(plan)
        draft = self.drafter.propose(plan, [])
        if draft.paths is None:
            assert draft.depth == 0
            nothing = torch.zeros((len(order), 1), dtype=torch.int64)
            draft = Draft(nothing, nothing[:, 0], paths=nothing.unsqueeze(2) - 1)
        logits = self._logits(draft, order)
        index = torch.tensor(order)
        verdict = verify_paths(
            Verification(logits, self.state.sampling, order, self.state.lengths[index], self.state.token_ids), draft
        )
        gained = [
            tokens[:count] for tokens, count in zip(verdict.tokens.tolist(), verdict.num_tokens.tolist(), strict=True)
        ]
        for row, tokens in zip(order, gained, strict=True):
            expected = self.plain[row].text[:]
            for token in tokens:
                expected.append(next_token(expected))
                assert token == expected[-1], "the target's own"
            self.plain[row].move(tokens, lens[row], max(lens))
        self._write()
        self.drafter.observe(plan, verdict, Step(logits))
        of_rows = zip(path_tokens(draft).tolist(), draft.path_lens().tolist(), strict=True)
        return [[p[:n] for p, n in zip(paths, counts, strict=True)] for paths, counts in of_rows], list(
            map(len, gained)
        )

    def _logits(self, draft: Draft, order: list[int]) -> torch.Tensor:
        assert draft.paths is not None
        logits = torch.zeros((len(order), draft.tokens.shape[1] + 1, VOCABULARY))
        for place, row in enumerate(order):
            text = self.plain[row].text
            logits[place, 0, next_token(text)] = 1
            for path in draft.paths[place].tolist():
                before = text[:]
                for node in path:
                    if node >= 0:
                        before.append(int(draft.tokens[place, node]))
                        logits[place, node + 1, next_token(before)] = 1
        return logits


@pytest.mark.parametrize(
    ("sizes", "own"),
    [
        ((4, 3, 4), (2, 3, 1)),
        ((3, 4, 2), (3, 2, 2)),
        ((2, 2, 1), (2, 2, 1)),
        ((5, 2, 3), (4, 2, 2)),
        ((2, 5, 3), (2, 3, 3)),
    ],
)
@pytest.mark.parametrize("positions", [1, 1 << 20])
def test_it_proposes_windows_and_ngrams_by_the_rules(
    sizes: tuple[int, int, int], own: tuple[int, int, int], positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead, "_MOST_POSITIONS", positions)
    chance, most = random.Random(sum(sizes)), LookaheadSizes(*sizes)
    rows = Rows([[1, 2], [3, 1, 1], [2, 2, 5, 7]], most, LookaheadSizes(*own))
    gained = []
    for place in range(50):
        lens = [most.depth if chance.random() < 0.7 else chance.randint(0, most.depth) for _ in rows.plain]
        lens = [0, 0, 0] if place % 17 == 8 else lens
        admitted = [] if place else [0, 1, 2]
        if place in (20, 30):
            admitted = [place // 10 - 2]
            rows.replace(admitted[0], rows.plain[admitted[0]].text[5:9])
        expected = [rows.plain[row].paths(lens[row], max(lens)) if any(lens) else [[]] for row in (2, 1, 0)]
        proposed, of_round = rows.play(lens, admitted)
        assert proposed == expected, (place, lens)
        gained += of_round
    assert sum(gained) > 1.3 * len(gained)


def test_memory_stays_bounded_with_many_rows_and_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    distinct = lookahead.distinct

    def watched(tokens: torch.Tensor, *rest: Any) -> Any:
        compared.append(tokens.shape[0] * tokens.shape[1] ** 2 * tokens.shape[2])
        return distinct(tokens, *rest)

    monkeypatch.setattr(lookahead, "distinct", watched)
    sizes = LookaheadSizes(2, 8, 32)
    rows = Rows([[1, 2 + row % 5] for row in range(60)], sizes, sizes)
    rows.play([sizes.depth] * 60, list(range(60)))
    assert len(compared) > 1 and max(compared) <= 1 << 24


def test_a_window_is_a_tree() -> None:
    tree = LookaheadSizes(3, 4, 2).tree(4)
    assert tree.paths == [[0, 1], [2, 3, 4], [2, 5, 6, 7], [8, 9, 10], [11, 12, 13]]
    assert LookaheadSizes(7, 7, 7).tree(11).num_nodes == 83, "TensorRT-LLM's max_draft_len"
    assert LookaheadSizes(3, 4, 2).tree(3).paths == [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]
    assert LookaheadSizes(3, 4, 2).tree(1).paths == [[0], [1]], "no column fits"
    for window in range(2, 7):
        for ngram in range(2, 6):
            sizes = LookaheadSizes(window, ngram, 3)
            for draft_len in range(1, sizes.depth + 1):
                tree = sizes.tree(draft_len)
                assert {node for path in tree.paths for node in path} == set(range(tree.num_nodes))
                assert max(map(len, tree.paths)) == draft_len
            assert tree.num_nodes == (window + 3) * (ngram - 1) - 1


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lookahead") / "target", seed=1, num_hidden_layers=2)


def speculation(*sizes: int, **options: Any) -> dict[str, Any]:
    return {"method": "lookahead", "lookahead_config": list(sizes), **options}


@pytest.mark.parametrize(("plans_ahead", "sizes"), [(0, (3, 3, 2)), (1, (4, 2, 3))])
def test_lossless_greedy_equals_transformers(target: Path, plans_ahead: int, sizes: tuple[int, ...]) -> None:
    check_greedy(target, speculation(*sizes), plans_ahead)


@pytest.mark.parametrize(("plans_ahead", "sizes"), [(1, (2, 4, 1))])
def test_sampled_output_is_the_targets_own_whatever_the_batch_and_who_is_preempted(
    target: Path, plans_ahead: int, sizes: tuple[int, ...]
) -> None:
    check_sampled(target, speculation(*sizes), plans_ahead)


def test_a_draft_that_has_room_for_one_ngram_alone_is_a_chain(target: Path) -> None:
    prompts, sampling = [prompt_of(9) * 3, prompt_of(30)], SamplingParams(max_tokens=COUNT)
    section = {"method": "lookahead", "lookahead_config": [2, 4, 1], "draft_len": 1}
    with make_llm(target) as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
    with make_llm(target, speculation=section) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 0


def test_texts_in_bfloat16_are_plain_decodings_with_sizes_and_drafts_of_requests_own(target: Path) -> None:
    sampling, scheduler = mixed_sampling(30), {"max_batch_size": 3, "max_num_tokens": 200}
    with make_llm(target, dtype="bfloat16") as llm:
        expected = tokens_of(llm.generate(PROMPTS, sampling))
    with make_llm(target, dtype="bfloat16", speculation=speculation(5, 4, 4), scheduler=scheduler) as llm:
        assert tokens_of(llm.generate(PROMPTS, sampling)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 20
        own = [(), (2, 2, 1), (5, 2, 4), (2, 4, 3), (3, 3, 3)]
        asked = [replace(one, lookahead_config=own[index % 5]) for index, one in enumerate(sampling)]
        asked[3] = replace(asked[3], draft_token_ids=(*expected[3][0][:12], 5, 5, 5))
        assert tokens_of(llm.generate(PROMPTS, asked)) == expected
        less = [replace(one, draft_len=index % 4) for index, one in enumerate(asked) if index != 3]
        prompts = [prompt for index, prompt in enumerate(PROMPTS) if index != 3]
        assert tokens_of(llm.generate(prompts, less)) == [one for index, one in enumerate(expected) if index != 3]
    paced = speculation(5, 4, 4, pacing="measured")
    with make_llm(target, dtype="bfloat16", speculation=paced, scheduler=scheduler) as llm:
        assert tokens_of(llm.generate(PROMPTS, sampling)) == expected


def accepted_of(target: Path, sampling: Sequence[SamplingParams], section: dict[str, Any]) -> int:
    with make_llm(target, speculation=section) as llm:
        llm.generate(PROMPTS[: len(sampling)], list(sampling))
        return llm.statistics()["num_accepted_draft_tokens"]


def test_larger_sizes_keep_more_and_a_requests_own_keep_less(target: Path) -> None:
    sampling = [SamplingParams(max_tokens=COUNT, ignore_eos=True) for _ in PROMPTS]
    small = [replace(one, lookahead_config=(2, 2, 1)) for one in sampling]
    large = accepted_of(target, sampling, speculation(6, 5, 6))
    own, least = (
        accepted_of(target, one, speculation(*sizes)) for one, sizes in ((small, (6, 5, 6)), (sampling, (2, 2, 1)))
    )
    assert large > 1.2 * own and own == least


def test_sampled_rows_guess_with_the_targets_random_numbers(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of rows whose guesses ignore them are right less often."""
    sampling = [SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(8)]
    section = speculation(8, 3, 1)
    coupled = accepted_of(target, sampling, section)

    def likeliest(*given: Any) -> torch.Tensor:
        rows, logits, level, depths = given[2], given[4], *given[5:]
        return logits[: len(rows)].argmax(dim=2).gather(1, torch.arange(depths.shape[1]) * 2 + level)

    monkeypatch.setattr(LookaheadDrafter, "_choose", likeliest)
    assert coupled > accepted_of(target, sampling, section)


def test_pools_are_counted(target: Path) -> None:
    sizes = LookaheadSizes(5, 4, 3)
    config = configuration(target, None, speculation=speculation(*sizes))
    drafter = Rows([[1, 2], [1, 2]], sizes, sizes).drafter
    held = [drafter._windows, drafter._pool.ngrams]
    counted = config.speculation.kept_bytes(1000, 2)
    assert counted == sum(one.numel() * one.element_size() for one in held)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"lookahead_config": [7, 7]}, "lookahead_config: must be [window size, n-gram size, verification set size]"),
        ({"lookahead_config": [1, 3, 3]}, "lookahead_config: the window size is 1: set it to 2 to 32"),
        ({"lookahead_config": [3, 17, 3]}, "lookahead_config: the n-gram size is 17: set it to 2 to 16"),
        ({"lookahead_config": [3, 3, 0]}, "lookahead_config: the verification set size is 0: set it to 1 to 32"),
        ({"draft_len": 5}, "draft_len is 5, but lookahead_config makes drafts of 4 tokens"),
        ({"lookahead_confg": [3, 3, 3]}, "unknown key (did you mean 'lookahead_config'?)"),
        ({"use_logits": True}, "speculation: use_logits does not go with method lookahead"),
        ({"method": "ngram", "lookahead_config": [3, 3, 3]}, "lookahead_config is an option of method lookahead, but"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(target, speculation={"method": "lookahead", **section})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ((5, 3, 2), r"lookahead_config is \[5, 3, 2\], more than speculation.lookahead_config, which is \[4, 3, 2\]"),
        ((1, 3, 2), "lookahead_config: the window size is 1: set it to 2 to 32"),
        ((3, 3), "lookahead_config must be a list of three whole numbers"),
        ("4 3 2", "lookahead_config must be a list of three whole numbers"),
    ],
)
def test_sizes_of_a_request_that_do_not_fit_are_refused(target: Path, own: Any, message: str) -> None:
    with (
        make_llm(target, speculation=speculation(4, 3, 2)) as llm,
        pytest.raises(InvalidRequestError, match=message),
    ):
        output = llm.generate([prompt_of(3)], SamplingParams(max_tokens=2, lookahead_config=own))[0]
        raise InvalidRequestError(str(output.error))


def test_sizes_of_a_request_need_the_method(target: Path) -> None:
    with make_llm(target, speculation={"method": "ngram"}) as llm:
        output = llm.generate([prompt_of(3)], SamplingParams(max_tokens=2, lookahead_config=(3, 3, 2)))[0]
    assert "lookahead_config is for speculation.method lookahead: leave it out" in str(output.error)
