"""Token Recycling: what it proposes, as plain Python says it, and that nothing of a text depends on it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from gpus import needs_gpu
from lookups import COUNT, check_greedy, check_sampled
from mixed_rows import PROMPTS, mixed_sampling
from pipelines import configuration, make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.configuration.medusa_choices import ChoiceTree
from trtrun.configuration.recycling_trees import recycling_tree
from trtrun.core.nouns import Draft, RoundPlan, RowAdmission, Step, Verdict
from trtrun.errors import ConfigError
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.drafters.token_recycling import SuccessorTable, TokenRecyclingDrafter
from trtrun.speculation.trees import path_tokens

VOCABULARY, TOP_K = 7, 3
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 2)]


class Alone:
    """A group of one rank."""

    decides = True

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


class Rows:
    """Rows that a test writes, and a drafter for them, beside what plain Python keeps of the target's logits."""

    def __init__(self, texts: Sequence[Sequence[int]], tree: ChoiceTree | None, temperature: float = 0.0) -> None:
        self.texts = [list(text) for text in texts]
        sampling = RowSampling(len(texts), VOCABULARY, "cpu")
        empty = np.zeros(1, np.int32)
        sampling.admit(
            [
                RowAdmission(row, row, empty, 1, 0, False, SamplingParams(seed=row, temperature=temperature))
                for row in range(len(texts))
            ]
        )
        token_ids = torch.zeros((len(texts), 300), dtype=torch.int32)
        self.state: Any = SimpleNamespace(
            token_ids=token_ids, lengths=torch.zeros(len(texts), dtype=torch.int64), sampling=sampling
        )
        self.table = SuccessorTable(VOCABULARY, TOP_K, torch.device("cpu"))
        self.drafter = TokenRecyclingDrafter(self.state, Alone(), self.table, tree)
        self.tree = tree
        self.known: dict[int, list[int]] = {}
        self._write()

    def _write(self) -> None:
        for row, text in enumerate(self.texts):
            self.state.token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
            self.state.lengths[row] = len(text)

    def expected(self, row: int, most: int, draft_len: int) -> list[list[int]]:
        """Tokens along each path that is there, cut off at `most`."""
        tree = ChoiceTree.chain(draft_len) if self.tree is None else self.tree.cut(draft_len)
        paths = []
        for path in tree.paths:
            token, found = self.texts[row][-1], []
            for node in path[: max(0, most)]:
                if token not in self.known:
                    break
                token = self.known[token][tree.nodes[node][-1]]
                found.append(token)
            paths.append(found)
        return paths

    def play(self, lens: Sequence[int], chance: random.Random) -> Draft:
        """A round of all rows in reverse, in which each gains some tokens of one of its paths and another."""
        order = list(reversed(range(len(self.texts))))
        none, rows = np.zeros((0, 3), np.int32), np.array(order, np.int32)
        asked = np.array([lens[row] for row in order], np.int32)
        plan = RoundPlan(0, (), (), none, (), rows, asked, np.zeros_like(rows), 300)
        draft = self.drafter.propose(plan, [])
        width = draft.tokens.shape[1] + 1
        logits = torch.rand(
            (len(order) + 1, width, VOCABULARY), generator=torch.Generator().manual_seed(len(self.texts[0]))
        )
        newest = [self.texts[row][-1] for row in order]
        gained = []
        for row in order:
            paths = self.expected(row, lens[row], max(0, *lens))
            path = chance.choice(paths)[: chance.randint(0, 3)] if paths else []
            gained.append([*path, chance.randrange(VOCABULARY)])
            self.texts[row] += gained[-1]
        self._write()
        counts = torch.tensor([*map(len, gained), 1])
        tokens = torch.full((len(order) + 1, width), -1)
        verdict = Verdict(counts, tokens)
        self.drafter.observe(plan, verdict, Step(logits))
        if max(lens) >= 0:
            self._learn(draft, newest, logits)
        return draft

    def _learn(self, draft: Draft, newest: list[int], logits: torch.Tensor) -> None:
        best = logits.sort(dim=2, descending=True).indices[:, :, :TOP_K].tolist()
        lens = draft.draft_lens.tolist()
        for row, first in enumerate(newest):
            if draft.paths is None:
                reached = set(range(lens[row]))
            else:
                reached = {node for path in draft.paths[row].tolist() for node in path[: lens[row]] if node >= 0}
            self.known[first] = best[row][0]
            for node in sorted(reached):
                self.known[int(draft.tokens[row, node])] = best[row][node + 1]


def paths_of(draft: Draft) -> list[list[list[int]]]:
    """Tokens along each path of each row."""
    if draft.paths is None:
        return [[row[:count]] for row, count in zip(draft.tokens.tolist(), draft.draft_lens.tolist(), strict=True)]
    of_rows = zip(path_tokens(draft).tolist(), draft.path_lens().tolist(), strict=True)
    return [[path[:count] for path, count in zip(paths, counts, strict=True)] for paths, counts in of_rows]


