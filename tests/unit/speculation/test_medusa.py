"""Medusa's heads: what they propose is what the paper says, from files of every layout; and no text depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from gpus import needs_gpu
from medusa_heads import LAYOUTS, SHARED, Heads, fitted, make_heads, ranked, write_heads
from own_drafters import hidden_states
from pipelines import Reference, configuration, make_llm, prompt_of, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.configuration.medusa_choices import ChoiceTree, named_choices, read_choices
from trtrun.core.nouns import Draft, HiddenStates, PrefillChunk, RoundPlan, RowAdmission, Step, Verdict
from trtrun.errors import ConfigError
from trtrun.kernels.triton.sampling import columns
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.drafters.medusa import MedusaDrafter
from trtrun.speculation.trees import last_nodes, path_tokens

COUNT = 40
TREE = [[0], [1], [0, 0], [2], [2, 0], [0, 1], [2, 0, 1], [0, 0, 0]]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"logprobs": 3},
    {"temperature": 0.5, "repetition_penalty": 0.9, "logprobs": 2},
    {"temperature": 0.2, "min_tokens": 30, "frequency_penalty": -0.5, "presence_penalty": 0.3},
    {"logit_bias": {7: 4.0, 9: -3.0}, "stop_token_ids": (11,)},
    {"temperature": 0.7, "n": 2},
]
PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33, 8, 5, 64, 17, 31)]
SAMPLING = [SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=index, **kind) for index, kind in enumerate(KINDS)]
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 200}


def medusa(**options: Any) -> dict[str, Any]:
    return {"method": "medusa", **options}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("medusa") / "target", seed=1)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[tuple[int, ...]]]:
    """The target's own texts."""
    with make_llm(target) as llm:
        return tokens_of(llm.generate(PROMPTS, SAMPLING))


@pytest.fixture(scope="module")
def heads(target: Path, plain: list[list[tuple[int, ...]]]) -> Heads:
    """Heads that know the texts by and large."""
    texts = [[*prompt, *text] for prompt, found in zip(PROMPTS, plain, strict=True) for text in found]
    return fitted(make_heads(target), target, texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, heads: Heads) -> Path:
    return write_heads(tmp_path_factory.mktemp("heads"), heads)


class Proposals:
    """What was proposed: of each row and round its text, temperature and seed, and its draft."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], float, int, list[int], int]] = []
        original = MedusaDrafter.propose

        def propose(drafter: MedusaDrafter, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
            draft = original(drafter, plan, probability_rows)
            state: Any = drafter.rows
            for index, row in enumerate(plan.decode_rows.tolist()):
                text = state.token_ids[row, : int(state.lengths[row])].tolist()
                temperature = float(state.sampling.numbers[row, columns.TEMPERATURE])
                seed = int(state.sampling.integers[row, columns.SEED])
                self.seen.append((text, temperature, seed, draft.tokens[index].tolist(), int(draft.draft_lens[index])))
            return draft

        patch.setattr(MedusaDrafter, "propose", propose)

    def check(self, target: Path, heads: Heads, tree: ChoiceTree) -> int:
        """Compare all of them with the heads in plain torch; returns how many drafts there were."""
        reference, count = Reference(target), 0
        for text, temperature, seed, tokens, draft_len in self.seen:
            if draft_len <= 0:
                continue
            state = hidden_states(reference, text[:-1])[-1:, -1]
            logits = heads.logits(state, reference.model.config.vocab_size)[0]
            best = ranked(logits[: tree.depth], tree.num_ranks, temperature, seed, len(text)).tolist()
            nodes = [node for node in tree.nodes if len(node) <= len(tree.nodes[len(tokens) - 1])]
            assert tokens == [best[len(node) - 1][node[-1]] for node in nodes]
            count += 1
        return count


@pytest.mark.parametrize(
    ("layout", "num_blocks", "biases", "choices"),
    [
        *((layout, 1, True, None) for layout in LAYOUTS),
        ("fasterdecoding", 3, True, TREE),
        ("vllm", 2, False, TREE),
        ("version 2", 2, True, None),
        ("modelopt", 0, True, None),
        ("fasterdecoding", 1, False, "mc_sim_7b_63"),
    ],
)
def test_drafts_are_the_papers_token_for_token(
    tmp_path: Path,
    target: Path,
    layout: str,
    num_blocks: int,
    biases: bool,
    choices: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy rows, and sampled ones with the target's random numbers; config.json lies about the heads."""
    own = make_heads(target, 4, num_blocks, biases=biases, shared=layout in SHARED)
    lies = {"medusa_num_heads": 2, "medusa_num_layers": 9, "num_heads": 1, "hidden_size": 5}
    path = write_heads(tmp_path / "heads", own, layout, target, **lies)
    seen = Proposals(monkeypatch)
    speculation = medusa() if choices is None else medusa(medusa_choices=choices)
    sampling = [SamplingParams(max_tokens=10, seed=index, temperature=1.1 * (index % 2)) for index in range(4)]
    with make_llm(target, heads=path, speculation=speculation, scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS[:4], sampling)
    tree = ChoiceTree.chain(4) if choices is None else ChoiceTree.of(read_choices(choices))
    assert seen.check(target, own, tree) > 20


