"""Texts beside a model: what is proposed in place of its tokens, and that no text depends on it."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ahead_rounds import plan_of
from checkpoints import make_checkpoint
from lookups import COUNT, check_greedy, check_sampled
from pipelines import configuration, make_llm, noisy_copy, prompt_of, tokens_of, useless_draft
from suffixes_by_hand import expected_paths, rules, texts_of

from launch.jobs.placement.memory import JobMemory
from trtrun import SamplingParams
from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.configuration.topology import make_topology
from trtrun.core.nouns import RowAdmission
from trtrun.errors import ConfigError
from trtrun.speculation.ahead.row_texts import HostTexts
from trtrun.speculation.suffixes.continuations import SuffixRule
from trtrun.speculation.text_drafts import TextDrafts
from trtrun.start.job_spec import JobSpec

HYBRID = {"enable_suffix_decoding": True}
SHORT = {**HYBRID, "suffix_decoding_min_match_len": 2}


def options_of(rule: SuffixRule, min_match: int) -> HybridOptions:
    return HybridOptions(
        enable_suffix_decoding=True,
        suffix_decoding_max_tree_depth=rule.most_matched,
        suffix_decoding_max_spec_factor=rule.spec_factor,
        suffix_decoding_max_spec_offset=rule.spec_offset,
        suffix_decoding_min_token_prob=rule.min_token_prob,
        suffix_decoding_min_match_len=min_match,
    )


@pytest.mark.parametrize("vocab_size", [None, 3])
def test_long_matches_are_proposed_by_the_rule_of_the_paper(vocab_size: int | None) -> None:
    """On the device and on the host, up to the first token that the draft does not have."""
    chance, num_found, num_short = random.Random(vocab_size), 0, 0
    for _ in range(60):
        texts, rule = texts_of(chance), rules(chance)
        min_match = chance.choice([number for number in (1, 2, 4, 9) if number <= rule.most_matched])
        options = options_of(rule, min_match)
        lens = [chance.randint(0, 6) for _ in texts]
        token_ids = torch.zeros((len(texts), 120), dtype=torch.int32)
        host = HostTexts(len(texts), 120, vocab_size or 99, options)
        for row, text in enumerate(texts):
            token_ids[row, : len(text)] = torch.tensor(text)
            head = chance.randint(1, len(text))
            admission = RowAdmission(row, row, np.array(text[:head]), head, 0, True, SamplingParams(seed=1))
            host.begin_round(plan_of(admissions=(admission,)))
            host.learn([row], [text[head:]])
        rows: Any = SimpleNamespace(token_ids=token_ids, lengths=torch.tensor([len(text) for text in texts]))
        plan = plan_of(0, range(len(texts)), lens, max_context=120)
        found = TextDrafts(rows, vocab_size, options).propose(plan)
        on_host = host.look_up({row: most for row, most in enumerate(lens) if most})
        for row, (text, most) in enumerate(zip(texts, lens, strict=True)):
            paths = expected_paths(text, rule, max(1, *lens), 1, min_match)
            expected = paths[0][:most] if paths else []
            usable = [*(token < (vocab_size or 99) for token in expected), False].index(False)
            num_short += usable < len(expected)
            assert on_host.get(row, []) == expected[:usable] or max(lens) == 0
            if found is None:
                assert not usable or max(lens) == 0
                continue
            assert found.num_suffix_tokens is not None
            count = int(found.num_suffix_tokens[row])
            assert found.tokens[row, :count].tolist() == expected[:usable]
            assert found.is_given[row].tolist() == [step < count for step in range(max(lens))]
            num_found += count
    assert num_found > 60 and (num_short > 10) == (vocab_size is not None)


def test_past_answers_are_found_on_the_host_and_prompts_are_not() -> None:
    options = HybridOptions(
        enable_suffix_decoding=True, suffix_decoding_min_match_len=2, suffix_decoding_max_cached_requests=1
    )
    host = HostTexts(2, 30, 99, options)

    def admit(row: int, tokens: list[int], dropped: tuple[int, ...] = ()) -> None:
        admission = RowAdmission(row, row, np.array(tokens), len(tokens), 0, True, SamplingParams(seed=1))
        plan = plan_of(dropped_rows=dropped, admissions=(admission,))
        host.release_rows(plan)
        host.begin_round(plan)

    admit(0, [1, 2, 3, 4])
    host.learn([0], [[5, 6, 7, 8]])
    admit(1, [5, 6])
    assert host.look_up({1: 3}) == {}, "of a row that is there nothing is known to others"
    admit(0, [5, 6], dropped=(0,))
    assert host.look_up({0: 3, 1: 1}) == {0: [7, 8], 1: [7]}
    admit(0, [2, 3], dropped=(0,))
    assert host.look_up({0: 3}) == {}, "a prompt is no answer"
    host.learn([1], [[1] * 29])
    assert host.look_up({0: 3, 1: 3}) == {}, "a row that outgrows the draft's context is forgotten"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hybrid") / "target", seed=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return noisy_copy(tmp_path_factory.mktemp("hybrid") / "draft", target, 0.1)


def check_both_drafted(statistics: dict[str, Any]) -> None:
    """Texts and the model drafted, and some of both was kept."""
    drafted, accepted = statistics["num_draft_tokens"], statistics["num_accepted_draft_tokens"]
    found, kept = statistics["num_suffix_draft_tokens"], statistics["num_accepted_suffix_draft_tokens"]
    assert 0 < kept < found < drafted and kept < accepted


def test_lossless_greedy_equals_transformers(target: Path, draft: Path) -> None:
    check_both_drafted(check_greedy(target, SHORT, plans_ahead=0, draft=draft))


@pytest.mark.parametrize(("plans_ahead", "cached"), [(1, 20)])
def test_sampled_output_is_the_targets_own_whatever_the_batch_and_who_is_preempted(
    target: Path, draft: Path, plans_ahead: int, cached: int
) -> None:
    speculation = {**SHORT, "suffix_decoding_max_cached_requests": cached}
    check_both_drafted(check_sampled(target, speculation, plans_ahead, draft=draft))


def test_without_the_option_nothing_is_looked_up(target: Path, draft: Path) -> None:
    statistics = check_greedy(target, {}, 0, draft=draft)
    assert statistics["num_suffix_draft_tokens"] == statistics["num_accepted_suffix_draft_tokens"] == 0


def test_past_answers_are_drafted_where_the_model_is_useless(tmp_path: Path, target: Path) -> None:
    prompts, sampling = [prompt_of(30), prompt_of(12)], SamplingParams(max_tokens=COUNT)
    useless = useless_draft(tmp_path / "useless")
    speculation = {**HYBRID, "suffix_decoding_max_cached_requests": 9, "draft_len": 4}
    with make_llm(target, useless, speculation=speculation) as llm:
        outputs = [llm.generate(prompts, sampling) for _ in range(2)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
    for first, second in zip(*outputs, strict=True):
        rounds = [output.completions[0].statistics.num_rounds for output in (first, second)]
        # Four tokens must stand there; then five come at a time.
        assert rounds[1] <= 4 + COUNT // 5 < rounds[0]
        kept = second.completions[0].statistics
        assert kept.num_accepted_suffix_draft_tokens >= COUNT - 4 - COUNT // 5 - 2


@pytest.mark.parametrize(("devices", "drafting"), [((("cpu:0",), ("cpu:1",)), 1), ((("cpu:0",), ("cpu:0",)), 0)])
def test_its_memory_is_counted_where_it_drafts(
    target: Path, draft: Path, devices: tuple[tuple[str], tuple[str]], drafting: int
) -> None:
    def planned(**options: object) -> list[int]:
        config = configuration(target, draft, devices=devices, speculation=options)
        topology = make_topology(config)
        return [JobMemory.read(JobSpec(config)).working_bytes(rank) for rank in range(topology.world_size)]

    cached = {"suffix_decoding_max_cached_requests": 9, "suffix_decoding_max_cached_tokens": 3_000_000}
    more = [after - before for before, after in zip(planned(), planned(**HYBRID, **cached), strict=True)]
    assert more == [(64 << 20) + 3_000_000 * 136 if rank == drafting else 0 for rank in range(len(more))]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({**HYBRID, "use_logits": True}, "use_logits does not go with enable_suffix_decoding"),
        ({"suffix_decoding_min_match_len": 3}, "is of use with enable_suffix_decoding: true alone"),
        ({"suffix_decoding_max_cached_requests": 3}, "is of use with enable_suffix_decoding: true alone"),
        ({**HYBRID, "suffix_decoding_min_match_len": 30}, "is 30 and suffix_decoding_max_tree_depth 24"),
        ({**HYBRID, "max_paths": 2}, "max_paths is an option of method ngram and suffix"),
        ({**HYBRID, "suffix_corpus": "a.txt"}, "suffix_corpus is an option of method suffix"),
        ({**HYBRID, "method": "suffix"}, "enable_suffix_decoding is an option of method draft_target, medusa, "),
        ({**HYBRID, "method": "medusa", "medusa_choices": [[0], [1]]}, "does not go with a tree: leave medusa_choices"),
        ({"enable_suffix_decodin": True}, "did you mean 'enable_suffix_decoding'?"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, draft: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        if section.get("method") == "medusa":
            configuration(target, None, heads=draft, speculation=section)
        else:
            configuration(target, draft, speculation=section)
    assert message in str(caught.value) and "\n" not in str(caught.value)
