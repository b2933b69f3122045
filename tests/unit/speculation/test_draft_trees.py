"""Draft trees: texts and log probabilities are plain decoding's to the bit, whatever the trees are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from branching import MAX_PATHS, Branching, branching_method
from checkpoints import make_checkpoint
from gpus import needs_gpu
from pipelines import Reference, make_llm, prompt_of, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.core.nouns import Draft, RowAdmission, Verdict
from trtrun.core.outputs import RequestOutput
from trtrun.errors import ConfigError
from trtrun.sampling import filters as pieces
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.trees import accepted_paths, path_tokens, verify_paths
from trtrun.speculation.verify import Verification, verify

COUNT = 40
DRAFT_LEN = 4
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"logprobs": 3},
    {"temperature": 0.5, "repetition_penalty": 0.9, "logprobs": 2},
    {"temperature": 0.2, "min_tokens": 30, "frequency_penalty": -0.5, "presence_penalty": 0.3},
    {"logit_bias": {7: 4.0, 9: -3.0}, "stop_token_ids": (11,)},
]
PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33, 8, 5, 64, 17, 31)]
SAMPLING = [
    SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=index, **KINDS[index % len(KINDS)])
    for index in range(len(PROMPTS))
]


@pytest.fixture(autouse=True)
def method() -> Iterator[type[Branching]]:
    with branching_method() as found:
        yield found


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Tokens and log probabilities. These are rounded: in float32 a token's bits depend on its company, and in
    bfloat16 the last bit of a sum over the vocabulary does."""
    logprobs = [
        [(token, round(value, 3)) for token, value in ((entry.token_id, entry.logprob), *entry.alternatives)]
        for output in outputs
        for completion in output.completions
        for entry in completion.logprobs or ()
    ]
    return [tokens_of(outputs), logprobs]


def plain_and_branching(
    target: Path, prompts: Sequence[list[int]] = PROMPTS, sampling: Sequence[SamplingParams] = SAMPLING, **settings: Any
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """What plain decoding tells, what trees tell, and statistics of the trees."""
    with make_llm(target, None, **settings) as llm:
        plain = llm.generate(prompts, sampling)
    Branching.texts = [
        [*prompt, *tokens] for prompt, of_prompt in zip(prompts, tokens_of(plain), strict=True) for tokens in of_prompt
    ]
    speculation = {"method": "branching", "draft_len": DRAFT_LEN}
    with make_llm(target, None, speculation=speculation, **settings) as llm:
        outputs = [llm.generate(prompts, sampling) for _ in range(2)]
        completions = [completion for one in outputs for output in one for completion in output.completions]
        preempted = sum(completion.statistics.num_preemptions for completion in completions)
        found, statistics = list(map(told, outputs)), {**llm.statistics(), "num_preempted": preempted}
        llm.check_idle()
    assert found[0] == found[1], "blocks that are used again hold what was accepted"
    return told(plain), found[0], statistics


SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 100}


@pytest.mark.parametrize(
    ("dtype", "block_size", "plans_ahead"),
    [("float32", 2, 1), ("bfloat16", 16, 1), ("bfloat16", 4, 0)],
)
def test_texts_are_plain_decodings_for_random_trees(
    tmp_path: Path, dtype: str, block_size: int, plans_ahead: int, method: type[Branching]
) -> None:
    """Greedy and sampled, with penalties, bans, biases and log probabilities, rows that are preempted, prompts beside
    them, on torch (float32, and blocks of four) and on the kernels of CPUs (bfloat16)."""
    target = make_checkpoint(tmp_path / "target", seed=1)
    scheduler = {**SCHEDULER, "plans_ahead": plans_ahead}
    cache = {"max_tokens": 112, "block_size": block_size}
    plain, found, statistics = plain_and_branching(target, dtype=dtype, scheduler=scheduler, kv_cache=cache)
    assert found == plain
    assert statistics["num_preempted"] > 0
    assert statistics["num_accepted_draft_tokens"] > 200
    assert min(method.num_trees, method.num_shared, method.num_duplicates, method.num_full) > 30


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM"])
def test_depth_decides_what_a_sliding_window_shows(tmp_path: Path, architecture: str) -> None:
    windows = {"sliding_window": 9, "use_sliding_window": True}
    target = make_checkpoint(tmp_path / "target", architecture, seed=2, **windows)
    plain, found, statistics = plain_and_branching(target, scheduler=SCHEDULER, kv_cache={"block_size": 4})
    assert found == plain and statistics["num_accepted_draft_tokens"] > 200


