"""What a request says about speculation, and how its tokens came: no text depends on it, and the origins add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_draft
from pipelines import make_llm, noisy_copy, prompt_of, tokens_of, useless_draft

from trtrun import LLM, SamplingParams
from trtrun.core.outputs import CompletionDelta, CompletionOutput, merge_deltas
from trtrun.core.request_statistics import RequestStatistics, token_origins
from trtrun.errors import InvalidRequestError
from trtrun.speculation.found_paths import with_certain_tokens
from trtrun.speculation.round_costs import RoundCosts
from trtrun.speculation.verify import accept_by_probability
from trtrun.start import policies

MOST = 4
COUNT = 30
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"repetition_penalty": 1.2},
    {"temperature": 0.8, "min_p": 0.05, "frequency_penalty": 0.3, "n": 2},
    {"temperature": 1.1},
    {"stop_token_ids": (7, 8, 9)},
]
OWN = (0, 1, None, 2, MOST, 0)
PROMPTS = [prompt_of(length, seed=length) for length in (9, 70, 24, 3, 41, 17)]
SECTIONS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "plans ahead": {"scheduler": {"plans_ahead": 1}},
    "measured": {"speculation": {"pacing": "measured"}},
    "ngram": {"speculation": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}},
    "little memory": {"kv_cache": {"max_tokens": 160, "block_size": 8}},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("rows")
    target = make_checkpoint(folder / "target", seed=1, num_hidden_layers=3)
    return target, noisy_copy(folder / "draft", make_draft(folder / "grafted", target, 2), 0.02)


def make(pair: tuple[Path, Path], name: str = "fixed", **settings: Any) -> LLM:
    sections = SECTIONS[name]
    settings["speculation"] = {"draft_len": MOST, **sections.get("speculation", {}), **settings.get("speculation", {})}
    settings["scheduler"] = {"max_batch_size": 4, "max_num_tokens": 48, **sections.get("scheduler", {})}
    settings["kv_cache"] = sections.get("kv_cache", {})
    is_lookup = settings["speculation"].get("method") == "ngram"
    return make_llm(pair[0], None if is_lookup else pair[1], **settings)


def sampling(own: tuple[int | None, ...]) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=COUNT, seed=index, draft_len=most, **kind)
        for index, (kind, most) in enumerate(zip(KINDS, own, strict=True))
    ]


def check_origins(completion: CompletionOutput, most: int | None) -> None:
    """The letters of a completion that was never preempted, against its own counts."""
    origins, counted = completion.token_origins, completion.statistics
    assert len(origins) == len(completion.token_ids) > 0
    assert set(origins) <= set("arbp")
    if counted.num_preemptions == 0:
        assert origins[0] == "p"
    cut = counted.num_accepted_draft_tokens - origins.count("a")
    # The last round may have given more than the completion could take.
    assert 0 <= cut <= MOST
    ended = origins.count("r") + origins.count("b") + origins.count("p")
    assert ended in (counted.num_rounds, counted.num_rounds + 1 + counted.num_preemptions)
    if most == 0:
        assert set(origins) == {"p"}
    for accepted in origins.replace("p", " ").replace("r", " ").replace("b", " ").split():
        assert len(accepted) <= (MOST if most is None else most)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_draft_len_of_its_own_changes_no_text_and_is_kept_to(
    pair: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {draft_len: 1 + draft_len / 10 for draft_len in range(MOST + 1)}  # whatever runs beside the test
    monkeypatch.setattr(policies, "measure_round_costs", lambda *_: RoundCosts({1: costs, 64: costs}))
    with make(pair, name) as llm:
        outputs = llm.generate(PROMPTS, sampling(OWN))
        llm.check_idle()
        llm.set_speculation(False)
        plain = llm.generate(PROMPTS, sampling((None,) * len(KINDS)))
    assert tokens_of(outputs) == tokens_of(plain)
    drafted = 0
    for output, most in zip(outputs, OWN, strict=True):
        for completion in output.completions:
            counted = completion.statistics
            if most is not None:
                assert counted.num_draft_tokens <= counted.num_rounds * most
            check_origins(completion, most)
            drafted += counted.num_draft_tokens
    assert drafted > (0 if name == "measured" else 40)  # what rounds take here has its say
    for output in plain:
        for completion in output.completions:
            assert completion.token_origins == "p" * len(completion.token_ids)


def test_greedy_rows_keep_their_texts_with_logits_and_drafts_of_their_own_lengths(pair: tuple[Path, Path]) -> None:
    own = (0, 1, 2, 3, MOST, None)
    asked = [SamplingParams(max_tokens=COUNT, draft_len=most, temperature=0.9 * (most == 3), seed=1) for most in own]
    with make(pair, speculation={"use_logits": True}) as llm:
        outputs = llm.generate(PROMPTS, asked)
        alone = [llm.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, asked, strict=True)]
        llm.set_speculation(False)
        plain = llm.generate(PROMPTS, asked)
    for index, most in enumerate(own):
        (completion,) = outputs[index].completions
        if most != 3:
            assert completion.token_ids == plain[index].completions[0].token_ids
        assert completion.token_ids == alone[index].completions[0].token_ids, "a seed's text depends on its own draft"
        check_origins(completion, most)
    assert sum(output.completions[0].statistics.num_accepted_draft_tokens for output in outputs) > 20


def test_the_draft_model_does_nothing_for_rows_that_are_not_drafted_for(pair: tuple[Path, Path]) -> None:
    with make(pair) as llm:
        drafter = llm.engine.orchestrator._ranks._worker.drafter  # type: ignore[attr-defined]
        fed: list[list[int]] = []
        catch_up = drafter._engine.catch_up
        drafter._engine.catch_up = lambda rows, *rest: fed.append(rows.tolist()) or catch_up(rows, *rest)
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=COUNT, draft_len=0))
        assert not fed
        llm.generate(PROMPTS[:2], [SamplingParams(max_tokens=COUNT, draft_len=most) for most in (0, 2)])
        assert fed and all(rows == [1] for rows in fed)


@pytest.mark.parametrize(
    ("draft_len", "line"),
    [
        (MOST + 1, "draft_len is 5, more than speculation.draft_len, which is 4: give that or less, or leave it out"),
        (-1, r"draft_len must be 0 \(plain decoding\) to 2\*\*31 - 1, not -1"),
        (1 << 64, r"draft_len must be 0 \(plain decoding\) to 2\*\*31 - 1, not 18446744073709551616"),
        ("3", 'draft_len must be a whole number, not "3"'),
        (True, "draft_len must be a whole number, not true"),
    ],
)
def test_a_draft_len_that_cannot_be_is_refused_in_one_line(pair: tuple[Path, Path], draft_len: Any, line: str) -> None:
    with make(pair) as llm, pytest.raises(InvalidRequestError, match=line):
        llm.engine.add_request([1, 2], SamplingParams(draft_len=draft_len))


def test_where_nothing_is_drafted_only_0_is_a_draft_len(pair: tuple[Path, Path]) -> None:
    with make_llm(pair[0]) as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=3, draft_len=0))[0].error is None
        refused = llm.generate([[1, 2]], SamplingParams(max_tokens=3, draft_len=1))[0].error
    assert refused == "draft_len is 1, but nothing is drafted here: leave it out"


@pytest.mark.parametrize("name", ["fixed", "plans ahead"])
def test_rows_without_drafts_reuse_blocks_that_the_draft_does_not_have(pair: tuple[Path, Path], name: str) -> None:
    prompt = prompt_of(70, seed=1)
    with make(pair, name) as llm:

        def run(*own: int | None) -> list[int]:
            """How much of the prompt was there already, for one row after the other."""
            asked = [SamplingParams(max_tokens=12, ignore_eos=True, draft_len=most) for most in own]
            outputs = [llm.generate([prompt], [one])[0] for one in asked]
            texts.extend(tokens_of(outputs))
            return [output.completions[0].statistics.num_cached_prompt_tokens for output in outputs]

        texts: list[Any] = []
        assert run(0, 0) == [0, 64]
        assert run(None, None) == [0, 64], "the draft has to read it once"
        assert run(0, 2, 0) == [64] * 3
        llm.check_idle()
        llm.set_speculation(False)
        run(None)
    assert texts == [texts[-1]] * len(texts)


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_tokens", "origins"),
    [(0, 1, "p"), (4, 1, "r"), (4, 4, "aaar"), (4, 3, "aar"), (4, 5, "aaaab"), (1, 2, "ab"), (4, 0, "r"), (0, 0, "")],
)
def test_origins_of_a_round(num_draft_tokens: int, num_tokens: int, origins: str) -> None:
    assert token_origins(num_draft_tokens, num_tokens)[:num_tokens] == origins[:num_tokens]


def test_origins_of_deltas_are_those_of_the_output(pair: tuple[Path, Path]) -> None:
    asked = SamplingParams(max_tokens=COUNT, temperature=0.8, seed=5)
    with make(pair) as llm:
        (whole,) = llm.generate([PROMPTS[0]], asked)[0].completions
        deltas = list(llm.stream(PROMPTS[0], asked))
    assert all(len(delta.token_ids) == len(delta.token_origins) for delta in deltas)
    assert merge_deltas(deltas).token_origins == whole.token_origins == "".join(one.token_origins for one in deltas)
    assert {"a", "r", "p"} <= set(whole.token_origins)


def test_deltas_that_are_merged_keep_origins_and_tokens_side_by_side() -> None:
    parts = [CompletionDelta(1, 0, (index,) * len(letters), "", RequestStatistics(), token_origins=letters)
             for index, letters in enumerate(("p", "aab", "r"))]  # fmt: skip
    merged = merge_deltas(parts)
    assert (merged.token_ids, merged.token_origins) == ((0, 1, 1, 1, 2), "paabr")


def given_drafts(texts: list[list[tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """What clients may bring: by kind, beside each other in one batch."""
    (right, half, wrong, late, empty, again) = (text for (text, *_) in texts)
    other = tuple((token + 1) % 150 for token in half)
    return {
        "right": right,
        "half right": half[: COUNT // 2] + other[COUNT // 2 :],
        "wrong": tuple((token + 1) % 150 for token in wrong),
        "late and too long": late[1:] * 3,
        "none": empty[:0],
        "right, of two at most": again,
    }


@pytest.mark.parametrize("name", SECTIONS)
def test_a_draft_of_the_clients_own_changes_no_text_and_saves_rounds(pair: tuple[Path, Path], name: str) -> None:
    plain = [replace(one, n=1, stop_token_ids=()) for one in sampling((None, None, None, None, None, 2))]
    with make((pair[0], useless_draft(pair[0].parent / "useless")), name) as llm:
        llm.set_speculation(False)
        texts = tokens_of(llm.generate(PROMPTS, plain))
        llm.set_speculation(True)
        given = given_drafts(texts)
        asked = [replace(one, draft_token_ids=draft) for one, draft in zip(plain, given.values(), strict=True)]
        outputs = llm.generate(PROMPTS, asked)
        llm.check_idle()
    assert tokens_of(outputs) == texts
    completions = dict(zip(given, (output.completions[0] for output in outputs), strict=True))
    for kind, completion in completions.items():
        check_origins(completion, 2 if "two" in kind else None)
    counted = {kind: completion.statistics for kind, completion in completions.items()}
    # The first token is the prompt's, then come as many as are drafted, and the bonus. Prompts beside take of a round's
    # tokens, and preempted rows begin again.
    slack = 5 if name == "little memory" else 2
    assert 6 <= counted["right"].num_rounds <= 6 + slack
    assert 10 <= counted["right, of two at most"].num_rounds <= 10 + slack
    assert counted["half right"].num_accepted_draft_tokens >= 10
    assert completions["half right"].token_origins[: COUNT // 2].count("a") >= 10
    # They are left at the first token that differs, and others go on. Prompt lookup may be right by chance.
    for kind in ("wrong", "late and too long", "none"):
        assert counted[kind].num_accepted_draft_tokens <= (12 if name == "ngram" else 4), kind


def test_with_logits_greedy_texts_stay_and_sampled_ones_follow_a_certain_draft(pair: tuple[Path, Path]) -> None:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 1.2, "top_k": 20}]
    with make(pair, speculation={"use_logits": True}) as llm:
        plain = [SamplingParams(max_tokens=COUNT, seed=3, **kind) for kind in kinds]
        texts = tokens_of(llm.generate(PROMPTS[:3], plain))
        asked = [replace(one, draft_token_ids=text) for one, (text,) in zip(plain, texts, strict=True)]
        outputs = llm.generate(PROMPTS[:3], asked)
        again = llm.generate(PROMPTS[:3], asked)
    assert tokens_of(outputs)[0] == texts[0] and tokens_of(outputs) == tokens_of(again)
    assert outputs[0].completions[0].statistics.num_rounds <= 7


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_token_without_probabilities_is_accepted_by_the_targets_own(temperature: float) -> None:
    """One-hot proposals under speculative sampling: what comes out has the target's distribution, whatever they are."""
    count, vocab = 40000, 5
    target = torch.softmax(torch.tensor([0.3, 1.5, -0.5, 0.0, 0.9]) / temperature, 0)
    drafts = torch.arange(count) % vocab
    probs = with_certain_tokens(torch.full((count, 1, vocab), 0.2), drafts[:, None], torch.ones(count, 1) > 0)
    num_tokens, tokens = accept_by_probability(
        target.expand(count, 2, vocab), probs, drafts[:, None], torch.ones(count, dtype=torch.int64),
        torch.arange(count), torch.full((count,), 7),
    )  # fmt: skip
    found = torch.bincount(tokens[:, 0], minlength=vocab) / count
    assert (found - target).abs().max() < 0.012
    accepted = torch.bincount(drafts[num_tokens == 2], minlength=vocab) / (count / vocab)
    assert (accepted - target).abs().max() < 0.03
    kept = with_certain_tokens(torch.full((1, 2, vocab), 0.2), torch.tensor([[3, 3]]), torch.tensor([[False, True]]))
    assert kept[0].tolist() == [[pytest.approx(0.2)] * vocab, [0, 0, 0, 1, 0]]


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ({"draft_token_ids": [1], "draft_len": 0}, "draft_len 0 allows none: leave one of them out"),
        ({"draft_token_ids": [99999]}, "draft_token_ids: 99999 is not a token id between 0 and"),
        ({"draft_token_ids": "text"}, "draft_token_ids must be a list of whole numbers"),
        ({"draft_token_ids": [-1]}, "draft_token_ids: -1 is not a token id"),
    ],
)
def test_a_draft_that_cannot_be_is_refused_in_one_line(
    pair: tuple[Path, Path], parameters: dict[str, Any], line: str
) -> None:
    with make(pair) as llm, pytest.raises(InvalidRequestError, match=line):
        llm.engine.add_request([1, 2], SamplingParams(**parameters))


def test_where_nothing_is_drafted_a_draft_of_the_clients_own_is_not_looked_at(pair: tuple[Path, Path]) -> None:
    with make_llm(pair[0]) as llm:
        (plain,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=9))[0].completions
        asked = SamplingParams(max_tokens=9, draft_token_ids=plain.token_ids)
        (completion,) = llm.generate([PROMPTS[0]], asked)[0].completions
    assert completion.token_ids == plain.token_ids and completion.token_origins == "p" * 9


def test_ids_that_the_draft_model_does_not_have_end_what_is_taken_of_a_draft(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1, num_hidden_layers=2, vocab_size=260)
    draft = useless_draft(tmp_path / "draft", vocab_size=199)
    bias = {250: 100.0}
    with make((target, draft)) as llm:
        texts = [
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12, logit_bias=bias, draft_token_ids=given))
            for given in ((), (250,) * 12)
        ]
    assert tokens_of(texts[0]) == tokens_of(texts[1]) == [[(250,) * 12]]
