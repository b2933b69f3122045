"""Medusa's heads in whole runs: no text depends on them, whatever the row, the batch and the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from gpus import needs_gpu
from medusa_heads import Heads, fitted, make_heads, medusa, write_heads
from mixed_rows import PROMPTS, WITH_TEXTS, check_texts, mixed_sampling, plain_tokens, whole_texts
from pipelines import make_llm, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.core.nouns import Draft, HiddenStates, PrefillChunk, RoundPlan, RowAdmission, Step, Verdict
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.drafters import medusa as medusa_drafter
from trtrun.speculation.drafters.medusa import MedusaDrafter
from trtrun.speculation.trees import last_nodes, path_tokens

COUNT = 40
TREE = [[0], [1], [0, 0], [2], [2, 0], [0, 1], [2, 0, 1], [0, 0, 0]]
SAMPLING = mixed_sampling(COUNT)
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 200}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("medusa") / "target", seed=1)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[tuple[int, ...]]]:
    """The target's own texts."""
    return plain_tokens(target, SAMPLING)


@pytest.fixture(scope="module")
def heads(target: Path, plain: list[list[tuple[int, ...]]]) -> Heads:
    """Heads that know the texts by and large."""
    return fitted(make_heads(target), target, whole_texts(plain))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, heads: Heads) -> Path:
    return write_heads(tmp_path_factory.mktemp("heads"), heads)


def test_a_whole_model_drafts_from_its_own_directory(
    tmp_path: Path, target: Path, heads: Heads, plain: list[Any]
) -> None:
    whole = write_heads(tmp_path / "whole", heads, "whole model", target)
    with make_llm(whole, heads=whole, speculation=medusa(), scheduler=SCHEDULER) as llm:
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == plain
        assert llm.statistics()["num_accepted_draft_tokens"] > 100


@pytest.mark.parametrize(
    ("dtype", "block_size", "plans_ahead", "options"),
    [
        ("float32", 8, 1, WITH_TEXTS),
        ("float32", 2, 1, {"medusa_choices": TREE}),
        ("bfloat16", 16, 0, {"medusa_choices": "mc_sim_7b_63"}),
    ],
)
def test_texts_are_plain_decodings(
    target: Path, folder: Path, dtype: str, block_size: int, plans_ahead: int, options: dict[str, Any]
) -> None:
    """Greedy and by seed, with penalties, bans, biases and log probabilities, in company, preempted, prefixes in use
    twice, prompts in chunks."""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "scheduler": {**SCHEDULER, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 112, "block_size": block_size},
    }
    check_texts(
        target,
        folder,
        medusa(**options),
        settings,
        SAMPLING,
        least_accepted=200,
        with_texts=options == WITH_TEXTS,
        told=told,
    )


def told(outputs: Sequence[Any]) -> list[Any]:
    """Tokens and log probabilities, which are rounded, as the last bits depend on a token's company."""
    logprobs = [
        [(token, round(value, 3)) for token, value in ((entry.token_id, entry.logprob), *entry.alternatives)]
        for output in outputs
        for completion in output.completions
        for entry in completion.logprobs or ()
    ]
    return [tokens_of(outputs), logprobs]


def test_a_tree_keeps_more_than_a_chain_and_heads_more_than_chance(tmp_path: Path, target: Path, folder: Path) -> None:
    accepted = {}
    chance = write_heads(tmp_path / "chance", make_heads(target))
    for name, path, speculation in (
        ("chance", chance, medusa()),
        ("chain", folder, medusa()),
        ("tree", folder, medusa(medusa_choices="mc_sim_7b_63")),
    ):
        with make_llm(target, heads=path, speculation=speculation, scheduler=SCHEDULER) as llm:
            llm.generate(PROMPTS, SAMPLING)
            accepted[name] = llm.statistics()["num_accepted_draft_tokens"] / llm.statistics()["num_rounds"]
    assert accepted["tree"] > 1.1 * accepted["chain"] and accepted["chain"] > 5 * accepted["chance"]


