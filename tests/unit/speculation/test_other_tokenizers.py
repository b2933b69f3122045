"""Drafts of a model with another tokenizer: texts are the target's own, and the draft sees what it should.

A draft whose token ids are shuffled drafts exactly what it would with the target's. One with another way of parting
texts is compared with transformers, over the text so far as it is spelled for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_tokenizer
from gpus import needs_gpu
from permuted import permuted_copy
from pipelines import Reference, configuration, make_llm, noisy_copy, prompt_of, run_alone, tokens_of

from launch.jobs.check.preflight import check_tokenizers
from parallel.groups import open_groups
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import make_config
from trtrun.core.nouns import RoundPlan
from trtrun.errors import ConfigError
from trtrun.memory.largest_round import chained_round, largest_rounds
from trtrun.memory.memory_requirements import round_shape
from trtrun.speculation.drafters.translated_model import TranslatedDrafter
from trtrun.speculation.translated_rows import TranslatedRows
from trtrun.start import engine_maker
from trtrun.start.engine_maker import count_graphs
from trtrun.start.job_spec import JobSpec
from trtrun.start.startup import RankStartup
from trtrun.tokens.translation import read_vocabularies

COUNT = 40
LENGTHS = (1, 2, 17, 33, 64, 90)
WAYS = ("intersection", "text")
SCHEDULER = {"max_batch_size": 4, "max_num_tokens": 48}
VOCABULARY = 257 + 26
GREEDY = SamplingParams(max_tokens=COUNT)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 20, "n": 2},
    {"temperature": 0.6, "frequency_penalty": 0.4, "logit_bias": {9: 2.0}},
    {"temperature": 0.7, "bad_words": ("ab",)},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` with merged pairs, `noisy` with its tokenizer, `permuted` with shuffled ids, and `few`, whose tokenizer
    has two of the pairs and another beginning of texts."""
    path = tmp_path_factory.mktemp("tokenizers")
    target = make_checkpoint(
        path / "target", seed=1, num_hidden_layers=2, tokenizer=True, vocab_size=VOCABULARY, scale=0.7, eos_token_id=0
    )
    make_tokenizer(target, merges=26)
    noisy_copy(path / "noisy", target, 0.05)
    permuted_copy(path / "permuted", path / "noisy")
    few = make_checkpoint(path / "few", seed=4, num_hidden_layers=2, tokenizer=True, vocab_size=300, eos_token_id=0)
    make_tokenizer(few, merges=2, add_bos=True, special=("<think>",))
    return path


def prompts() -> list[list[int]]:
    return [prompt_of(length, seed=length, vocab_size=VOCABULARY) for length in LENGTHS]


def sampling() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=COUNT, seed=number, **kind) for number, kind in enumerate(KINDS)]


def translated_llm(folder: Path, draft: str, way: str, **sections: Any) -> LLM:
    """An LLM whose draft is translated in one way, whatever it has in common with the target."""
    config = configuration(folder / "target", folder / draft, **sections)
    assert config.draft is not None
    return LLM(config=config.model_copy(update={"draft": config.draft.model_copy(update={"vocabulary": way})}))


def run(llm: LLM, greedy: bool = True) -> tuple[list[list[tuple[int, ...]]], dict[str, Any]]:
    """Texts, and statistics; nothing is left behind."""
    parameters = GREEDY if greedy else sampling()
    with llm:
        texts = tokens_of(llm.generate(prompts(), parameters))
        llm.check_idle()
        return texts, llm.statistics()


@pytest.mark.parametrize(
    ("dtype", "greedy", "use_logits"), [("float32", True, False), ("float32", False, True), ("bfloat16", False, False)]
)
def test_shuffled_ids_change_nothing(folder: Path, dtype: str, greedy: bool, use_logits: bool) -> None:
    """With `intersection`: what is drafted, accepted and written is what the same draft in the target's ids gives."""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "scheduler": SCHEDULER,
        "speculation": {"draft_len": 3, "use_logits": use_logits},
    }
    expected, usual = run(make_llm(folder / "target", folder / "noisy", **settings), greedy)
    texts, statistics = run(make_llm(folder / "target", folder / "permuted", **settings), greedy)
    assert texts == expected
    names = ("num_draft_tokens", "num_accepted_draft_tokens")
    assert [statistics[name] for name in names] == [usual[name] for name in names]
    assert 0.02 * usual[names[0]] < usual[names[1]] < 0.98 * usual[names[0]]