@pytest.mark.parametrize("tree", [None, ChoiceTree.of(TREE)], ids=["chain", "tree"])
def test_it_proposes_what_the_target_held_likely_last(tree: ChoiceTree | None) -> None:
    chance = random.Random(3)
    rows = Rows([[1, 2], [3], [2, 2, 5]], tree)
    found = set()
    for place in range(40):
        lens = [chance.randint(-1, 3) for _ in rows.texts]
        lens = {7: [-1, -1, -1], 9: [0, -1, 0]}.get(place, lens)
        expected = [rows.expected(row, lens[row], max(0, *lens)) for row in reversed(range(3))]
        proposed = paths_of(rows.play(lens, chance))
        if max(lens) < 1:
            proposed = expected = []
        assert proposed == expected
        found |= {len(path) for paths in proposed for path in paths}
        table = {token: line for token, line in enumerate(rows.table.tokens.tolist()) if line[0] >= 0}
        assert table == rows.known, place
    assert found == {0, 1, 2, 3}, "not known, cut off, and whole"


def test_of_a_token_that_comes_twice_the_last_counts_and_what_was_not_verified_does_not() -> None:
    table = SuccessorTable(5, 2, torch.device("cpu"))
    logits = torch.eye(5)[[0, 1, 2, 3]] + 0.1 * torch.eye(5)[[4, 4, 4, 4]]
    table.learn(torch.tensor([3, 3, 1, 9]), torch.tensor([True, True, False, True]), logits)
    assert table.tokens.tolist() == [[-1, -1]] * 3 + [[1, 4]] + [[-1, -1]]
    assert table.logits[3].tolist() == pytest.approx([1.0, 0.1])
    table.learn(torch.tensor([1, 3]), torch.tensor([True, True]), logits[2:])
    assert table.tokens[[1, 3]].tolist() == [[2, 4], [3, 4]]
    tokens, _ = table.follow(torch.tensor([[-1, 0, 1]]))
    assert tokens.tolist() == [[[-1, -1], [-1, -1], [2, 4]]]


def test_rows_whose_numbers_overflowed_leave_tokens_in_the_table() -> None:
    table = SuccessorTable(4, 3, torch.device("cpu"))
    logits = torch.tensor([[torch.nan] * 4, [torch.inf, -torch.inf, 0.0, torch.nan], [-torch.inf] * 4])
    table.learn(torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.bool), logits)
    assert bool(((table.tokens[:3] >= 0) & (table.tokens[:3] < 4)).all())


def test_sampled_rows_take_successors_as_the_target_would_choose_among_them() -> None:
    sampling = RowSampling(3, 50, "cpu")
    own = [SamplingParams(seed=4, temperature=0.9), SamplingParams(seed=5), SamplingParams(seed=6, temperature=0.3)]
    sampling.admit([RowAdmission(row, row, np.zeros(1, np.int32), 1, 0, False, one) for row, one in enumerate(own)])
    logits = torch.full((3, 50), -torch.inf)
    tokens = torch.tensor([[7, 3, 40, 2], [7, 3, 40, 2], [7, 3, 40, 2]])
    logits[:, [7, 3, 40, 2]] = torch.tensor([2.0, 1.5, 1.2, 1.0])
    changed = 0
    for place in range(30):
        places = torch.tensor([place, place + 3, place + 9])
        processed = sampling.process(logits.unsqueeze(1), [0, 1, 2], places, torch.zeros((3, 99), dtype=torch.int32))
        expected = sampling.rank(processed[:, 0], [0, 1, 2], places, 4)
        few = logits[:, [7, 3, 40, 2]].unsqueeze(1)
        found = sampling.rank_few(tokens.unsqueeze(1), few, [0, 1, 2], places)[:, 0]
        assert torch.equal(found, expected)
        changed += found[0, 0] != 7
    assert 5 < changed < 30


def test_trees_have_the_likeliest_nodes() -> None:
    tree = recycling_tree(3, 8, 12)
    assert len(tree.nodes) == 12 and tree.depth == 3 and (0, 0, 0) in tree.nodes and (0, 1) in tree.nodes
    assert all(node[:-1] in tree.nodes for node in tree.nodes if len(node) > 1)
    assert recycling_tree(4, 1, 9) == ChoiceTree.chain(4), "there are no more"
    assert recycling_tree(2, 3, 99).depth == 2 and len(recycling_tree(2, 3, 99).nodes) == 12
    assert max(rank for node in recycling_tree(2, 40, 200).nodes for rank in node) > 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("recycling") / "target", seed=1, num_hidden_layers=2)


def recycling(**options: Any) -> dict[str, Any]:
    return {"method": "token_recycling", **options}