def test_greedy_texts_are_transformers(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1)
    reference = Reference(target)
    expected = [[reference.greedy(prompt, COUNT)] for prompt in PROMPTS]
    sampling = [SamplingParams(max_tokens=COUNT)] * len(PROMPTS)
    _, found, _ = plain_and_branching(target, sampling=sampling, scheduler=SCHEDULER)
    assert found[0] == expected


def test_rows_whose_numbers_are_none_leave_nothing_behind(tmp_path: Path) -> None:
    """Blocks of paths that held no numbers are read by the kernels of CPUs, multiplied by 0."""
    target = make_checkpoint(tmp_path / "target", seed=1)
    with make_llm(target, None, scheduler=SCHEDULER) as llm:
        plain = tokens_of(llm.generate(PROMPTS, SAMPLING))
    Branching.texts = [[*prompt, *tokens] for prompt, (tokens,) in zip(PROMPTS, plain, strict=True)]
    with make_llm(target, None, speculation={"method": "branching"}, scheduler=SCHEDULER) as llm:
        poison(llm)
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == plain


def poison(llm: LLM) -> None:
    """Fill the blocks of paths with NaN, as a row that overflowed would, and have the engine know that one did."""
    engine: Any = llm.engine.orchestrator._ranks._worker.target  # type: ignore[attr-defined]
    next(engine._store.parts())[0][:, :, engine._forwards.paths._blocks.flatten()] = float("nan")
    engine._model.has_overflowed = True


def test_the_path_that_a_row_goes_on_with_is_what_it_gained() -> None:
    tokens = torch.tensor([[5, 6, 7, 6, 9], [1, 2, 3, 4, 5]])
    paths = torch.tensor([[[0, 1, -1], [0, 3, 4], [2, -1, -1]], [[4, 3, 2], [0, -1, -1], [-1, -1, -1]]])
    draft = Draft(tokens, torch.tensor([3, 3]), paths=paths)
    assert draft.path_lens().tolist() == [[2, 3, 1], [3, 1, 0]]
    for gained, expected in ([5, 6, 9, 8], 1), ([5, 6, 8, -1], 0), ([7, 8, -1, -1], 2), ([8, -1, -1, -1], 0):
        verdict = Verdict(
            torch.tensor([sum(token >= 0 for token in gained), 2]), torch.tensor([gained, [1, 9, -1, -1]])
        )
        assert accepted_paths(draft, verdict).tolist() == [expected, 1]
    short = Draft(tokens, torch.tensor([1, -1]), paths=paths)
    assert short.path_lens().tolist() == [[1, 1, 1], [0, 0, 0]], "a tree is cut off where its row's draft is"