def test_what_a_request_foretells_is_certain_among_probabilities(folder: Path) -> None:
    """Beside drafts that are kept by their probabilities, in the target's ids and in the draft's alike."""
    settings: dict[str, Any] = {"scheduler": SCHEDULER, "speculation": {"draft_len": 3, "use_logits": True}}
    found = []
    foretold: list[tuple[int, ...]] = [()] * len(LENGTHS)
    for draft in ("noisy", "noisy", "permuted"):
        asked = [replace(one, draft_token_ids=ids) for one, ids in zip(sampling(), foretold, strict=True)]
        with make_llm(folder / "target", folder / draft, **settings) as llm:
            texts = tokens_of(llm.generate(prompts(), asked))
            found.append((texts, llm.statistics()["num_accepted_draft_tokens"]))
        foretold = [of_prompt[0][:20] for of_prompt in found[0][0]]
    assert found[1] == found[2] and found[1][1] > found[0][1]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[list[tuple[int, ...]]]]:
    """Sampled and greedy texts of the target alone."""
    with make_llm(folder / "target") as llm:
        return [run_alone(llm, prompts(), asked) for asked in (sampling(), [GREEDY] * len(LENGTHS))]


@pytest.mark.parametrize(
    ("draft", "way", "plans_ahead"),
    [("permuted", "text", 0), ("few", "intersection", 0), ("few", "text", 1)],
)
def test_texts_are_the_targets_own(
    folder: Path, plain: list[list[list[tuple[int, ...]]]], draft: str, way: str, plans_ahead: int
) -> None:
    """With few blocks, so that rows are preempted, prompts in chunks, and prompts that begin alike, twice."""
    sections: dict[str, Any] = {
        "speculation": {"draft_len": 4},
        "scheduler": {**SCHEDULER, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 144, "block_size": 8},
    }
    with translated_llm(folder, draft, way, **sections) as llm:
        outputs = llm.generate(prompts(), sampling())
        assert tokens_of(outputs) == plain[0]
        assert [tokens_of(llm.generate(prompts(), GREEDY)) for _ in range(2)] == plain[1:] * 2
        llm.check_idle()
        statistics = llm.statistics()
    assert sum(one.statistics.num_preemptions for output in outputs for one in output.completions) > 0
    assert 0 < statistics["num_accepted_draft_tokens"] < statistics["num_draft_tokens"]


@needs_gpu
@pytest.mark.parametrize(("draft", "way"), [(draft, way) for draft in ("permuted", "few") for way in WAYS])
def test_texts_on_a_gpu_are_the_targets_own(folder: Path, draft: str, way: str) -> None:
    """In bfloat16, alone without a draft and together with one; nothing is captured in rounds."""
    settings: dict[str, Any] = {"devices": (("cuda:0",), ("cuda:0",)), "dtype": "bfloat16", "scheduler": SCHEDULER}
    with make_llm(folder / "target", **settings) as llm:
        expected = [run_alone(llm, prompts(), asked) for asked in (sampling(), [GREEDY] * len(LENGTHS))]
    with translated_llm(folder, draft, way, speculation={"draft_len": 4}, **settings) as llm:
        assert [tokens_of(llm.generate(prompts(), asked)) for asked in (sampling(), GREEDY)] == expected
        llm.check_idle()
        statistics = llm.statistics()
    assert 0 < statistics["num_accepted_draft_tokens"] < statistics["num_draft_tokens"]
    assert statistics["num_captures"] == 0


