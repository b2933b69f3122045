"""Matchers of the rows that are guided, and the masks of a round: which tokens each place of them may take.

A matcher follows what its row has gained, as verdicts tell it. Masks of a draft are made on forks of it, so that
nothing has to be rolled back. On a GPU all of this is done while the target computes: the verdict of the round before
and the round's own draft are copied to the host behind what is launched anyway, and the masks are on the device before
the logits are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from weakref import WeakValueDictionary

import numpy as np
import torch

from parallel.watchdog.activity import Activity
from trtrun.core.guide import Guide, GuideStart
from trtrun.core.nouns import RoundPlan, RowAdmission, Verdict
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.host_copies import HostCopies, HostDraft
from trtrun.guiding.masks import MaskJob, MaskMaker, RoundBudget, mask_jobs
from trtrun.guiding.row_guide import Begun, GuideBuilds, GuidePace, RowGuide
from trtrun.guiding.walks import MadeMasks, Walk
from trtrun.sampling.row_steps import TokenMasks

_ANYTHING = Guide("json", "true")


class RowGuides:
    """The guides of the rows of one rank."""

    def __init__(
        self,
        make_grammars: Callable[[], Grammars],
        vocab_size: int,
        device: torch.device,
        num_threads: int = 1,
        share: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        follows: bool = True,
        activity: Activity | None = None,
        seconds: float = float("inf"),
    ) -> None:
        """Guide rows whose logits are [vocab_size] on `device`.

        Args:
            make_grammars: called when a row is first guided; may raise InvalidRequestError.
            vocab_size: V.
            device: of the rows.
            num_threads: that make masks.
            share: what the rank that decides has in a tensor, on all ranks of a group that draft alike. Collective.
            follows: whether this rank keeps matchers; one that does not is told what must follow by `share`.
            activity: where the process says what its threads are doing; None where nobody looks.
            seconds: that a guide may take to build.
        """
        self._share = share
        self._follows = follows
        self._vocab_size = vocab_size
        self._device = device
        self._num_threads = num_threads
        self._budget, self._of_drafts = RoundBudget(), RoundBudget()
        self._builds = GuideBuilds(make_grammars, num_threads, activity, seconds)
        self._known_maker: MaskMaker | None = None
        self._begun: dict[GuideStart, Future[Begun]] = {}
        self._paces: WeakValueDictionary[Guide, GuidePace] = WeakValueDictionary()
        self._rows: dict[int, RowGuide] = {}
        self._pending: tuple[list[tuple[int, RowGuide]], HostCopies] | None = None
        self._walked: tuple[dict[int, int], Walk] | None = None

    def prepare(self) -> None:
        """Have the vocabulary read before a row is guided, in a thread beside this one."""
        self._builds.submit(GuideStart(_ANYTHING))

    def build(self, start: GuideStart) -> None:
        """Have a start built beside the rounds, for rows to come, until it is forgotten. Does not wait."""
        if self._follows:
            self._begun[start] = self._builds.submit(start)

    def forget(self, start: GuideStart) -> None:
        """Forget a beginning: no row to come has it; rows that had it go on."""
        begun = self._begun.pop(start, None)
        if begun is not None:
            begun.cancel()

    def is_built(self, start: GuideStart) -> bool:
        """Whether no row would wait for a start that is being built; one that cannot be is."""
        return not self._follows or self._begun[start].done()

    def wait_for_any(self, starts: Iterable[GuideStart], seconds: float) -> None:
        """Wait until one of some starts is built, `seconds` at most."""
        wait([self._begun[start] for start in starts if self._follows], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Begin no build that has not begun."""
        self._builds.close()

    def take_seconds(self) -> float:
        """What rounds computed for guides in their thread since the last call, as far as it is counted."""
        return self._budget.take_seconds() + self._of_drafts.take_seconds()

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come and go."""
        self._walked = None
        for row in plan.dropped_rows:
            self._rows.pop(row, None)
        for admission in plan.admissions:
            self._rows.pop(admission.row, None)
            if admission.sampling.guided is not None:
                self._rows[admission.row] = self._admit(admission) if self._follows else RowGuide()
        self._budget.begin(len(self._rows))
        self._of_drafts.begin(len(self._rows))

    def _admit(self, admission: RowAdmission) -> RowGuide:
        guide = admission.sampling.guided
        assert guide is not None
        output = tuple(admission.tokens[admission.num_prompt_tokens :].tolist())
        alone = self._begun.get(GuideStart(guide, output, is_alone=True))
        begun = alone or self._begun.get(GuideStart(guide, output))
        if begun is None:  # nobody has had it built before, as of the rounds before the first request
            begun = self._builds.submit(GuideStart(guide, output))
        return RowGuide(begun, len(output), self._paces.setdefault(guide, GuidePace()))

    @property
    def _maker(self) -> MaskMaker | None:
        """The maker of matchers; None if no grammar could be read, and none is followed."""
        grammars = self._builds.grammars
        if self._known_maker is None and grammars is not None:
            size = max(self._vocab_size, grammars.vocab_size)
            self._known_maker = MaskMaker(size, self._num_threads)
        return self._known_maker

    def guided(self, rows: Sequence[int]) -> list[int]:
        """Places within `rows` of those that are guided."""
        return [place for place, row in enumerate(rows) if row in self._rows] if self._rows else []

    def note_verdict(self, rows: Sequence[int], verdict: Verdict) -> None:
        """Each of `rows` gains what the verdict says: it is waited for once somebody asks what may follow."""
        guides = [(place, self._rows[rows[place]]) for place in self.guided(rows)]
        if guides and self._follows:
            self.settle()
            self._pending = guides, HostCopies(verdict.num_tokens, verdict.tokens)

    def settle(self) -> None:
        """Follow the last verdict, once it is on the host."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        guides, copies = pending
        counts, tokens = copies.lists()
        for place, guide in guides:
            if guide.waits:
                continue
            if self._budget.is_spent:
                guide.wait()
                continue
            with self._budget.spending():
                guide.follow(tokens[place][: counts[place]])

    def waiting(self, rows: Sequence[int]) -> dict[int, int]:
        """WAITS or WAITS_ALONE, by their places within `rows`, for rows that gain nothing until what they go on with is
        built beside the rounds."""
        waits = {place: self._rows[rows[place]].waits for place in self.guided(rows)}
        return {place: how for place, how in waits.items() if how}

    def masks(self, rows: Sequence[int], width: int, draft: HostDraft | None = None) -> TokenMasks | None:
        """Masks of the places that are decided in a round; None if no row is guided.

        Args:
            rows: the R rows.
            width: of the draft: rows have one place more, of which those without a draft use the first.
            draft: of the first of them; None where none of these is guided.
        """
        guided = self.guided(rows)
        if not guided:
            return None
        self.settle()
        guides = [self._rows[rows[place]] for place in guided]
        return self._make_masks(rows, guided, guides, width + 1, draft)

    def forced(self, plan: RoundPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What must follow the plan's decode rows, because nothing else may: tokens [decode_rows, draft_len] int64 on
        the device, and which of them [decode_rows, draft_len] bool, in each row the first ones; None where nothing
        must. Of the ways to spell what must follow, the grammar engine allows the tokenizer's own alone."""
        rows: list[int] = plan.decode_rows.tolist()
        guided = self.guided(rows) if plan.draft_len else []
        if not guided:
            return None
        most = plan.draft_lens.tolist()
        tokens = torch.full((len(rows), plan.draft_len), -1, dtype=torch.int64)
        for place, found in zip(
            guided, self._forced_behind({rows[place]: most[place] for place in guided}), strict=True
        ):
            tokens[place, : len(found)] = torch.tensor(found, dtype=torch.int64)
        if self._share is None and int(tokens.max()) < 0:
            return None
        tokens = tokens.to(self._device, non_blocking=True)
        if self._share is not None:
            tokens = self._share(tokens)
        return tokens.clamp(min=0), tokens >= 0

    def forced_behind(self, most: Mapping[int, int]) -> list[list[int]]:
        """What must follow each of some rows, at most as many tokens as `most` says; none of one that is not guided.
        All ranks of a group that draft alike are told what the first of them has found."""
        found = self._forced_behind(most)
        width = max(most.values(), default=0)
        if self._share is None or width <= 0 or not self.guided([*most]):
            return found
        told = torch.full((len(found), width), -1, dtype=torch.int64)
        for place, tokens in enumerate(found):
            told[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        shared = self._share(told.to(self._device)).tolist()
        return [[token for token in tokens if token >= 0] for tokens in shared]

    def _forced_behind(self, most: Mapping[int, int]) -> list[list[int]]:
        """Tokens that must follow, as this rank's matchers have them."""
        self.settle()
        forced: list[list[int]] = []
        for row, length in most.items():
            guide = self._rows.get(row)
            matcher = None if guide is None or guide.pace.is_slow or self._of_drafts.is_spent else guide.matcher
            if matcher is None:
                forced.append([])
                continue
            with self._of_drafts.spending():
                forced.append(matcher.deep_copy().compute_ff_tokens()[: max(0, length)])
        return forced

    def walk(self, rows: Sequence[int]) -> Walk | None:
        """What may follow `rows` and the tokens of a draft behind them, one after the other; None where none of them is
        guided."""
        guided = self.guided(rows)
        if not guided:
            return None
        self.settle()
        guides = [self._rows[rows[place]] for place in guided]
        matchers = [None if guide.pace.is_slow else guide.matcher for guide in guides]
        forks = [None if matcher is None else matcher.deep_copy() for matcher in matchers]
        maker = self._maker or MaskMaker(self._vocab_size, 1)

        def note(line: int, seconds: float) -> None:
            guides[line].pace.note(seconds)

        def end(line: int) -> None:
            guides[line].is_ended = True

        walk = Walk(maker, len(rows), guided, forks, self._device, end, note, self._of_drafts)
        self._walked = {rows[place]: place for place in guided}, walk
        return walk

    def _make_masks(
        self,
        rows: Sequence[int],
        guided: Sequence[int],
        guides: Sequence[RowGuide],
        width: int,
        draft: HostDraft | None,
    ) -> TokenMasks:
        """Masks of the rows at places `guided`, whose guides are `guides`, for `width` positions each. Those that were
        made while the draft was are taken from there."""
        words = self._maker.words if self._maker is not None else -(-self._vocab_size // 32)
        made = self._made_masks(rows, guided, guides, draft)
        # A line for each position that is still to be made, and one that allows nothing for those behind a draft.
        counts = [1 if number in made else width for number in range(len(guided))]
        num_places, num_lines = len(rows) * width, sum(counts) + bool(made)
        # One copy for both: places in front, and the bits behind them.
        packed = torch.empty(num_places + num_lines * words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        places, bits = packed[:num_places].view(len(rows), width), packed[num_places:].view(num_lines, words)
        columns = np.full((len(rows), width), -1, dtype=np.int32)
        jobs, slow, owners = list[MaskJob](), list[MaskJob](), list[RowGuide]()
        known: dict[int, torch.Tensor] = {}
        for number, (place, guide) in enumerate(zip(guided, guides, strict=True)):
            line, is_drafted = len(owners), draft is not None and place < draft.num_rows
            owners += [guide] * counts[number]
            if number in made:
                lines, last = made[number]
                own = [num_lines + of_walk for of_walk in lines] + [num_lines - 1 if last is None else line]
                columns[place] = (own + [num_lines - 1] * width)[:width]
                jobs += [] if last is None else [MaskJob(last, line, [], is_first=False)]
                continue
            columns[place] = range(line, line + width)
            matcher = None if guide.is_ended else guide.matcher
            if matcher is None:
                continue
            if guide.first is not None and not is_drafted:
                known[line] = guide.first
            elif guide.pace.is_slow:
                slow += mask_jobs(matcher, line, None, 0)
            else:
                with self._budget.spending():  # of a tree, each node is looked at
                    jobs += mask_jobs(matcher, line, draft if not self._budget.is_short else None, place)
        # A job writes the whole of its first line. To clear that, too, takes a tenth of a round's time.
        others = {*range(num_lines)} - {job.line for job in (*jobs, *slow)}
        if others:
            bits.numpy()[[*others]] = 0
        for line, first in known.items():
            bits[line, : len(first)] = first
        if self._maker is not None and (jobs or slow):
            self._fill(bits, jobs, slow, owners)
        places.copy_(torch.from_numpy(columns))
        packed = packed.to(self._device, non_blocking=True)
        places, bits = packed[:num_places].view(len(rows), width), packed[num_places:].view(num_lines, words)
        if made and self._walked is not None:
            bits = torch.cat((bits, self._walked[1].made_bits()))
        return TokenMasks(places, bits)

    def _made_masks(
        self, rows: Sequence[int], guided: Sequence[int], guides: Sequence[RowGuide], draft: HostDraft | None
    ) -> dict[int, MadeMasks]:
        """What was made of the rows' masks while this rank drafted, by their numbers in `guided`."""
        if self._walked is None or draft is None or draft.is_tree:
            return {}
        places, walk = self._walked
        found = {}
        for number, (place, guide) in enumerate(zip(guided, guides, strict=True)):
            if place < draft.num_rows and rows[place] in places and not (guide.is_ended or guide.pace.is_slow):
                with self._budget.spending():
                    made = walk.made(places[rows[place]], draft.chain(place))
                if made is not None:
                    found[number] = made
        return found

    def _fill(
        self, bits: torch.Tensor, jobs: Sequence[MaskJob], slow: Sequence[MaskJob], guides: Sequence[RowGuide]
    ) -> None:
        """Make the masks of a round; `guides` are those of each line."""
        maker = self._maker
        assert maker is not None
        failed = maker.fill(bits, jobs, self._budget, slow)
        for line, seconds in maker.times:
            guides[line].count_slow(seconds)
        for line in maker.slow_lines:
            guides[line].is_ended = True
        skipped = {*maker.skipped}
        for job in [*jobs, *slow]:
            if job.is_first and job.line in skipped:
                guides[job.line].wait()
        for job in failed:
            # Behind drafts nothing is allowed then, which ends a round there. The next one looks again.
            guide = guides[job.line]
            matcher = guide.matcher
            if not job.is_first or matcher is None:
                continue
            (first,) = mask_jobs(matcher, job.line, None, 0)
            if maker.fill(bits, [first], self._budget):
                guide.give_up(first.matcher)
            elif maker.skipped:
                guide.wait()
