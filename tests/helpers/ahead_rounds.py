"""Drafting ahead by hand in one process: plans of a scheduler, verdicts of a script, and a drafter without guesses.

`AheadRounds` drives an `AheadDrafter` on a tiny float32 engine through rounds whose verdicts are drawn at random: they
come true as guessed, or not, accept all of a draft, some or none of it, or find that it came too late. After every
proposal each row's draft is compared with what an engine drafts that has just been given the row's tokens: it keeps
nothing from round to round, so it cannot have wrong keys, values, tokens or counts. What a target finds among guesses
that it was told is compared, too; and where a draft comes too late it is what that target has verified.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from windowed_limits import with_windows

from parallel.transports.solo import SoloCommunicator
from trtrun.core.nouns import Draft, PrefillChunk, Request, RoundPlan, RowAdmission, Verdict
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import TokenLists
from trtrun.engine.forwards import EngineShape
from trtrun.engine.rows import RowState
from trtrun.engine.runner import Engine
from trtrun.kvcache.row_states import StateSpace
from trtrun.kvcache.store import KVStore
from trtrun.kvcache.window_places import WindowSpace
from trtrun.loading.loading import load_model
from trtrun.models.config import read_model_config
from trtrun.models.decoder import CausalLM
from trtrun.rounds.exchange.gated_drafts import KnownVerdict, find_cache_hits
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.drafter import AheadDrafter, GuessSpace
from trtrun.speculation.ahead.policy import NEVER

CPU = torch.device("cpu")
MAX_ROWS = 4
NUM_SNAPSHOTS = 5
NO_UPDATES = np.zeros((0, 3), np.int32)
FreshDraft = tuple[list[int], list[list[int]], torch.Tensor | None]
"""Tokens, the candidates of each place without its token, and the distributions [tokens, vocab]."""


def load(path: Path) -> CausalLM:
    """A checkpoint's model in float32."""
    return load_model(path, read_model_config(path), SoloCommunicator(), CPU, torch.float32)[0]