@pytest.mark.parametrize("penalty", [1.0, 1.02], ids=["at once", "in turn"])
def test_sampled_rows_rank_with_the_targets_random_numbers(
    target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, penalty: float
) -> None:
    """Drafts that ignore them are accepted less often; so where a choice looks at the tokens before it."""
    own = {"ignore_eos": True, "temperature": 1.0, "repetition_penalty": penalty}
    sampling = [SamplingParams(max_tokens=COUNT, seed=index, **own) for index in range(8)]
    accepted = []
    for coupled in (True, False):
        if not coupled:
            likeliest = lambda found, count: found.processed[:, 0].topk(count).indices  # noqa: E731
            monkeypatch.setattr(medusa_drafter, "_best", likeliest)
        with make_llm(target, heads=folder, speculation=medusa(), scheduler=SCHEDULER) as llm:
            llm.generate(PROMPTS, sampling)
            accepted.append(llm.statistics()["num_accepted_draft_tokens"])
    assert accepted[0] > accepted[1]


@pytest.mark.parametrize("choices", [None, TREE])
def test_stop_sequences_and_drafts_that_came_with_requests(target: Path, folder: Path, choices: Any) -> None:
    """A draft that comes with a request is proposed in the heads' place, and heads go on where it ends or is left."""
    asked = [
        SamplingParams(max_tokens=COUNT, seed=index, temperature=0.9 * (index % 2)) for index in range(len(PROMPTS))
    ]
    with make_llm(target) as llm:
        texts = tokens_of(llm.generate(PROMPTS, asked))
        stopping = [
            SamplingParams(max_tokens=COUNT, seed=index, temperature=0.9 * (index % 2), stop_sequences=(text[20:22],))
            for index, (text,) in enumerate(texts)
        ]
        stopped = tokens_of(llm.generate(PROMPTS, stopping))
    assert any(len(text) < COUNT for (text,) in stopped)
    speculation = medusa() if choices is None else medusa(medusa_choices=choices)
    scheduler = {"max_batch_size": 8, "max_num_tokens": 400}
    with make_llm(target, heads=folder, speculation=speculation, scheduler=scheduler) as llm:
        assert tokens_of(llm.generate(PROMPTS, stopping)) == stopped
        llm.reset_statistics()
        given = [
            replace(one, draft_token_ids=(*text[:30], 5, *text[31:])) for one, (text,) in zip(asked, texts, strict=True)
        ]
        assert tokens_of(llm.generate(PROMPTS, given)) == texts
        with_drafts = llm.statistics()
        llm.reset_statistics()
        assert tokens_of(llm.generate(PROMPTS, asked)) == texts
        assert with_drafts["num_rounds"] < llm.statistics()["num_rounds"]


def test_pacing_drafts_less_of_a_tree_and_changes_no_text(target: Path, folder: Path, plain: list[Any]) -> None:
    speculation = medusa(medusa_choices="mc_sim_7b_63", pacing="measured")
    with make_llm(target, heads=folder, speculation=speculation, scheduler=SCHEDULER) as llm:
        assert llm.config.is_paced
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == plain
    own = [replace(one, draft_len=index % 5) for index, one in enumerate(SAMPLING)]
    speculation = medusa(medusa_choices="mc_sim_7b_63")
    with make_llm(target, heads=folder, speculation=speculation, scheduler={**SCHEDULER, "max_batch_size": 2}) as llm:
        assert tokens_of(llm.generate(PROMPTS, own)) == plain


