"""Matchers of the rows that are guided, and the masks of a round: which tokens each place of them may take.

A matcher follows what its row has gained, as verdicts tell it. Masks of a draft are made on forks of it, so that
nothing has to be rolled back. On a GPU all of this is done while the target computes: the verdict of the round before
and the round's own draft are copied to the host behind what is launched anyway, and the masks are on the device before
the logits are.

It knows plans, grammars and bits. It does not know models, how tokens are chosen, or what the draft was made of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch
from llguidance import LLMatcher

from parallel.watchdog.activity import Activity
from trtrun.core.guide import Guide
from trtrun.core.nouns import RoundPlan, RowAdmission, Verdict
from trtrun.errors import InvalidRequestError
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.host_copies import HostCopies, HostDraft
from trtrun.guiding.masks import MaskJob, MaskMaker, mask_jobs
from trtrun.guiding.row_guide import SLOW_SECONDS, RowGuide, go_on
from trtrun.guiding.walk import Walk
from trtrun.sampling.token_masks import TokenMasks

logger = logging.getLogger(__name__)

_ANYTHING = Guide("json", "true")
_FEWEST_BUILDERS, _MOST_BUILDERS = 2, 4
"""Threads that build guides: as many as make masks, but a large guide never keeps all others waiting."""


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
        self._activity, self._seconds = activity or Activity(), seconds
        self._follows = follows
        self._make_grammars = make_grammars
        self._vocab_size = vocab_size
        self._device = device
        self._num_threads = num_threads
        self._grammars: Grammars | None = None
        self._maker: MaskMaker | None = None
        self._compiler: ThreadPoolExecutor | None = None
        self._begun: dict[Guide, Future[LLMatcher | None]] = {}
        self._rows: dict[int, RowGuide] = {}
        self._pending: tuple[list[tuple[int, RowGuide]], HostCopies] | None = None

    def prepare(self) -> None:
        """Have the vocabulary read before a row is guided, in a thread beside this one."""
        self._submit(_ANYTHING, [])

    def build(self, guide: Guide) -> None:
        """Have a guide built beside the rounds, for rows to come, until it is forgotten. Does not wait."""
        if not self._follows:
            return
        if self._grammars is not None and self._grammars.has(guide):
            self._begun[guide] = done = Future[LLMatcher | None]()
            done.set_result(self._begin(guide, []))
        else:
            self._begun[guide] = self._submit(guide, [])

    def forget(self, guide: Guide) -> None:
        """No row to come needs a guide; those that have it keep it."""
        begun = self._begun.pop(guide, None)
        if begun is not None:
            begun.cancel()

    def is_built(self, guide: Guide) -> bool:
        """Whether no row would wait for a guide that is being built; one that cannot be is."""
        return not self._follows or self._begun[guide].done()

    def wait_for_any(self, guides: Iterable[Guide], seconds: float) -> None:
        """Wait until one of some guides is built, `seconds` at most."""
        wait([self._begun[guide] for guide in guides if self._follows], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Begin no build that has not begun: the process's end would wait for all of them."""
        if self._compiler is not None:
            self._compiler.shutdown(wait=False, cancel_futures=True)

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come and go."""
        for row in plan.dropped_rows:
            self._rows.pop(row, None)
        for admission in plan.admissions:
            self._rows.pop(admission.row, None)
            if admission.sampling.guided is not None:
                self._rows[admission.row] = self._admit(admission) if self._follows else RowGuide(None)

    def _admit(self, admission: RowAdmission) -> RowGuide:
        guide = admission.sampling.guided
        assert guide is not None
        output = admission.tokens[admission.num_prompt_tokens :].tolist()
        built = self._begun.get(guide)
        begun: LLMatcher | Future[LLMatcher | None] | None
        if built is not None and built.done():
            matcher = built.result()
            begun = None if matcher is None else self._go_on(guide, matcher.deep_copy(), output)
        elif self._grammars is not None and self._grammars.has(guide):
            begun = self._begin(guide, output)
        else:  # nobody has had it built before, as of the rounds before the first request
            begun = self._submit(guide, output)
        return RowGuide(begun, output, lambda: self._begin(guide, [], anew=True))

    def _submit(self, guide: Guide, output: list[int]) -> Future[LLMatcher | None]:
        if self._compiler is None:
            builders = max(_FEWEST_BUILDERS, min(_MOST_BUILDERS, self._num_threads))
            self._compiler = ThreadPoolExecutor(builders, thread_name_prefix="guides")
        return self._compiler.submit(self._build, guide, output)

    def _build(self, guide: Guide, output: list[int]) -> LLMatcher | None:
        with self._activity.beside("guides", "compiling a guide", self._seconds):
            return self._begin(guide, output)

    def _begin(self, guide: Guide, output: list[int], *, anew: bool = False) -> LLMatcher | None:
        """A matcher behind a row's output so far; None where it cannot follow."""
        try:
            if self._grammars is None:
                grammars = self._make_grammars()
                self._maker = MaskMaker(max(self._vocab_size, grammars.vocab_size), self._num_threads)
                self._grammars = grammars
            matcher = self._grammars.matcher(guide, anew=anew)
        except InvalidRequestError:  # which the door lets nobody in with; the row ends with an error
            return None
        except Exception:  # no other row is to lose by it
            logger.exception("a guide could not be built")
            return None
        return matcher if anew else self._go_on(guide, matcher, output)

    def _go_on(self, guide: Guide, matcher: LLMatcher, output: list[int]) -> LLMatcher | None:
        """A matcher behind a row's output so far; None where it cannot follow."""
        return matcher if go_on(matcher, output) else self._behind(guide, output)

    def _behind(self, guide: Guide, output: list[int]) -> LLMatcher | None:
        return RowGuide(None, output, lambda: self._begin(guide, [], anew=True)).renew()

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
            guide.follow(tokens[place][: counts[place]])

    def masks(self, rows: Sequence[int], width: int, draft: HostDraft | None = None) -> TokenMasks | None:
        """Of the places that are decided in a round; None where none of the rows is guided.

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
        matchers = [None if guide.is_ended else guide.matcher for guide in guides]
        return self._make_masks(len(rows), guided, matchers, width + 1, draft, guides)

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
            guided, self.forced_behind({rows[place]: most[place] for place in guided}), strict=True
        ):
            tokens[place, : len(found)] = torch.tensor(found, dtype=torch.int64)
        if self._share is None and int(tokens.max()) < 0:
            return None
        tokens = tokens.to(self._device, non_blocking=True)
        if self._share is not None:
            tokens = self._share(tokens)
        return tokens.clamp(min=0), tokens >= 0

    def forced_behind(self, most: Mapping[int, int]) -> list[list[int]]:
        """What must follow each of some rows, at most as many tokens as `most` says; none of one that is not guided."""
        self.settle()
        forced: list[list[int]] = []
        for row, length in most.items():
            matcher = self._rows[row].matcher if row in self._rows else None
            forced.append(matcher.deep_copy().compute_ff_tokens()[: max(0, length)] if matcher is not None else [])
        return forced

    def walk(self, rows: Sequence[int]) -> Walk | None:
        """What may follow `rows` and the tokens of a draft behind them, one after the other; None where none of them is
        guided."""
        guided = self.guided(rows)
        if not guided:
            return None
        self.settle()
        guides = [self._rows[rows[place]] for place in guided]
        matchers = [guide.matcher for guide in guides]
        forks = [None if matcher is None else matcher.deep_copy() for matcher in matchers]
        maker = self._maker or MaskMaker(self._vocab_size, 1)  # where no grammar could be read, and none is followed

        def end(line: int) -> None:
            guides[line].is_ended = True

        return Walk(maker, len(rows), guided, forks, self._device, end)

    def _make_masks(
        self,
        num_rows: int,
        guided: Sequence[int],
        matchers: Sequence[LLMatcher | None],
        width: int,
        draft: HostDraft | None,
        guides: Sequence[RowGuide],
    ) -> TokenMasks:
        """Of the rows at places `guided`, with `matchers`, and `width` positions each; `guides` have these made anew
        where a bound is passed."""
        words = self._maker.words if self._maker is not None else -(-self._vocab_size // 32)
        num_places, num_lines = num_rows * width, len(guided) * width
        # One copy for both: places in front, and the bits behind them.
        packed = torch.empty(num_places + num_lines * words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        places, bits = packed[:num_places].view(num_rows, width), packed[num_places:].view(num_lines, words)
        places.fill_(-1)
        if width > 1 or None in matchers:  # else each line is written
            bits.zero_()
        jobs: list[MaskJob] = []
        places[list(guided)] = torch.arange(num_lines, dtype=torch.int32).view(-1, width)
        for number, (place, matcher) in enumerate(zip(guided, matchers, strict=True)):
            if matcher is not None:
                jobs += mask_jobs(matcher, number * width, draft, place)
        if self._maker is not None:
            started = time.perf_counter()
            failed = self._maker.fill(bits, jobs)
            if time.perf_counter() - started > SLOW_SECONDS:
                _look_for_slow(guides, torch.empty_like(bits[:1]))
            for line in self._maker.slow_lines:
                guides[line // width].is_ended = True
            for job in failed:
                # Behind drafts nothing is allowed then, which ends a round there. The next one looks again.
                if job.is_first:
                    _fill_first(self._maker, bits, job.line, guides[job.line // width])
        packed = packed.to(self._device, non_blocking=True)
        places, bits = packed[:num_places].view(num_rows, width), packed[num_places:].view(num_lines, words)
        return TokenMasks(places, bits)


def _look_for_slow(guides: Sequence[RowGuide], scratch: torch.Tensor) -> None:
    """Find which of the rows hold the others up; scratch [1, words] int32. What this thread computes counts, not how
    long it waits for a busy machine: a text must not depend on that."""
    for guide in guides:
        matcher = None if guide.is_ended else guide.matcher
        if matcher is not None:
            started = time.thread_time()
            matcher.deep_copy().unsafe_compute_mask_ptr(scratch.data_ptr(), 4 * scratch.shape[1])
            guide.count_slow(time.thread_time() - started)


def _fill_first(maker: MaskMaker, bits: torch.Tensor, line: int, guide: RowGuide) -> None:
    """The mask behind a row's own tokens, by its matcher, and by one made anew where that passes a bound, too."""
    matcher = guide.matcher
    if matcher is not None and maker.fill(bits, mask_jobs(matcher, line, None, 0)):
        matcher = guide.renew()
        if matcher is not None:
            maker.fill(bits, mask_jobs(matcher, line, None, 0))
