"""An EAGLE head on a rank of its own: texts are plain decoding's, and what it proposes is what the paper says, as it is
told what the target computes. Ahead of verdicts nothing that is guessed changes a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from eagle3_heads import Ways, check_proposals, check_trees
from jobs import HERE, configuration, prompts, run_job, sampling
from medusa_heads import Proposals
from mpi4py import MPI
from pipelines import Reference, tokens_of
from test_ahead import Bend, as_it_is, every_guess_is_wrong, foreseen, no_guess_matches, no_patience
from test_split_eagle import DYNAMIC, KINDS, SIMPLE, STATIC

from trtrun import LLM
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.kernels.triton.sampling import columns
from trtrun.roles.hidden_link import HiddenLink
from trtrun.speculation.ahead.heads import AheadEagleDrafter
from trtrun.speculation.ahead.policy import AheadPolicy
from trtrun.speculation.drafters.eagle_apart import ApartEagleDrafter

pytestmark = pytest.mark.mpi
APART = [name for name, (draft, target) in HERE.items() if len(draft) == 1 and not {*draft} & {*target}]
TIGHT: dict[str, Any] = {
    "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": 1},
    "kv_cache": {"max_tokens": 128, "block_size": 8},
}
"""Few tokens a round, so that prompts come in chunks, and few blocks, so that rows are preempted."""

Patch = pytest.MonkeyPatch


def use(llm: LLM) -> dict[str, Any]:
    """All kinds of rows, and some prompts once more."""
    outputs = [*llm.generate(prompts(), sampling()), *llm.generate(prompts()[2:4], SIMPLE[2:4])]
    completions = [completion.statistics for output in outputs for completion in output.completions]
    return {
        "texts": tokens_of(outputs),
        "preempted": sum(statistics.num_preemptions for statistics in completions),
        "cached": sum(statistics.num_cached_prompt_tokens for statistics in completions),
        "totals": llm.statistics(),
    }


def use_simply(llm: LLM) -> list[Any]:
    """Rows whose drafts are compared with the reference's."""
    return tokens_of(llm.generate(prompts(), SIMPLE))


def make_case(folder: Path, name: str, method: str, layout: str, dtype: str, **shape: Any) -> tuple[Any, Any, Path]:
    """What rows say without a head, at rank 0; and a head that knows it by and large, and where it is."""
    target, path = folder / "target", folder / f"apart {method} {layout} {dtype} {len(shape)}"
    make, teach, write, _ = KINDS[method]
    without = {"method": "draft_target", "draft_len": 1, "ahead": "off"}
    sections = {"devices": HERE[name], "dtype": dtype, **TIGHT}
    plain = run_job(configuration(target, folder / "noisy", speculation=without, **sections), use)
    head = make(target, **shape)
    if plain is not None:
        taught = zip([*prompts(), *prompts()[2:4]], plain["texts"], strict=True)
        head = teach(head, target, [[*prompt, *text] for prompt, found in taught for text in found])
        write(path, head, layout, target)
    MPI.COMM_WORLD.barrier()
    return plain, head, path


@pytest.mark.parametrize(
    ("method", "layout", "shape", "dtype", "tree"),
    [
        ("eagle3", "specforge", {"num_tokens": 131}, "float32", {}),
        ("eagle", "reference", {}, "bfloat16", {}),
        ("eagle3", "prefixed", {"num_tokens": 131}, "float32", DYNAMIC),
        ("eagle", "vllm", {}, "bfloat16", STATIC),
    ],
)
@pytest.mark.parametrize("name", APART)
def test_texts_are_plain_decodings_and_drafts_the_papers(
    folder: Path,
    name: str,
    method: str,
    layout: str,
    shape: dict[str, Any],
    dtype: str,
    tree: dict[str, Any],
    monkeypatch: Patch,
) -> None:
    """Rows that are sampled, penalised, preempted, with chunks of prompts beside them; then simpler ones."""
    seen = Proposals(monkeypatch, ApartEagleDrafter)
    plain, head, path = make_case(folder, name, method, layout, dtype, **shape)
    speculation = KINDS[method][3](ahead="off", **tree)
    sections = {"devices": HERE[name], "dtype": dtype, "speculation": speculation, **TIGHT}
    apart = configuration(folder / "target", None, heads=path, heads_apart=True, **sections)
    found = run_job(apart, use)
    ranks_that_draft = MPI.COMM_WORLD.gather(bool(seen.seen))
    if found is not None:
        assert found["texts"] == plain["texts"] and found["totals"]["num_accepted_draft_tokens"] >= 20
        assert found["preempted"] and found["cached"]
        assert ranks_that_draft == [rank == 1 for rank in range(MPI.COMM_WORLD.size)]
    if dtype != "float32":
        return
    seen.seen.clear()
    seen.paths.clear()
    run_job(apart, use_simply)
    drafted = MPI.COMM_WORLD.gather((seen.seen, seen.paths))
    if drafted is not None:
        seen.seen, seen.paths = drafted[1]
        if tree:
            assert check_trees(seen, folder / "target", head, tree) > 15
        else:
            assert check_proposals(seen, folder / "target", head) > 20