def make_drafter(
    model: CausalLM,
    block_size: int,
    num_blocks: int,
    max_seq_len: int,
    draft_len: int,
    use_logits: bool,
    guesses: int,
    guess_steps: Sequence[int] = (),
    mask_token: int | None = None,
    num_places: int = 0,
) -> AheadDrafter[Any]:
    """A drafter on an engine with a store of its own: `num_blocks` blocks, and behind them those of the guesses; where
    there are places, these have the layers with windows. With `mask_token` it drafts all tokens in one forward."""
    first, vocab = num_blocks, model.config.vocab_size
    # A guess may begin at the last place of a block and writes draft_len tokens.
    guessed = GuessSpace(guesses, MAX_ROWS, first, -(-(block_size - 1 + draft_len) // block_size))
    own = [list(guessed.blocks(index)) for index in range(guesses)]
    refed = 4 * (draft_len + 1) + 8
    states = StateSpace(
        MAX_ROWS + guesses, refed, begins_at_newest=False, num_snapshots=NUM_SNAPSHOTS, guess_blocks=own
    )
    windowed = tuple(window is not None for window in model.config.windows)
    space = WindowSpace(windowed, num_places) if num_places else None
    store = KVStore(
        model.keeps,
        first + guessed.num_blocks,
        block_size,
        torch.float32,
        CPU,
        window_space=space,
        num_row_blocks=num_blocks,
        state_space=states,
    )
    rows = RowState(MAX_ROWS, max_seq_len, block_size, draft_len, vocab, CPU, guesses)
    engine = Engine(model, store, rows, EngineShape(most_masked=0 if mask_token is None else draft_len))
    return AheadDrafter(engine, vocab, draft_len, use_logits, guessed, guess_steps, mask_token)


def plan_of(round_index: int = 0, rows: Sequence[int] = (), lens: Sequence[int] = (), **values: Any) -> RoundPlan:
    """A plan that drafts for `rows`; `values` are further fields."""
    fields: dict[str, Any] = {
        "round_index": round_index,
        "dropped_rows": (),
        "admissions": (),
        "block_updates": NO_UPDATES,
        "prefill": (),
        "decode_rows": np.array(rows, np.int32),
        "draft_lens": np.array(lens, np.int32),
        "catch_up": np.array([2] * len(rows), np.int32),
        "max_context": 1 << 20,
        "timed_rows": tuple(rows),  # whose output is short enough for all that depends on that
    }
    return RoundPlan(**{**fields, **values})


def tokens_of(draft: Draft) -> list[list[int]]:
    """The tokens that a draft on the host proposes, by row."""
    return [row[:count] for row, count in zip(draft.tokens.tolist(), draft.draft_lens.tolist(), strict=True)]


def verdict_of(tokens: Sequence[Sequence[int]]) -> Verdict:
    """A verdict on the host that gives rows these tokens."""
    width = max(map(len, tokens), default=0)
    padded = [[*row, *[-1] * (width - len(row))] for row in tokens]
    return Verdict(torch.tensor(list(map(len, tokens))), torch.tensor(padded).view(len(tokens), width))


class FreshDrafts:
    """Drafts of rows that are admitted, fed and drafted for at once, and then forgotten."""

    def __init__(
        self, model: CausalLM, max_seq_len: int, draft_len: int, use_logits: bool, mask_token: int | None = None
    ) -> None:
        self._draft_len, self._blocks = draft_len, -(-(max_seq_len + draft_len + 2) // 16)
        num_blocks = 1 + MAX_ROWS * self._blocks
        settings = (num_blocks, max_seq_len, draft_len, use_logits, 0, (), mask_token)
        self._drafter = make_drafter(model, 16, *settings)

    def drafts(self, admissions: dict[int, RowAdmission], tokens: dict[int, list[int]]) -> dict[int, FreshDraft]:
        """A draft of `draft_len` tokens for each row of `tokens`, whose parameters are in `admissions`."""
        rows, drafter = list(tokens), self._drafter
        admitted = [
            replace(admissions[row], tokens=np.array(tokens[row], np.int32), num_cached_tokens=0) for row in rows
        ]
        chunks = [PrefillChunk(row, 0, len(tokens[row]), True, True) for row in rows]
        blocks = [(row, column, 1 + row * self._blocks + column) for row in rows for column in range(self._blocks)]
        updates = np.array(blocks, np.int32)
        begun = plan_of(admissions=tuple(admitted), prefill=tuple(chunks), block_updates=updates)
        drafter.begin_round(begun)
        drafter.draft_ahead(begun, guesses=True)
        plan = plan_of(1, rows, [self._draft_len] * len(rows))
        drafter.begin_round(plan)
        drafter.propose(plan, [])
        texts = drafter._texts
        return {row: (texts[row].draft, texts[row].ranked, drafter._probs.get(row)) for row in rows}


class AheadRounds:
    """A scheduler, a drafter that guesses, and a script for the target.

    Attributes:
        seen: how often each thing happened.
        different: places whose candidates were not the fresh draft's, in order.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        seed: int = 0,
        block_size: int = 4,
        draft_len: int = 3,
        use_logits: bool = False,
        guesses: int = 24,
        max_seq_len: int = 90,
        draft_context: int = 90,
        num_tokens: int = 400,
        max_num_tokens: int = 40,
        plans_ahead: int = 1,
        mask_token: int | None = None,
        rows_in_places: int = 0,
    ) -> None:
        """With `rows_in_places` layers with windows have places for so many rows as long as they get."""
        self.random = random.Random(seed)
        self.in_parallel = mask_token is not None
        self.most_guesses, self.use_logits, self.plans_ahead = guesses, use_logits, plans_ahead
        num_blocks = 1 + num_tokens // block_size
        limits = SchedulerLimits(
            MAX_ROWS,
            max_num_tokens,
            max_seq_len,
            draft_context,
            draft_len,
            block_size,
            num_blocks,
            enable_block_reuse=True,
            num_snapshots=NUM_SNAPSHOTS if model.config.layers_with_states else 0,
            plans_ahead=plans_ahead,
            drafts_in_parallel=self.in_parallel,
        )
        if rows_in_places:
            window = max(window for window in model.config.windows if window is not None)
            limits = with_windows(limits, window, max_num_tokens, rows_in_places)
        settings = (num_blocks, max_seq_len, draft_len, use_logits, guesses, (), mask_token, limits.num_places)
        self.drafter = make_drafter(model, block_size, *settings)
        self.fresh = FreshDrafts(model, max_seq_len, draft_len + 1, use_logits, mask_token)
        self.scheduler = Scheduler(limits)
        self.vocab_size = model.config.vocab_size
        self.seen: Counter[str] = Counter()
        self.different: list[tuple[list[int], list[int]]] = []
        self._admissions: dict[int, RowAdmission] = {}
        self._tokens: dict[int, list[int]] = {}
        self._guessed: dict[int, bool] = {}
        self._gained: dict[int, list[int]] = {}
        self._before: KnownVerdict | None = None
        self._number = 0

    def add(self, prompt: Sequence[int], stop_ids: tuple[int, ...] = (), bad: Any = (), **sampling: Any) -> None:
        """Ask for a completion."""
        self._number += 1
        parameters = SamplingParams(seed=100 + self._number, **sampling)
        self.scheduler.add(
            Request(
                self._number,
                tuple(prompt),
                parameters,
                frozenset(stop_ids),
                TokenLists.of(stop_ids, parameters.logit_bias, bad),
            )
        )

    def cancel(self) -> None:
        """End one of the requests, whatever it is at."""
        begun = [number for number in range(1, self._number + 1) if self.scheduler.has_begun(number)]
        self.seen["cancelled"] += bool(begun) and self.scheduler.cancel(self.random.choice(begun))

    def run(
        self,
        most_rounds: int = 10_000,
        *,
        cancels: float = 0.0,
        always: bool = False,
        copies: int = 0,
        lateness: float = 0.08,
    ) -> None:
        """Take rounds until nothing is left to do, of which a share of `lateness` finds the verdict there already;
        `always` guesses and drafts again in every round. In every other one of the first rounds a request comes whose
        prompt is what a row has at that time, `copies` in all."""
        waiting: list[RoundPlan] = []
        for number in range(most_rounds):
            if self._tokens and number % 2 and number < 2 * copies:
                text = self.random.choice(list(self._tokens.values()))
                self.add([*text[:60], self.random.randrange(self.vocab_size)], max_tokens=9)
            while len(waiting) <= self.plans_ahead and (plan := self._schedule(always)) is not None:
                waiting.append(plan)
            if not waiting:
                return
            self._round(waiting.pop(0), is_late=not always and not self.use_logits and self.random.random() < lateness)
            if self.random.random() < cancels:
                self.cancel()

    def _schedule(self, always: bool) -> RoundPlan | None:
        draft_len = None if always else self.random.choice((None, None, None, None, None, 0, 1))
        plan = self.scheduler.schedule(draft_len)
        if plan is None:
            return None
        if always:
            return replace(plan, num_guesses=self.most_guesses)
        guesses = self.random.choice((0, 2, 7, self.most_guesses, self.most_guesses))
        return replace(plan, num_guesses=guesses, redraft_threshold=self.random.choice((1, 1, 2, NEVER)))

    def _round(self, plan: RoundPlan, is_late: bool) -> None:
        drafter = self.drafter
        drafter.begin_round(plan)
        for row in plan.dropped_rows:
            self._guessed.pop(row, None)
        for admission in plan.admissions:
            self.seen["preempted"] += len(admission.tokens) > admission.num_prompt_tokens
            self.seen["cached"] += admission.num_cached_tokens > 0
            self._admissions[admission.row], self._tokens[admission.row] = admission, admission.tokens.tolist()
            self._guessed.pop(admission.row, None)
        rows, lens = plan.decode_rows.tolist(), plan.draft_lens.tolist()
        asked = {row: most for row, most in zip(rows, lens, strict=True) if most > 0 and row in drafter._texts}
        fresh = self.fresh.drafts(self._admissions, {row: self._tokens[row] for row in asked}) if asked else {}
        drafts: list[list[int]] = [[] for _ in rows]
        guesses = drafter.guesses()
        if plan.draft_len and (not is_late or guesses is not None):
            proposed = replace(plan, redraft_threshold=NEVER) if is_late else plan
            drafts = self._propose(proposed, asked, fresh)
            found = None if guesses is None else self._look_up(plan, guesses, drafts)
            drafts = drafts if not is_late else found or [[] for _ in rows]
            self.seen["late, and found"] += is_late and any(drafts)
        num_guesses = drafter.draft_ahead(plan, guesses=not is_late)
        assert num_guesses <= min(plan.num_guesses, self.most_guesses)
        self._check_guesses(asked if num_guesses else {}, fresh)
        self.seen["late"] += is_late
        self._guessed.clear()
        if plan.sampled_rows:
            drafts += [[] for _ in plan.sampled_rows[len(rows) :]]
            verdicts = [self._decide(row, draft) for row, draft in zip(plan.sampled_rows, drafts, strict=True)]
            tokens = [of_row for of_row, _ in verdicts]
            verdict = verdict_of(tokens)
            drafter.observe(plan, verdict, None)
            self._check_written(plan)
            self._before = KnownVerdict(plan, verdict.num_tokens.numpy(), verdict.tokens.numpy())
            self._gained = dict(zip(plan.sampled_rows, tokens, strict=True))
            for row, of_row in self._gained.items():
                self._tokens[row] += of_row
            verified = [count for _, count in verdicts]
            self.scheduler.commit(plan, [len(of_row) for of_row in tokens], tokens, verified)
        else:
            self.scheduler.commit(plan, [], [], [])

    def _propose(self, plan: RoundPlan, asked: dict[int, int], fresh: dict[int, FreshDraft]) -> list[list[int]]:
        """The drafts, each of which is the fresh one, as far as it goes."""
        drafter = self.drafter
        going_on = {row: bool(drafter._texts[row].draft) for row in asked}
        rows = plan.decode_rows.tolist()
        found = drafter.propose(plan, [index for index, row in enumerate(rows) if row in asked])
        drafts, hits, probs = tokens_of(found), found.cache_hits.tolist(), found.draft_probs
        places = iter(range(len(asked)))
        empty = 0
        for row, draft, foreseen in zip(rows, drafts, hits, strict=True):
            if row not in asked:
                assert not draft and not foreseen
                continue
            place, most = next(places), asked[row]
            if row in plan.predicted_output_rows and (given := self._given_behind(row)):
                assert draft == given[:most] and foreseen
                self.seen["given"] += 1
                if self.use_logits and drafter.rows.sampling.sampled_indices([row]):
                    assert probs is not None
                    certain = torch.zeros_like(probs[place, : len(draft)])
                    certain[range(len(draft)), draft] = 1.0
                    assert torch.equal(probs[place, : len(draft)], certain) and not probs[place, len(draft) :].any()
                continue
            expected, ranked, distributions = fresh[row]
            assert foreseen == (self._guessed.get(row, False) or going_on[row])
            if self.in_parallel and going_on[row]:  # what is left of a draft that knew less of the row
                self.seen["left"] += 1
                continue
            assert draft == expected[: len(draft)] and len(draft) <= most, (row, draft, expected)
            self.seen["foreseen"] += foreseen
            self.seen["cut"] += foreseen and len(draft) == most < drafter._draft_len
            empty += not draft
            assert not self.use_logits or len(draft) == most, "the tokens of a seed depend on the draft's length"
            self._compare(draft, drafter._texts[row].ranked, ranked)
            if distributions is not None and probs is not None:
                torch.testing.assert_close(probs[place, : len(draft)], distributions[: len(draft)])
                assert not probs[place, len(draft) :].any()
        missed = len(asked) - sum(hits)
        redrafted = missed > 0 and (self.use_logits or missed >= plan.redraft_threshold)
        assert empty == (0 if redrafted else missed)
        self.seen["redrafted"] += redrafted
        return drafts

    def _look_up(self, plan: RoundPlan, guesses: np.ndarray, drafts: list[list[int]]) -> list[list[int]] | None:
        """What a target finds among guesses, where it goes on with that: of each row what the draft rank has proposed,
        or nothing where that was not foreseen."""
        before = self._before
        if before is None or before.plan.round_index != plan.round_index - 1 or plan.predicted_output_rows:
            return None
        foreseen = find_cache_hits(guesses, plan, before)
        if foreseen is None:
            return None
        lines, found = guesses.tolist(), list[list[int]]()
        decode = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), foreseen, drafts, strict=True)
        for row, most, is_found, proposed in decode:
            key = [row, len(self._gained[row]) - 1, self._gained[row][-1]] if row in self._gained else []
            mine = next((line[3 : 3 + max(most, 0)] for line in lines if line[:3] == key), [])
            assert bool(mine) == is_found and (not mine or mine == proposed), (row, mine, proposed)
            found.append(mine)
            self.seen["found"] += bool(mine)
            self.seen["sat out"] += not mine and most > 0
        return found

    def _given_behind(self, row: int) -> list[int]:
        """What the draft that came with a row's request says behind its tokens."""
        admission, tokens = self._admissions[row], self._tokens[row]
        draft, output = admission.draft_tokens.tolist(), tokens[admission.num_prompt_tokens :]
        return draft[len(output) :] if draft[: len(output)] == output else []

    def _compare(self, draft: list[int], found: list[list[int]], expected: list[list[int]]) -> None:
        """Candidates beside the tokens of a draft."""
        for place, token in enumerate(draft):
            assert token not in found[place]
            if found[place] != expected[place]:
                self.different.append((found[place], expected[place]))

    def _check_guesses(self, asked: dict[int, int], fresh: dict[int, FreshDraft]) -> None:
        """A guess is no token that the draft has there; behind a whole draft the candidates are the fresh draft's."""
        for row, num_accepted, token in self.drafter._guesses._places:
            draft = self.drafter._texts[row].draft
            assert draft[num_accepted : num_accepted + 1] != [token]
        rows = sorted(asked.keys() - self.drafter._has_given)
        texts = self.drafter._texts
        if self.in_parallel and rows:  # what follows a whole draft is known once it was fed
            whole = {row: self._tokens[row] + texts[row].draft for row in rows}
            fresh = self.fresh.drafts(self._admissions, whole)
        for row in rows:
            text = texts[row]
            place = len(text.draft)
            tokens, ranked, _ = fresh[row]
            if self.in_parallel:
                tokens, ranked = [*text.draft, tokens[0]], [*text.ranked[:place], ranked[0]]
            if not self.use_logits and text.ranked[place] != [tokens[place], *ranked[place]]:
                self.different.append((text.ranked[place], [tokens[place], *ranked[place]]))
            self.seen["places"] += place + 1

    def _check_written(self, plan: RoundPlan) -> None:
        """The draft's store lacks no more of a row than its scheduler takes it to, which offers the rest for reuse."""
        most = self.scheduler.limits.most_unfed(plan.draft_len)
        for row, count in zip(plan.decode_rows.tolist(), plan.catch_up.tolist(), strict=True):
            text = self.drafter._texts.get(row)
            assert not count or text is None or text.length - text.written <= most, (row, text)

    def _decide(self, row: int, draft: list[int]) -> tuple[list[int], int]:
        """A verdict on a row's draft: the tokens gained, and how many were verified."""
        chance, verified = self.random.random(), len(draft)
        given = self._given_behind(row)
        if given and self.random.random() < 0.8 and given[: len(draft)] == draft and len(given) > len(draft):
            self._guessed[row] = (verified, given[verified]) in self._guesses_of(row)
            return given[: verified + 1], verified
        if draft and not self.use_logits and chance < 0.12:
            verified = self.random.randrange(len(draft))  # not all of it arrived
        guessed = [(count, token) for count, token in self._guesses_of(row) if count <= verified]
        if verified < len(draft) and chance < 0.08:
            count, token = verified, draft[verified]
            self.seen["goes on"] += 1
        elif guessed and chance < 0.75:
            count = self.random.choice(sorted({count for count, _ in guessed}))
            token = self.random.choice([token for of_place, token in guessed if of_place == count])
        else:
            count, token = self.random.randrange(verified + 1), self.random.randrange(self.vocab_size)
            if draft[count : count + 1] == [token]:
                token = (token + 1) % self.vocab_size
        goes_on = draft[count : count + 1] == [token]
        self._guessed[row] = not goes_on and (count, token) in guessed
        self.seen["hit all" if count == len(draft) else "hit some" if count else "hit none"] += self._guessed[row]
        self.seen["missed"] += not goes_on and not self._guessed[row]
        return [*draft[:count], token], verified

    def _guesses_of(self, row: int) -> list[tuple[int, int]]:
        return [(count, token) for of_row, count, token in self.drafter._guesses._places if of_row == row]
