"""What runs leave for pacing: the next one measures nothing and begins with it, and damage costs nothing but that."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_draft
from pipelines import configuration, make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.core.nouns import RoundPlan
from trtrun.rounds.solo_ranks import SoloRanks
from trtrun.speculation.acceptance import DraftRecord
from trtrun.speculation.round_costs import RoundCosts
from trtrun.start import policies, warm_up_rounds
from trtrun.start import policies as kept_pacing
from trtrun.start.policies import KeptPacing

COSTS = RoundCosts({1: {0: 0.5, 4: 0.75}, 16: {0: 1.0, 1: 1.5}})
RECORD = DraftRecord((4.0, 2.0), (3.0, 1.0), 1.5, True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of this test lie."""
    monkeypatch.setenv("TRTRUN_PACING_FOLDER", str(tmp_path / "caches" / "pacing"))
    return tmp_path / "caches" / "pacing"


def test_what_was_written_is_read_and_what_was_not_stays(folder: Path) -> None:
    kept = KeptPacing(folder / "a.json", "one")
    assert kept.read() == (None, None)
    kept.write(COSTS, None)
    assert kept.read() == (COSTS, None)
    kept.write(None, RECORD)
    assert kept.read() == (COSTS, RECORD)
    other = KeptPacing(folder / "a.json", "another placement")
    assert other.read() == (None, RECORD)
    for number in range(20):
        KeptPacing(folder / "a.json", str(number)).write(COSTS, None)
    assert other.read() == (None, RECORD) and (folder / "a.json").stat().st_size < 1 << 12
    assert KeptPacing(None, "one").read() == (None, None)
    KeptPacing(None, "one").write(COSTS, RECORD)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"costs": {"one": {"1": {"0": -1, "4": 2}}}}',
        b'{"costs": {"one": {"0": {"0": 1, "4": 2}}}}',
        b'{"costs": {"one": {"1": {"1": 1, "4": 2}}}}',
        b'{"costs": {"one": {"1": {"0": 1e999, "4": 2}}}}',
        b'{"costs": {"one": {}}}',
        b'{"drafts": {"offered": [1], "accepted": [2], "stake": 1, "pays": true}}',
        b'{"drafts": {"offered": [1], "accepted": [], "stake": 1, "pays": true}}',
        b'{"drafts": {"offered": ["x"], "accepted": [1], "stake": 1, "pays": true}}',
        b'{"drafts": 3}',
        b" " * (1 << 17),
    ],
)
def test_what_is_damaged_is_as_if_it_were_not_there(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True)
    kept = KeptPacing(folder / "a.json", "one")
    (folder / "a.json").write_bytes(content)
    assert kept.read() == (None, None)
    kept.write(COSTS, RECORD)
    assert kept.read() == (COSTS, RECORD)


def test_many_may_write_at_once_and_old_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pacing, "_MOST_FILES", 3)

    def write(name: int) -> None:
        for _ in range(20):
            KeptPacing(folder / "shared.json", "one").write(COSTS, RECORD)
        KeptPacing(folder / f"{name}.json", "one").write(COSTS, RECORD)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    KeptPacing(folder / "last.json", "one").write(COSTS, RECORD)
    assert len(list(folder.glob("*.json"))) == 3 and not list(folder.glob("*.new"))
    assert KeptPacing(folder / "last.json", "one").read() == (COSTS, RECORD)


def test_a_second_start_measures_nothing_and_begins_with_what_the_first_saw(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[RoundPlan] = []
    publish = SoloRanks.publish
    monkeypatch.setattr(SoloRanks, "publish", lambda ranks, plan: (plans.append(plan), publish(ranks, plan)))
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1)
    settings: dict[str, Any] = {"speculation": {"draft_len": 4, "pacing": "measured"}}
    monkeypatch.setattr(warm_up_rounds, "_MOST_SECONDS", 1e9)
    measure = policies.measure_round_costs

    def measured(*arguments: Any) -> RoundCosts:
        assert measure(*arguments) is not None
        return COSTS  # whatever a busy machine says

    monkeypatch.setattr(policies, "measure_round_costs", measured)
    monkeypatch.setattr(policies, "_DOUBTFUL", 1e9)
    sampling, texts, files = SamplingParams(max_tokens=40, ignore_eos=True), [], []
    for number in range(2):
        plans.clear()
        with make_llm(target, draft, **settings) as llm:
            assert bool(plans) == (number == 0)
            seen = llm.engine.orchestrator._pacer
            assert seen is not None and (seen._acceptance.num_seen > 0) == (number == 1)
            texts.append(tokens_of(llm.generate([prompt_of(9)], sampling)))
        (file,) = folder.iterdir()
        files.append(file.name)
        assert json.loads(file.read_text())["drafts"]["offered"][0] > 0
    assert texts[0] == texts[1] and files[0] == files[1]
    # What cannot be true is measured again.
    monkeypatch.setattr(policies, "_DOUBTFUL", 0.0)
    plans.clear()
    with make_llm(target, draft, **settings):
        assert plans
    # Another draft, method or batch is another matter.
    config = configuration(target, draft, **settings)
    other_draft = make_draft(tmp_path / "other", target, 2)
    path = KeptPacing.of(config, ["H200"]).path
    assert path != KeptPacing.of(configuration(target, other_draft, **settings), ["H200"]).path
    assert path != KeptPacing.of(configuration(target, draft, **settings), ["H100"]).path
    many = configuration(target, draft, **settings, scheduler={"max_batch_size": 3})
    assert path == KeptPacing.of(many, ["H200"]).path and KeptPacing.of(many, ["H200"]).read() == (None, None)