LENGTHS_OF = TranslatedRows.lengths
Seen = list[tuple[list[int], list[int], set[int]]]
"""What the draft was to go on with, what it chose, and what it could choose, of a row and round: the draft's tokens."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """What drafts are made of."""
    contexts: list[list[int]] = []
    found: Seen = []
    draft, catch_up = TranslatedDrafter._draft, TranslatedRows.catch_up

    def catch_up_seen(self: Any, rows: list[int]) -> torch.Tensor:
        contexts[:] = [[*self._rows[row].text.tokens] for row in rows]
        return catch_up(self, rows)

    def draft_seen(self: Any, plan: RoundPlan, rows: list[int], most: list[int], picks: list[int]) -> Any:
        chosen, probs = draft(self, plan, rows, most, picks)
        if not plan.is_warm_up:
            drafted, choices = self._columns[chosen].tolist(), {*self._columns.tolist()}
            rows_seen = zip(contexts, drafted, most, strict=True)
            found.extend((context, of_row[:length], choices) for context, of_row, length in rows_seen)
        return chosen, probs

    monkeypatch.setattr(TranslatedRows, "catch_up", catch_up_seen)
    monkeypatch.setattr(TranslatedDrafter, "_draft", draft_seen)
    yield found


@pytest.mark.parametrize("way", WAYS)
def test_the_draft_says_what_it_would_of_the_text_so_far(folder: Path, seen: Seen, way: str) -> None:
    """Its keys and values are those of the text as it is spelled for it, after rejected drafts, texts that are spelled
    otherwise than a moment ago, preemption, and beginnings that rows share."""
    sections: dict[str, Any] = {
        "speculation": {"draft_len": 3},
        "scheduler": SCHEDULER,
        "kv_cache": {"max_tokens": 144, "block_size": 8},
    }
    shared = prompt_of(50, seed=5, vocab_size=VOCABULARY)
    asked = [[*shared, number] for number in range(40, 44)] + prompts()
    with translated_llm(folder, "few", way, **sections) as llm:
        for _ in range(2):
            llm.generate(asked, GREEDY)
    reference = Reference(folder / "few")
    assert len(seen) > 200
    for context, drafted, choices in seen[:: len(seen) // 100]:
        logits = reference.logits([*context, *drafted])[len(context) - 1 : -1].clone()
        logits[:, [token for token in range(logits.shape[1]) if token not in choices]] = -torch.inf
        assert logits.argmax(dim=1).tolist() == drafted


@pytest.mark.parametrize("way", WAYS)
def test_a_context_in_the_drafts_tokens_is_the_text(folder: Path, seen: Seen, way: str) -> None:
    vocabularies = read_vocabularies(folder / "target", folder / "few")
    prompt = vocabularies.target_speller.spell(b"abc of the cdef, abab and xyz")
    with translated_llm(folder, "few", way, speculation={"draft_len": 3}) as llm:
        (text,) = tokens_of(llm.generate([prompt], SamplingParams(max_tokens=COUNT)))[0]
    written = b"".join(vocabularies.target.of_token.get(token, b"") for token in (*prompt, *text))
    for context, _, _ in seen:
        assert context[0] == 0  # what the draft's tokenizer puts in front of a text
        spelled = b"".join(vocabularies.draft.of_token.get(token, b"") for token in context[1:])
        assert written.startswith(spelled) and len(spelled) >= 29
    assert len(seen) > 5


@pytest.mark.parametrize("way", WAYS)
def test_graphs_of_a_gpu_give_the_same(
    folder: Path, plain: list[list[list[tuple[int, ...]]]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played by running the captured work again. No round needs one that the start has not made."""
    captured: list[int] = []
    monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: (captured.append(1), work)[1])
    with translated_llm(folder, "few", way, speculation={"draft_len": 3}, scheduler=SCHEDULER) as llm:
        number = len(captured)
        assert [tokens_of(llm.generate(prompts(), asked)) for asked in (sampling(), GREEDY)] == plain
        config = llm.config
    assert len(captured) == number
    models = JobSpec(config).models
    assert number == sum(count_graphs(config, models, role, None, 0) for role in ("draft", "target"))