@pytest.mark.parametrize(
    "kinds",
    [
        [{}],
        [{"temperature": 0.9}, {}],
        [{"temperature": 0.9, "top_k": 9, "top_p": 0.9, "logprobs": 2}],
        [
            {"repetition_penalty": 3.0},
            {"temperature": 0.8},
            {"temperature": 0.5, "frequency_penalty": 2.0, "logprobs": 1},
        ],
    ],
)
@pytest.mark.parametrize("most_elements", [1, 1 << 24])
def test_the_verdict_is_that_of_the_path_that_keeps_most(
    kinds: list[dict[str, Any]], most_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether nodes are looked at once or paths one by one, and however many rows at a time."""
    monkeypatch.setattr(pieces, "MOST_ELEMENTS", most_elements)
    rows, num_paths, depth, vocab_size = len(kinds) * 30, 6, 4, 8
    generator = torch.Generator().manual_seed(len(kinds))
    sampling = RowSampling(rows, vocab_size, "cpu")
    token_ids = torch.randint(vocab_size, (rows, 20), generator=generator, dtype=torch.int32)
    lengths = torch.randint(3, 12, (rows,), generator=generator)
    asked = [SamplingParams(seed=row, **kinds[row % len(kinds)]) for row in range(rows)]
    tokens = token_ids.numpy()
    sampling.admit([RowAdmission(row, row, tokens[row], 2, 0, False, one) for row, one in enumerate(asked)])
    # Paths go through the nodes of their depth, and end anywhere; tokens repeat often.
    width = 3 * depth
    nodes = torch.randint(3, (rows, num_paths, depth), generator=generator) + 3 * torch.arange(depth)
    ends = torch.randint(depth + 1, (rows, num_paths, 1), generator=generator)
    paths = nodes.masked_fill(torch.arange(depth) >= ends, -1)
    lens = torch.randint(-1, depth + 1, (rows,), generator=generator)
    logits = torch.randn((rows, width + 1, vocab_size), generator=generator) * 4
    draft = Draft(torch.randint(vocab_size, (rows, width), generator=generator), lens, paths=paths)
    # A path is the start of the target's own text, as far as there are nodes for it.
    for row in range(rows):
        draft.tokens[row, paths[row, 0].clamp(min=0)] = logits[row].argmax(dim=1)[
            [0, *(paths[row, 0, :-1] + 1).tolist()]
        ]
    listed = list(range(rows))
    verdict = verify_paths(Verification(logits, sampling, listed, lengths, token_ids, max_context=20), draft)
    by_path = [
        verify(
            Verification(
                torch.stack([logits[row, [0, *(paths[row, path] + 1).tolist()]] for row in listed]),
                sampling,
                listed,
                lengths,
                token_ids,
                max_context=20,
            ),
            path_tokens(draft)[:, path],
            draft.path_lens()[:, path],
        )
        for path in range(num_paths)
    ]
    gained = torch.stack([one.num_tokens for one in by_path])
    best = gained.argmax(dim=0)
    assert verdict.num_tokens.tolist() == gained.amax(dim=0).tolist() and int(gained.max()) > 2
    assert verdict.tokens.tolist() == [by_path[path].tokens[row].tolist() for row, path in enumerate(best.tolist())]
    assert verdict.draft_lens is not None and (verdict.draft_lens < 0).equal(lens < 0)
    assert verdict.draft_lens.clamp(min=0).tolist() == draft.path_lens().amax(dim=1).tolist()
    reporting = [row for row, one in enumerate(asked) if one.logprobs is not None]
    assert (verdict.logprobs is None) == (not reporting)
    if verdict.logprobs is not None:
        expected = [by_path[best[row]].logprobs.values[place] for place, row in enumerate(reporting)]  # type: ignore[union-attr]
        torch.testing.assert_close(verdict.logprobs.values, torch.stack(expected))


def test_a_round_has_room_for_whole_trees(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1)
    speculation = {"method": "branching", "draft_len": DRAFT_LEN}
    width = 1 + DRAFT_LEN * MAX_PATHS
    with pytest.raises(ConfigError, match=f"too small to verify {width} tokens of each of 2 rows.*max_paths"):
        scheduler = {"max_batch_size": 2, "max_num_tokens": 2 * width - 1}
        make_llm(target, None, speculation=speculation, scheduler=scheduler)


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_texts_are_plain_decodings_for_random_trees_on_a_gpu(tmp_path: Path, dtype: str, cuda_graphs: bool) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1, head_dim=64, max_position_embeddings=2048)
    prompts = [*PROMPTS, prompt_of(700, seed=1), prompt_of(300, seed=2)]
    sampling = [*SAMPLING, *SAMPLING[:2]]
    settings = {"scheduler": {"max_batch_size": 6, "max_num_tokens": 256}, "cuda_graphs": cuda_graphs, "dtype": dtype}
    devices = ((), ("cuda:0",))
    plain, found, statistics = plain_and_branching(target, prompts, sampling, devices=devices, **settings)
    assert found == plain and statistics["num_accepted_draft_tokens"] > 200