class StillHeads:
    """Heads that say token 10 h + rank of each state's first number, for rows that a test writes."""

    num_heads, hidden_size, dtype = 3, 2, torch.float32

    def __init__(self) -> None:
        self.asked: list[list[float]] = []

    def logits(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        self.asked.append(hidden[:, 0].tolist())
        return torch.zeros((len(hidden), count, 40)).scatter_(
            2, (hidden[:, :1].long() + torch.arange(count)).unsqueeze(2), 1.0
        )

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


def a_plan(*, decode: Sequence[int] = (), draft_len: int = 2, **more: Any) -> RoundPlan:
    rows = np.array(decode, dtype=np.int32)
    lens, none = np.full_like(rows, draft_len), np.zeros((0, 3), np.int32)
    fields = {"dropped_rows": (), "admissions": (), "prefill": (), **more}
    return RoundPlan(
        0, block_updates=none, decode_rows=rows, draft_lens=lens, catch_up=np.zeros_like(rows), max_context=9, **fields
    )


def test_a_row_whose_state_is_not_known_proposes_nothing() -> None:
    sampling = RowSampling(3, 40, "cpu")
    rows: Any = SimpleNamespace(
        token_ids=torch.zeros((3, 12), dtype=torch.int32), lengths=torch.full((3,), 4), sampling=sampling
    )
    heads = StillHeads()
    drafter = MedusaDrafter(SimpleNamespace(rows=rows), heads, None)  # type: ignore[arg-type]

    def admission(row: int) -> RowAdmission:
        return RowAdmission(row, row, np.zeros(4, np.int32), 4, 0, False, SamplingParams(seed=1))

    def propose(*decode: int, **more: Any) -> list[list[int]]:
        plan = a_plan(decode=decode, **more)
        drafter.begin_round(plan)
        draft = drafter.propose(plan, [])
        return [row[:count] for row, count in zip(draft.tokens.tolist(), draft.draft_lens.tolist(), strict=True)]

    sampling.admit([admission(row) for row in range(3)])
    assert propose(0, 2, admissions=tuple(admission(row) for row in range(3))) == [[], []]
    state = torch.tensor([[[[1.0, 0]], [[2.0, 0]], [[3.0, 0]]], [[[4.0, 0]], [[5.0, 0]], [[6.0, 0]]]])
    verdict = Verdict(torch.tensor([3, 1, 1]), torch.full((3, 3), 7))
    prompt = torch.tensor([[[8.0, 0]], [[9.0, 0]]])
    chunk = PrefillChunk(1, 2, 2, is_last=True, has_draft_kv=False)
    # Row 0 has kept both tokens, row 2 none, row 1 has read the last of its prompt.
    drafter.observe(
        a_plan(decode=(0, 2), prefill=(chunk,)), verdict, Step(torch.empty(0), HiddenStates(state, [prompt]))
    )
    assert propose(0, 1, 2) == [[3, 4], [9, 10], [4, 5]]
    assert propose(0, 1, 2, dropped_rows=(1,), admissions=(admission(0),)) == [[], [], [4, 5]]
    half = PrefillChunk(0, 0, 2, is_last=False, has_draft_kv=False)
    drafter.propose(a_plan(), [])
    drafter.observe(a_plan(prefill=(half,)), None, Step(torch.empty(0), HiddenStates(state[:0], [prompt])))
    assert propose(0, 2) == [[], [4, 5]], "a prompt that is not read yet"
    asked = len(heads.asked)
    assert propose(2, draft_len=0) == [[]] and len(heads.asked) == asked


def test_the_node_behind_which_a_row_gained_its_last_token() -> None:
    paths = torch.tensor([[[0, 1, -1], [0, 3, 4]], [[4, 3, 2], [0, -1, -1]], [[0, 1, 2], [3, -1, -1]]])
    draft = Draft(
        torch.tensor([[5, 6, 7, 6, 9], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]), torch.tensor([3, 3, 3]), paths=paths
    )
    tokens = torch.tensor([[5, 6, 9, 8], [1, 9, -1, -1], [7, -1, -1, -1]])
    verdict = Verdict(torch.tensor([4, 2, 1]), tokens)
    assert last_nodes(draft, verdict).tolist() == [5, 1, 0]
    chain = Draft(torch.zeros((3, 3), dtype=torch.int64), torch.tensor([3, 3, 3]))
    assert last_nodes(chain, verdict).tolist() == [3, 1, 0]
    assert path_tokens(draft)[0, 1].tolist() == [5, 6, 9]


@pytest.fixture
def gpu_target(tmp_path: Path) -> Iterator[Path]:
    yield make_checkpoint(tmp_path / "gpu target", seed=1, head_dim=64, max_position_embeddings=2048)


@needs_gpu
@pytest.mark.parametrize("choices", [None, "mc_sim_7b_63"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_texts_are_plain_decodings_on_a_gpu(tmp_path: Path, gpu_target: Path, cuda_graphs: bool, choices: Any) -> None:
    settings: dict[str, Any] = {
        "devices": ((), ("cuda:0",)),
        "dtype": "bfloat16",
        "cuda_graphs": cuda_graphs,
        "scheduler": {"max_batch_size": 6, "max_num_tokens": 512},
    }
    with make_llm(gpu_target, **settings) as llm:
        plain = tokens_of(llm.generate(PROMPTS, SAMPLING))
    texts = whole_texts(plain)
    path = write_heads(tmp_path / "heads", fitted(make_heads(gpu_target), gpu_target, texts))
    speculation = medusa() if choices is None else medusa(medusa_choices=choices)
    with make_llm(gpu_target, heads=path, speculation=speculation, **settings) as llm:
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == plain
        assert_drafts(llm)


def assert_drafts(llm: LLM) -> None:
    assert llm.statistics()["num_accepted_draft_tokens"] > 100
