"""Two fake engines with real block stores, and a driver that runs them under the real scheduler.

A slot of a store holds what a key/value vector stands for: its position and a checksum of the whole token chain up to
it, computed from the slot before it. The target's next token is a function of the slot that was just written, so a
wrong table, a stale block or a hole changes the output; and every read of a context is compared with the chain the
engine expects. Where limits have windows, there is a second store of places, whose slots are compared as far back as a
window looks. Engines know rows from plans and verdicts only, as real ranks do.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from trtrun.core.nouns import FinishReason, Request, RoundPlan
from trtrun.core.sampling_params import SamplingParams
from trtrun.scheduling.completions import Completion, RowResult
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.planning import MOST_MISSED_ROUNDS
from trtrun.scheduling.scheduler import Scheduler

VOCABULARY = 7


def chain(tokens: list[int], parent: int = 0) -> list[int]:
    """The checksum of each prefix of `tokens`."""
    values = []
    for token in tokens:
        parent = zlib.crc32(bytes([token]), parent)
        values.append(parent)
    return values


def target_token(checksum: int) -> int:
    """What the target says after the chain with this checksum."""
    return zlib.crc32(checksum.to_bytes(4, "little")) % VOCABULARY


def make_request(
    request_id: int,
    prompt: list[int],
    max_tokens: int = 8,
    stop_ids: tuple[int, ...] = (),
    draft_len: int | None = None,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, draft_len=draft_len)
    return Request(request_id, tuple(prompt), sampling, frozenset(stop_ids))


def reference(request: Request, limits: SchedulerLimits) -> tuple[list[int], FinishReason]:
    """Sequential decoding by the target alone, one token at a time, without blocks."""
    tokens, output = list(request.prompt_token_ids), []
    while True:
        output.append(target_token(chain(tokens)[-1]))
        tokens.append(output[-1])
        if output[-1] in request.stop_ids:
            return output, FinishReason.STOP
        if len(output) >= request.sampling.max_tokens or len(tokens) >= limits.max_length:
            return output, FinishReason.LENGTH


def output_of(completion: Completion) -> list[int]:
    """The tokens that it has gained."""
    return completion.token_ids[len(completion.request.prompt_token_ids) :]


@dataclass
class EngineRow:
    tokens: list[int]
    has_draft_kv: bool
    num_computed: int
    table: dict[int, int] = field(default_factory=dict)


class Engine:
    """One engine: a store of slots and the rows it was told of."""

    def __init__(self, limits: SchedulerLimits, context: int, name: str) -> None:
        self.block_size = limits.block_size
        self.context = context
        self.name = name
        self.store: list[tuple[int, int] | None] = [None] * (limits.num_blocks * limits.block_size)
        self.window = 0 if limits.windows is None else limits.windows.window
        self.in_places: list[tuple[int, int] | None] = [None] * (limits.num_places * limits.block_size)
        self.places: dict[int, int] = {}
        self.rows: dict[int, EngineRow] = {}

    def apply(self, plan: RoundPlan) -> None:
        """Dropped rows, admissions, block updates: in this order."""
        for row in plan.dropped_rows:
            del self.rows[row]
        for admission in plan.admissions:
            assert admission.row not in self.rows, "an admission into a row that was not dropped"
            tokens = admission.tokens.tolist()
            self.rows[admission.row] = EngineRow(tokens, admission.has_draft_kv, admission.num_cached_tokens)
        for row, index, block in plan.block_updates.tolist():
            table = self.rows[row].table
            assert block != 0 and index == len(table), "tables grow at their end and never hold the null block"
            table[index] = block
        blocks, places = plan.window_places[:, 0].tolist(), plan.window_places[:, 1].tolist()
        assert len({*blocks}) == len(blocks), "a block is told once: copies on a device have no order"
        self.places.update(zip(blocks, places, strict=True))
        given = [place for place in self.places.values() if place]
        assert len({*given}) == len(given), "a place has one block"

    def forward(self, row: int, start: int, tokens: list[int], frozen: frozenset[int]) -> list[int]:
        """Compute `tokens` at positions from `start`, reading all positions before; return the checksums."""
        state = self.rows[row]
        others = {block for number, other in self.rows.items() if number != row for block in other.table.values()}
        known = chain(state.tokens[:start])
        for position in range(start):
            found = self.store[self._slot(state, position)]
            assert found == (position, known[position]), f"{self.name} reads {found} at {position} of row {row}"
        for position in range(max(0, start - self.window + 1), start) if self.window else ():
            found = self.in_places[self._window_slot(state, position)]
            assert found == (position, known[position]), f"{self.name} sees {found} at {position} of row {row}"
        checksums = chain(tokens, known[-1] if known else 0)
        for position, checksum in enumerate(checksums, start):
            block = state.table[position // self.block_size]
            assert position < self.context, f"{self.name} writes position {position} of {self.context}"
            assert block not in frozen, f"{self.name} writes to the shared block {block}"
            assert block not in others, f"{self.name} writes to block {block} of another row"
            self.store[self._slot(state, position)] = (position, checksum)
            if self.window:
                self.in_places[self._window_slot(state, position)] = (position, checksum)
        return checksums

    def content(self, block: int, *, in_place: bool = False) -> list[tuple[int, int] | None]:
        store, place = (self.in_places, self.places[block]) if in_place else (self.store, block)
        return store[place * self.block_size : (place + 1) * self.block_size]

    def _window_slot(self, state: EngineRow, position: int) -> int:
        place = self.places.get(state.table[position // self.block_size], 0)
        assert place, f"{self.name} has no place for position {position}"
        return place * self.block_size + position % self.block_size

    def _slot(self, state: EngineRow, position: int) -> int:
        return state.table[position // self.block_size] * self.block_size + position % self.block_size


class Job:
    """Scheduler, both engines, and every check that holds at any time.

    Args:
        limits: of the scheduler.
        seed: of drafts and of the order of events.
        acceptance: how likely a draft token is the target's.
        num_owners: that requests have in turns.
    """

    def __init__(self, limits: SchedulerLimits, seed: int = 0, acceptance: float = 0.7, num_owners: int = 1) -> None:
        self.limits = limits
        self.num_owners = num_owners
        self.random = random.Random(seed)
        self.acceptance = acceptance
        self.has_draft_store = limits.draft_max_seq_len is not None
        self.scheduler = Scheduler(limits)
        self.target = Engine(limits, limits.max_seq_len, "target")
        self.draft = Engine(limits, limits.draft_max_seq_len or 0, "draft")
        self.plans: deque[tuple[RoundPlan, frozenset[int]]] = deque()
        self.results: deque[tuple[list[int], list[list[int]], list[int]]] = deque()
        self.requests: dict[int, Completion] = {}
        self.streamed: dict[int, list[int]] = {}
        self.first_admissions: dict[Hashable, list[int]] = {}
        self.verified: set[int] = set()
        self.num_rounds = 0
        self.most_drafted: int | None = None
        self.is_unsure = False

    def add(self, request: Request, group: str | None = None) -> Completion:
        owner = request.request_id % self.num_owners
        running = self.scheduler.add(request, group=group, owner=owner)
        self.requests[request.request_id] = running
        self.streamed[request.request_id] = []
        self.verified.update(chain(list(request.prompt_token_ids) + reference(request, self.limits)[0]))
        return running

    def schedule(self, *, changes_mind: bool = True) -> RoundPlan | None:
        # The pacer changes its mind now and then, and often wants no drafts for long.
        if changes_mind and self.random.random() < 0.1:
            self.most_drafted = self.random.choice((None, 0, 0, 1))
        plan = self.scheduler.schedule(self.most_drafted, is_unsure=self.is_unsure)
        if plan is None:
            assert self.plans or not self.scheduler.has_work, "live-lock: work, nothing outstanding, and no plan"
            return None
        self.num_rounds += 1
        self.check_places()
        self.plans.append((plan, self.scheduler._batch.cache.blocks))
        decode, prefill = plan.decode_rows.tolist(), [chunk.row for chunk in plan.prefill]
        assert len(set(decode + prefill)) == len(decode + prefill) > 0, "a row is in decode_rows or in prefill, once"
        spent = sum(max(0, length) + 1 for length in plan.draft_lens.tolist()) + sum(c.length for c in plan.prefill)
        assert spent <= (self.limits.max_num_tokens if len(decode + prefill) == 1 else self.limits.shared_tokens)
        assert all(chunk.length > 0 for chunk in plan.prefill)
        for admission in plan.admissions:
            admitted = self.requests[admission.request_id]
            of_group = self.first_admissions.setdefault((admitted.owner, admitted.group), [])
            if admission.request_id not in of_group:
                of_group.append(admission.request_id)
            assert admission.num_cached_tokens < len(admission.tokens)
            assert admission.num_prompt_tokens == len(self.requests[admission.request_id].request.prompt_token_ids)
        for of_group in self.first_admissions.values():
            assert of_group == sorted(of_group), "first come first served"
        return plan

    def execute(self) -> None:
        """Run the oldest plan that was not run yet on both engines, the draft first."""
        plan, frozen = self.plans[len(self.results)]
        self.draft.apply(plan)
        self.target.apply(plan)
        drafts = zip(plan.decode_rows, plan.draft_lens, plan.catch_up.tolist(), strict=True)
        proposals = [self._propose(row, length, count, frozen) for row, length, count in drafts]
        gained = [self._verify(r, p, frozen) for r, p in zip(plan.decode_rows, proposals, strict=True)]
        for chunk in plan.prefill:
            token = self._prefill(chunk.row, chunk.start, chunk.length, chunk.has_draft_kv, frozen)
            assert chunk.is_last == (chunk.start + chunk.length == len(self.target.rows[chunk.row].tokens))
            if chunk.is_last:
                gained.append([token])
        for row, tokens in zip(plan.sampled_rows, gained, strict=True):
            self.target.rows[row].tokens.extend(tokens)
            self.draft.rows[row].tokens.extend(tokens)
            assert len(self.target.rows[row].tokens) <= plan.max_context
        padding = [[*tokens, -1, -1] for tokens in gained]
        verified = [len(proposal) for proposal in proposals]
        verified += [0] * (len(gained) - len(verified))
        self.results.append(([len(tokens) for tokens in gained], padding, verified))

    def commit(self) -> list[RowResult]:
        plan, _ = self.plans.popleft()
        num_tokens, tokens, verified = self.results.popleft()
        before = {number: running.statistics.num_draft_tokens for number, running in self.requests.items()}
        results = self.scheduler.commit(plan, num_tokens, tokens, verified)
        for result in results:
            number, statistics = result.completion.request.request_id, result.completion.statistics
            self.streamed[number].extend(result.new_token_ids)
            assert statistics.num_draft_tokens - before[number] == verified[result.index_in_verdict]
        self.check_shared_blocks()
        return results

    def step(self) -> RoundPlan | None:
        """One round with nothing outstanding."""
        plan = self.schedule()
        if plan is not None:
            self.execute()
            self.commit()
        return plan

    def run(self, requests: list[Request], cancel: float = 0.0) -> list[int]:
        """Arrivals, cancels, plans, rounds and commits in random order until nothing is left; then check all.

        Returns:
            Ids of the requests that have ended, each with its output checked against the sequential reference.
        """
        arriving = deque(requests)
        while arriving or self.scheduler.has_work or self.plans:
            assert self.num_rounds < 3000, "live-lock"
            choices = []
            if arriving:
                choices.append("add")
            if len(self.plans) <= self.limits.plans_ahead and self.scheduler.has_work:
                choices += ["schedule"] * 3
            if len(self.results) < len(self.plans):
                choices += ["execute"] * 2
            if self.results:
                choices += ["commit"] * 2
            choice = self.random.choice(choices)
            if choice == "add":
                self.add(arriving.popleft(), self.random.choice((None, None, "one", "other")))
            elif choice == "schedule":
                self.schedule()
            elif choice == "execute":
                self.execute()
            else:
                self.commit()
            if self.requests and self.random.random() < cancel:
                self.scheduler.cancel(self.random.choice(list(self.requests)))
        return self.check_outputs()

    def check_outputs(self) -> list[int]:
        """Every output equals the sequential reference, or starts it when cancelled; and idle means whole."""
        checked = []
        for running in self.requests.values():
            output, reason = reference(running.request, self.limits)
            assert self.streamed[running.request.request_id] == output_of(running)
            if running.finish_reason is FinishReason.CANCELLED:
                assert output_of(running) == output[: len(output_of(running))]
            else:
                assert (output_of(running), running.finish_reason) == (output, reason)
            checked.append(running.request.request_id)
        assert self.scheduler.idle_is_whole()
        return checked

    def check_shared_blocks(self) -> None:
        """Every block on offer is written whole with one verified chain, by both engines unless it is said to be in the
        target's store alone."""
        cache = self.scheduler._batch.cache
        for block in cache.blocks:
            content = self.target.content(block)
            for slot in content:
                assert slot is not None and slot[1] in self.verified, f"block {block} holds an unverified token"
            positions = [slot[0] for slot in content if slot is not None]
            assert positions[0] % self.limits.block_size == 0
            assert positions == list(range(positions[0], positions[0] + self.limits.block_size))
            if block not in cache._target_only:
                assert self.draft.content(block) == content, f"the draft has not written block {block} whole"
            # Places that were given back since the plan, or are given in one that was not run, are told later.
            if cache.windows is not None and cache.windows.has_place(block) and not self.plans:
                assert self.target.content(block, in_place=True) == content, f"block {block} has another's place"

    def check_places(self) -> None:
        """No row holds more places than there may be, and those that nobody holds can be found again."""
        windows, rule = self.scheduler._batch.windows, self.limits.windows
        if windows is None or rule is None:
            return
        for running in self.scheduler._batch.requests:
            assert len(running.table.placed) <= rule.blocks_per_row
            assert all(windows.has_place(running.table.blocks[index]) for index in running.table.placed)
        held = {place for place, count in enumerate(windows._pool._references) if count}
        for place, block in windows._block_at.items():
            may_be_found = block in self.scheduler._batch.cache.blocks or self.scheduler._batch.pool.references(block)
            assert place in held or may_be_found, f"nobody can find what lies at {place}"

    def _propose(self, row: int, draft_len: int, catch_up: int, frozen: frozenset[int]) -> list[int]:
        state = self.draft.rows[row]
        if not self.has_draft_store:
            assert catch_up == 0, "nothing follows the row that could catch up"
            return self._guess(state.tokens, self.random.randint(0, max(0, draft_len)))
        if draft_len < 0:
            state.has_draft_kv = False
        if catch_up == 0:
            assert draft_len <= 0, "nothing can be drafted without the newest token"
            return []
        assert state.has_draft_kv, "the draft engine was told to leave this row alone"
        assert 2 <= catch_up <= 2 + MOST_MISSED_ROUNDS or self.is_unsure
        frozen = frozen if not self.is_unsure else frozenset()  # prompts that it reads late are the target's to share
        start = max(0, len(state.tokens) - catch_up)
        # Catch up the last two committed tokens, the one before the last may be the bonus hole, and all that it missed.
        checksum = self.draft.forward(row, start, state.tokens[start:], frozen)[-1]
        committed, proposed = list(state.tokens), []
        for index in range(draft_len):
            right = self.random.random() < self.acceptance
            proposed.append(target_token(checksum) if right else self.random.randrange(VOCABULARY))
            state.tokens = committed + proposed
            if index + 1 < draft_len:
                checksum = self.draft.forward(row, len(state.tokens) - 1, proposed[-1:], frozen)[0]
        state.tokens = committed
        return proposed

    def _guess(self, tokens: list[int], count: int) -> list[int]:
        """A proposal without a store: right or wrong as a draft engine's, and as long as it happens to be."""
        proposed: list[int] = []
        for _ in range(count):
            right = self.random.random() < self.acceptance
            proposed.append(target_token(chain(tokens + proposed)[-1]) if right else self.random.randrange(VOCABULARY))
        return proposed

    def _verify(self, row: int, proposed: list[int], frozen: frozenset[int]) -> list[int]:
        state = self.target.rows[row]
        start = len(state.tokens) - 1
        answers = [target_token(c) for c in self.target.forward(row, start, [state.tokens[-1], *proposed], frozen)]
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == answers[accepted]:
            accepted += 1
        return answers[: accepted + 1]

    def _prefill(self, row: int, start: int, length: int, has_draft_kv: bool, frozen: frozenset[int]) -> int:
        checksum = 0
        for engine in (self.draft, self.target) if has_draft_kv else (self.target,):
            state = engine.rows[row]
            assert start == state.num_computed and state.has_draft_kv == (has_draft_kv or self.is_unsure)
            checksum = engine.forward(row, start, state.tokens[start : start + length], frozen)[-1]
        for engine in (self.draft, self.target):
            engine.rows[row].num_computed += length
        return target_token(checksum)