def nothing_is_told(patch: Patch) -> None:
    """The head's rank is so far behind that the target leaves all hidden states out."""
    patch.setattr(HiddenLink, "_bytes_under_way", lambda link: link.most_bytes)


BENDS: list[Bend] = [no_guess_matches, every_guess_is_wrong, no_patience, nothing_is_told, as_it_is]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", APART)
def test_guesses_of_a_head_change_no_text(folder: Path, name: str, dtype: str) -> None:
    plain, _, path = make_case(folder, name, "eagle3", "reference", dtype)
    sections = {"devices": HERE[name], "dtype": dtype, "speculation": KINDS["eagle3"][3](ahead="on"), **TIGHT}
    apart = configuration(folder / "target", None, heads=path, heads_apart=True, **sections)
    for bend in BENDS if (dtype, len(HERE[name][1])) == ("float32", 1) else BENDS[-1:]:
        with Patch.context() as patch:
            bend(patch)
            found = run_job(apart, use)
        if found is None:
            continue
        assert found["texts"] == plain["texts"], bend
        totals = found["totals"]
        accepted, drafted = totals["num_accepted_draft_tokens"], totals["num_draft_tokens"]
        if bend is nothing_is_told:
            assert drafted == 0
        if bend is no_guess_matches:
            assert accepted >= 20 and totals["foresight"]["num_redrafted_rounds"] > 20
        if bend is every_guess_is_wrong:
            assert foreseen(found) > 20
        if bend is as_it_is:
            assert accepted >= 20 and foreseen(found) > 20 and totals["num_guesses"] > 100


class Foreseen:
    """What was proposed by row, in order: text, temperature, seed, tokens, and whether it was foreseen."""

    def __init__(self, patch: Patch) -> None:
        self.by_row: dict[int, list[tuple[list[int], float, int, list[int], bool]]] = {}
        original = AheadEagleDrafter.propose

        def propose(drafter: Any, plan: RoundPlan, probability_rows: Any) -> Draft:
            draft = original(drafter, plan, probability_rows)
            state = drafter.rows
            for index, row in enumerate(plan.decode_rows.tolist()):
                text = state.token_ids[row, : int(state.lengths[row])].tolist()
                temperature = float(state.sampling.numbers[row, columns.TEMPERATURE])
                seed = int(state.sampling.integers[row, columns.SEED])
                tokens = draft.tokens[index, : int(draft.draft_lens[index])].tolist()
                assert draft.foreseen is not None
                seen = (text, temperature, seed, tokens, bool(draft.foreseen[index]))
                self.by_row.setdefault(row, []).append(seen)
            return draft

        patch.setattr(AheadEagleDrafter, "propose", propose)

    def check(self, target: Path, head: Any) -> tuple[int, int]:
        """Compare fresh drafts with the head in plain torch, and foreseen ones with it where it goes on with states of
        its own from the text of the round before; returns how many there were of both."""
        reference, fresh, early = Reference(target), 0, 0
        for seen in self.by_row.values():
            for before, (text, temperature, seed, tokens, is_foreseen) in zip([None, *seen], seen, strict=False):
                if not tokens:
                    continue
                if not is_foreseen:
                    assert tokens == head.draft(reference, text, len(tokens), temperature, seed)
                    fresh += 1
                elif before is not None and text[: len(before[0])] == before[0]:
                    ways = Ways(head, reference, before[0], temperature, seed)
                    way = tuple(text[len(before[0]) :])
                    said = [int(ways.scores((*way, *tokens)[:end]).argmax()) for end in range(len(way) + len(tokens))]
                    assert tokens == said[len(way) :]
                    early += 1
        return fresh, early


@pytest.mark.parametrize("name", APART[:1])
def test_a_head_foresees_what_its_own_states_say(folder: Path, name: str, monkeypatch: Patch) -> None:
    """Greedy rows and sampled ones, with blocks of two tokens, so that guesses begin anywhere in one."""
    seen = Foreseen(monkeypatch)
    monkeypatch.setattr(AheadPolicy, "num_guesses", lambda *_: 40)
    _, head, path = make_case(folder, name, "eagle3", "reference", "float32")
    sections = {
        "devices": HERE[name],
        "speculation": KINDS["eagle3"][3](ahead="on"),
        "scheduler": {"max_batch_size": 4, "max_num_tokens": 48},
        "kv_cache": {"max_tokens": 1024, "block_size": 2},
    }
    run_job(configuration(folder / "target", None, heads=path, heads_apart=True, **sections), use_simply)
    proposed = MPI.COMM_WORLD.gather(seen.by_row)
    if proposed is not None:
        seen.by_row = proposed[1]
        fresh, early = seen.check(folder / "target", head)
        assert fresh > 5 and early > 5