@pytest.mark.parametrize("with_graphs", [False, True])
def test_a_trial_run_drafts_on_a_store_of_one_block(
    folder: Path, seen: Seen, with_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU measures the memory of rounds."""
    if with_graphs:
        monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    config = configuration(folder / "target", folder / "few", scheduler={**SCHEDULER, "max_seq_len": 64})
    spec = JobSpec(config)
    startup = RankStartup(spec, 0, open_groups(None, spec.topology, torch.device("cpu")))
    startup.load(lambda done, total: None)
    shape = round_shape(config, spec.models)
    trial = startup._made.trial_run(shape)
    lengths: list[int] = []
    monkeypatch.setattr(
        TranslatedRows, "lengths", lambda self, rows: (lengths.extend(found := LENGTHS_OF(self, rows)), found)[1]
    )
    for plan in (*largest_rounds(shape), chained_round(shape)):
        lengths.clear()
        trial.play(plan)
        assert max(lengths) == 64 - shape.draft_len - 1
        assert len(lengths) >= len(plan.decode_rows)
    trial.close()


@pytest.mark.parametrize("way", WAYS)
def test_requests_drafts_texts_and_guides_go_with_it(folder: Path, way: str) -> None:
    """What a request brought is proposed first, then what texts say; guided rows are held to their guide."""
    asked = [
        SamplingParams(max_tokens=COUNT),
        SamplingParams(max_tokens=COUNT, guided={"regex": "[a-f]{4,30}"}),
        SamplingParams(max_tokens=COUNT, guided={"choice": ["abcdef", "cdefgh"]}, temperature=0.8, seed=3),
        SamplingParams(max_tokens=COUNT, frequency_penalty=-2.0),
        SamplingParams(max_tokens=COUNT, draft_len=0),
    ]
    texts = ["abc", "of ab", "cd", "abab cd abab", "x"]
    with make_llm(folder / "target") as llm:
        expected = tokens_of(llm.generate(texts, asked))
    speculation = {"draft_len": 3, "enable_suffix_decoding": True, "suffix_decoding_min_match_len": 2}
    with translated_llm(folder, "few", way, speculation=speculation) as llm:
        assert tokens_of(llm.generate(texts, asked)) == expected
        before = llm.statistics()["num_accepted_draft_tokens"]
        given = SamplingParams(max_tokens=COUNT, draft_token_ids=expected[0][0])
        assert tokens_of(llm.generate(texts[:1], given))[0] == expected[0]
        assert llm.statistics()["num_accepted_draft_tokens"] - before >= 0.7 * (COUNT - 2)
        assert llm.statistics()["num_accepted_suffix_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("draft", "speculation", "said"),
    [
        (
            "few",
            {"parallel_drafting": "on"},
            r"parallel_drafting: is on, but .*intersection.*step by step",
        ),
        ("few", {"ahead": "on"}, r"speculation\.ahead: is on, but .* drafts step by step"),
        (
            "few",
            {"use_logits": True},
            r"use_logits: does not go with draft\.vocabulary text, .* or set draft\.vocabulary",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    folder: Path, draft: str, speculation: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {
        "target": {"model": str(folder / "target"), "devices": ["cpu:0"]},
        "draft": {"model": str(folder / draft), "devices": ["cpu:1"]},
        "speculation": speculation,
    }
    if "use_logits" in speculation:  # with auto it is what goes with it
        monkeypatch.setattr("trtrun.tokens.translation._LARGE_SHARE", 1.1)
        config = make_config(values)
        assert config.draft is not None and config.draft.vocabulary == "intersection"
        values["draft"]["vocabulary"] = "text"
    with pytest.raises(ConfigError, match=said) as caught:
        make_config(values)
    assert "\n" not in str(caught.value)


def test_the_same_vocabulary_may_be_demanded(folder: Path) -> None:
    config = configuration(folder / "target", folder / "few")
    assert config.draft is not None and config.draft.vocabulary == "intersection"
    check_tokenizers(JobSpec(config))
    same = config.model_copy(update={"draft": config.draft.model_copy(update={"vocabulary": "same"})})
    with pytest.raises(Exception, match=r"different tokenizers.* leave draft\.vocabulary out"):
        check_tokenizers(JobSpec(same))
    usual = configuration(folder / "target", folder / "noisy")
    assert usual.draft is not None and usual.draft.vocabulary == "same"