@pytest.mark.parametrize(("plans_ahead", "nodes"), [(0, None), (1, 8)])
def test_lossless_greedy_equals_transformers(target: Path, plans_ahead: int, nodes: int | None) -> None:
    check_greedy(target, recycling(token_recycling_nodes=nodes), plans_ahead)


@pytest.mark.parametrize(("plans_ahead", "nodes"), [(1, 11)])
def test_sampled_output_is_the_targets_own_whatever_the_batch_and_who_is_preempted(
    target: Path, plans_ahead: int, nodes: int | None
) -> None:
    check_sampled(target, recycling(token_recycling_nodes=nodes), plans_ahead)


def test_texts_in_bfloat16_are_plain_decodings(target: Path) -> None:
    sampling, texts = mixed_sampling(30), []
    for speculation in ({}, recycling(token_recycling_nodes=20)):
        scheduler = {"max_batch_size": 3, "max_num_tokens": 200}
        with make_llm(target, dtype="bfloat16", speculation=speculation, scheduler=scheduler) as llm:
            texts.append(tokens_of(llm.generate(PROMPTS, sampling)))
            accepted = llm.statistics()["num_accepted_draft_tokens"]
    assert texts[0] == texts[1] and accepted > 20


def test_a_tree_keeps_more_than_a_chain_and_what_a_request_brings_is_proposed_first(target: Path) -> None:
    rounds = {}
    for nodes in (None, 40):
        with make_llm(target, speculation=recycling(draft_len=3, token_recycling_nodes=nodes)) as llm:
            (text,) = tokens_of(llm.generate([prompt_of(9)], SamplingParams(max_tokens=COUNT)))[0]
            llm.reset_statistics()
            asked = [SamplingParams(max_tokens=COUNT, seed=seed, temperature=0.7) for seed in range(4)]
            llm.generate([prompt_of(9)] * 4, asked)
            rounds[nodes] = llm.statistics()["num_accepted_draft_tokens"]
            llm.reset_statistics()
            given = SamplingParams(max_tokens=COUNT, draft_token_ids=text)
            output = llm.generate([prompt_of(9)], given)[0].completions[0]
            assert output.token_ids == text and output.statistics.num_rounds == COUNT // 4
    assert rounds[40] > 1.1 * rounds[None]


def test_the_table_is_counted(target: Path) -> None:
    config = configuration(target, None, speculation=recycling(token_recycling_top_k=16))
    table = SuccessorTable(1000, 16, torch.device("cpu"))
    held = sum(one.numel() * one.element_size() for one in vars(table).values() if isinstance(one, torch.Tensor))
    views = sum(one.numel() * one.element_size() for one in (table.tokens, table.logits))
    assert config.speculation.kept_bytes(1000, 4) == held - views


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"token_recycling_top": 3}, "unknown key (did you mean 'token_recycling_top_k'?)"),
        ({"token_recycling_top_k": 65}, "token_recycling_top_k: must be less than or equal to 64"),
        ({"token_recycling_nodes": 3}, "token_recycling_nodes is 3, but draft_len 4: set it to that or more"),
        ({"token_recycling_nodes": 257}, "token_recycling_nodes: must be less than or equal to 256"),
        ({"use_logits": True}, "speculation: use_logits does not go with method token_recycling"),
        ({"max_paths": 3}, "max_paths is an option of method ngram and suffix, but the method is token_recycling"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(target, speculation=recycling(**section))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_more_successors_than_tokens_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "small", seed=1, num_hidden_layers=1, vocab_size=9)
    with pytest.raises(ConfigError, match="token_recycling_top_k is 20, but the target has 9 tokens"):
        make_llm(path, speculation=recycling(token_recycling_top_k=20))


@needs_gpu
@pytest.mark.parametrize(
    "speculation",
    [recycling(), recycling(token_recycling_nodes=40), {"method": "lookahead", "lookahead_config": [5, 4, 4]}],
    ids=["chain", "tree", "lookahead"],
)
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_texts_are_plain_decodings_on_a_gpu(tmp_path: Path, cuda_graphs: bool, speculation: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path / "gpu target", seed=1, head_dim=64, max_position_embeddings=2048)
    sampling, texts = mixed_sampling(40), []
    settings: dict[str, Any] = {
        "devices": ((), ("cuda:0",)),
        "dtype": "bfloat16",
        "cuda_graphs": cuda_graphs,
        "scheduler": {"max_batch_size": 6, "max_num_tokens": 512},
    }
    for section in ({}, speculation):
        with make_llm(path, speculation=section, **settings) as llm:
            texts.append(tokens_of(llm.generate(PROMPTS, sampling)))
            statistics = llm.statistics()
    assert texts[0] == texts[1] and statistics["num_accepted_draft_tokens"] > 20
    assert statistics["num_captures"] == statistics["num_compilations"] == 0