def test_a_whole_model_drafts_from_its_own_directory(
    tmp_path: Path, target: Path, heads: Heads, plain: list[Any]
) -> None:
    whole = write_heads(tmp_path / "whole", heads, "whole model", target)
    with make_llm(whole, heads=whole, speculation=medusa(), scheduler=SCHEDULER) as llm:
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == plain
        assert llm.statistics()["num_accepted_draft_tokens"] > 100


def test_a_truncated_vocabulary_proposes_the_targets_ids(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sampled rows, too, with the random numbers of the target's ids."""
    whole = make_heads(target)
    token_map = torch.randperm(199, generator=torch.Generator().manual_seed(2))[:60]
    own = Heads(whole.blocks, [matrix[:60] for matrix in whole.matrices], token_map)
    path = write_heads(tmp_path / "heads", own, "vllm")
    seen = Proposals(monkeypatch)
    sampling = [SamplingParams(max_tokens=10, seed=index, temperature=1.1 * (index % 2)) for index in range(4)]
    with make_llm(target, heads=path, speculation=medusa(medusa_choices=TREE), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS[:4], sampling)
    assert seen.check(target, own, ChoiceTree.of(read_choices(TREE))) > 20
    proposed = {token for *_, tokens, draft_len in seen.seen if draft_len > 0 for token in tokens}
    assert proposed <= set(token_map.tolist()) and max(proposed) > 60


@pytest.mark.parametrize(
    ("dtype", "block_size", "plans_ahead", "choices"),
    [
        ("float32", 8, 0, None),
        ("float32", 2, 1, TREE),
        ("bfloat16", 16, 1, None),
        ("bfloat16", 16, 0, "mc_sim_7b_63"),
        ("bfloat16", 4, 1, TREE),
    ],
)
def test_texts_are_plain_decodings(
    target: Path, folder: Path, dtype: str, block_size: int, plans_ahead: int, choices: Any
) -> None:
    """Greedy and by seed, with penalties, bans, biases and log probabilities, in company, preempted, prefixes in use
    twice, prompts in chunks."""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "scheduler": {**SCHEDULER, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 112, "block_size": block_size},
    }
    with make_llm(target, **settings) as llm:
        expected = told(llm.generate(PROMPTS, SAMPLING))
    speculation = medusa() if choices is None else medusa(medusa_choices=choices)
    with make_llm(target, heads=folder, speculation=speculation, **settings) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        assert told(outputs) == expected
        assert told(llm.generate(PROMPTS, SAMPLING)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 200
        assert sum(one.statistics.num_preemptions for output in outputs for one in output.completions) > 0
        llm.check_idle()
        llm.set_speculation(False)
        assert told(llm.generate(PROMPTS, SAMPLING)) == expected


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


def test_sampled_rows_rank_with_the_targets_random_numbers(
    target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that ignore them are accepted less often."""
    sampling = [SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=1.0, seed=index) for index in range(8)]
    accepted = []
    for coupled in (True, False):
        if not coupled:
            monkeypatch.setattr(RowSampling, "rank", staticmethod(lambda processed, *_: processed.topk(_[-1]).indices))
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
    chunk = PrefillChunk(1, 2, 2, is_last=True, followed=False)
    # Row 0 has kept both tokens, row 2 none, row 1 has read the last of its prompt.
    drafter.observe(
        a_plan(decode=(0, 2), prefill=(chunk,)), verdict, Step(torch.empty(0), HiddenStates(state, [prompt]))
    )
    assert propose(0, 1, 2) == [[3, 4], [9, 10], [4, 5]]
    assert propose(0, 1, 2, dropped_rows=(1,), admissions=(admission(0),)) == [[], [], [4, 5]]
    half = PrefillChunk(0, 0, 2, is_last=False, followed=False)
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


def test_known_trees_are_those_of_the_reference() -> None:
    """Nodes by depth, and leaves, as medusa/model/medusa_choices.py has them."""
    counted = {}
    for name in named_choices():
        tree = ChoiceTree.of(read_choices(name))
        counted[name] = ([sum(len(node) == depth for node in tree.nodes) for depth in range(1, 5)], len(tree.paths))
    assert counted == {
        "mc_sim_7b_63": ([10, 28, 23, 2], 42),
        "vicuna_7b_stage1": ([10, 32, 20, 1], 44),
        "vicuna_7b_stage2": ([10, 23, 23, 7], 42),
        "vicuna_13b_stage1": ([10, 29, 23, 1], 44),
        "vicuna_13b_stage2": ([10, 19, 25, 9], 42),
        "vicuna_33b_stage1": ([10, 34, 19, 0], 46),
        "vicuna_33b_stage2": ([10, 24, 24, 5], 43),
        "zephyr_stage2": ([10, 27, 23, 3], 44),
    }


Change = Callable[[dict[str, torch.Tensor]], Any]


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def changed(**tensors: torch.Tensor) -> Change:
    return lambda found: found.update({name.replace("_", "."): value for name, value in tensors.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("2.1.weight"), "has 4 Medusa heads, but head 2 lacks the matrix: the files are incomplete"),
        (without("1.0.linear.weight", "1.0.linear.bias"), r"1\.1\.weight stands behind 1 blocks, but head 1 has 0"),
        (without("1.0.linear.weight", "1.1.weight"), r"1\.0\.linear\.bias is there, but no weight beside it"),
        (without("1.0.linear.bias"), "has biases of block 0 for some of its 4 Medusa heads alone"),
        (without("2.1.weight", "2.0.linear.weight", "2.0.linear.bias"), "has 4 Medusa heads, but head 2 lacks block 0"),
        (
            lambda found: found.update({"1.0.linear.weight": torch.zeros(64, 32)}),
            r"'1\.0\.linear\.weight' has shape \[64, 32\], not \[64, 64\]: the target's hidden size is 64",
        ),
        (
            lambda found: found.update({"3.1.weight": torch.zeros(200, 64)}),
            r"'3\.1\.weight' has shape \[200, 64\], not \[199, 64\]: it is for 199 tokens of the target's 199",
        ),
        (
            lambda found: found.update({"0.0.linear.weight_scale": torch.ones(1)}),
            "'0.0.linear.weight_scale' is none that Medusa heads have",
        ),
        (
            lambda found: found.update({"0.0.linear.weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn)}),
            "has dtype F8_E4M3, which is not supported",
        ),
        (lambda found: found.update({"99.0.linear.weight": torch.zeros(64, 64)}), "at most 64 heads and blocks"),
        (lambda found: found.update({"token_map": torch.arange(7)}), "it is for 7 tokens of token_map"),
        (lambda found: found.update({"token_map": torch.zeros(199)}), "must hold whole numbers"),
        (lambda found: found.update({"token_map": torch.arange(199) + 1}), "ids from 1 to 199, but the target has 199"),
        (lambda found: found.update({"token_map": torch.arange(199).clamp(max=9)}), "holds an id twice"),
        (lambda found: found.update({"2.1.weight": torch.full((199, 64), torch.nan)}), "NaN or infinite"),
        (lambda found: [found.clear(), found.update({"model.norm.weight": torch.ones(64)})], "has no Medusa heads"),
    ],
)
def test_files_that_are_no_heads_for_the_target_are_refused(
    tmp_path: Path, target: Path, change: Change, message: str
) -> None:
    from safetensors.torch import load_file, save_file

    path = write_heads(tmp_path / "heads", make_heads(target))
    file = path / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(Exception, match=message) as caught:
        make_llm(target, heads=path, speculation=medusa())
    assert "\n" not in str(caught.value) and "heads" in str(caught.value)


def test_pickles_are_refused_and_so_are_more_tokens_than_heads(tmp_path: Path, target: Path) -> None:
    path = write_heads(tmp_path / "heads", make_heads(target, 3))
    with pytest.raises(
        Exception, match=r"has 3 Medusa heads, and each drafts one token: set speculation\.draft_len to 3"
    ):
        make_llm(target, heads=path, speculation=medusa())
    with make_llm(target, heads=path, speculation=medusa(medusa_choices="mc_sim_7b_63", draft_len=3)) as llm:
        assert llm.config.draft_nodes == (0, 10, 38, 61)
    (path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(Exception, match=r"has no weights: neither medusa_lm_head.safetensors, model.safetensors nor"):
        make_llm(target, heads=path, speculation=medusa())
    (path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(Exception, match=r"only as pickle \(medusa_lm_head\.pt\).*save the heads as safetensors"):
        make_llm(target, heads=path, speculation=medusa())


def test_vllms_one_matrix_for_all_is_the_targets(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    own = make_heads(target, shared=True)
    path = write_heads(tmp_path / "heads", own, "vllm", original_lm_head=True)
    tensors = load_file(path / "model.safetensors")
    without(*(f"lm_heads.{head}.weight" for head in range(1, 4)))(tensors)
    save_file(tensors, path / "model.safetensors")
    seen = Proposals(monkeypatch)
    with make_llm(target, heads=path, speculation=medusa(), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=6))
    assert seen.check(target, own, ChoiceTree.chain(4)) > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"medusa_choices": "mc_sim_7b"}, "there is no tree 'mc_sim_7b' (did you mean 'mc_sim_7b_63'?)"),
        ({"medusa_choices": [[0], [0, 0], [1, 0]]}, "has [1, 0] without [1], which it goes through"),
        ({"medusa_choices": [[0], [1], [0]]}, "has [0] twice"),
        ({"medusa_choices": [[0], [-1]]}, "has the path [-1], but ranks are whole numbers"),
        (
            {"medusa_choices": [[0], [64]]},
            "has the path [64], but ranks are whole numbers from 0, the likeliest, to 63",
        ),
        ({"medusa_choices": [[0], []]}, "[] is no path"),
        ({"medusa_choices": 5}, "must be a list of paths of ranks"),
        ({"medusa_choices": [[rank % 60] for rank in range(129)]}, "has 129 paths"),
        ({"medusa_choices": [[0], [0, 0]], "draft_len": 3}, "draft_len is 3, but medusa_choices are 2 deep"),
        ({"use_logits": True}, "use_logits does not go with method medusa"),
        ({"prompt_lookup_max": 2}, "prompt_lookup_max is an option of method ngram"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(target, None, heads=target, speculation=medusa(**options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (None, "draft: missing, though speculation.method is medusa"),
        ({"devices": ["cpu:0"]}, "draft: devices does not go with a method with heads, which sit on the target's"),
        ({"modl": "x"}, "draft.modl: unknown key (did you mean 'model'?)"),
        ({"model": "nowhere"}, "draft.model: no such directory"),
    ],
)
def test_a_draft_section_of_heads_is_their_directory(target: Path, draft: Any, message: str) -> None:
    from trtrun.configuration.config import make_config

    section = draft if draft is None or "modl" in draft else {"model": str(target), **draft}
    values = {"target": {"model": str(target), "devices": ["cpu:0"]}, "speculation": medusa(), "draft": section}
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert message in str(caught.value)


def test_a_tree_counts_by_its_nodes(target: Path) -> None:
    """Paths share tokens: a round has room for 63 of a row, not for 42 paths of 4."""
    speculation = medusa(medusa_choices="mc_sim_7b_63")
    config = configuration(
        target, None, heads=target, speculation=speculation, scheduler={"max_batch_size": 2, "max_num_tokens": 128}
    )
    assert (config.draft_len, config.max_paths, config.draft_nodes) == (4, 42, (0, 10, 38, 61, 63))
    with pytest.raises(ConfigError, match=r"too small to verify 64 tokens of each of 2 rows.*medusa_choices"):
        configuration(
            target, None, heads=target, speculation=speculation, scheduler={"max_batch_size": 2, "max_num_tokens": 127}
        )
    chain = configuration(target, None, heads=target, speculation=medusa(medusa_choices=[[0, 0], [0]]))
    assert (chain.draft_len, chain.max_paths, chain.draft_nodes) == (2, 1, (0, 1, 2))


def test_heads_are_counted_with_the_targets_weights(target: Path, folder: Path) -> None:
    with make_llm(target) as llm:
        before = llm.report.ranks[0]
    with make_llm(target, heads=folder, speculation=medusa(draft_len=2)) as llm:
        after = llm.report.ranks[0]
    numbers = 2 * (64 * 64 + 64 + 199 * 64)
    assert after.shard_bytes - before.shard_bytes == after.bytes_read - before.bytes_read == 4 * numbers
    assert before.files_hash != after.files_hash


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
    texts = [[*prompt, *text] for prompt, found in zip(PROMPTS, plain, strict=True) for text in found]
    path = write_heads(tmp_path / "heads", fitted(make_heads(gpu_target), gpu_target, texts))
    speculation = medusa() if choices is None else medusa(medusa_choices=choices)
    with make_llm(gpu_target, heads=path, speculation=speculation, **settings) as llm:
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == plain
        assert_drafts(llm)


def assert_drafts(llm: LLM) -> None:
    assert llm.statistics()["num_accepted_draft_tokens"] > 100
