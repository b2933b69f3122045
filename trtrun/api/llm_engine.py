"""The engine core: requests in at any time, typed deltas out, one round after another.

    engine = LLMEngine.open(config)              # on every rank; None on worker ranks, once they have served
    request_id = engine.add_request("def main(", SamplingParams(max_tokens=64))
    while engine.has_unfinished_requests:
        for delta in engine.step():
            print(delta.text, end="")

LLM, the command line and the benchmark are thin over it. It does not know how a round runs (`rounds.orchestrator`),
models or devices, nor threads and signals: one thread calls it at a time (see `llm`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from parallel.watchdog.activity import Activity, Phase
from trtrun.api.adapter_loads import AdapterLoads
from trtrun.api.adapters import AdapterTable, check_adapter
from trtrun.api.engine_requests import EngineRequests
from trtrun.api.prompts import Prompt, PromptReader
from trtrun.configuration.config import RuntimeConfig
from trtrun.core.outputs import CompletionDelta, RequestId, StartReport
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.values import show_value
from trtrun.engine.batch import tile_width
from trtrun.errors import InvalidRequestError, RankFailedError, TrtrunError
from trtrun.loading.model_settings import sampling_defaults, target_context
from trtrun.memory.spaces import num_snapshots, window_rule
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.start.job import StartedJob, open_job
from trtrun.start.job_spec import JobSpec
from trtrun.start.policies import make_orchestrator
from trtrun.timing.telemetry import RunStatistics
from trtrun.tokens.text import Tokenizer, read_shared_tokenizer

T = TypeVar("T")

_ADAPTER_SECONDS = 0.005
"""How long a step waits for an adapter where nothing else can be done: what is asked meanwhile comes behind it."""

_MOST_REPORTED = 1 << 22
"""Logits of prompts that a round reports, or as many as a tile has: 16 MiB, which reach rank 0 in some milliseconds,
so that other rows do not wait for long."""


class LLMEngine:
    """Runs requests to their end, a round at a time. Made by `open`.

    Attributes:
        config: what it was made from.
        tokenizer: None when the checkpoint has none; prompts are then token ids.
        report: what each rank holds.
        orchestrator: runs the rounds.
        scheduler: the orchestrator's: rows, blocks and the waiting queue.
        adapters: that requests may name.
        default_sampling: of requests that come without parameters: greedy, but for what the target's
            generation_config.json says (`server.generation_config`).
    """

    def __init__(
        self,
        spec: JobSpec,
        job: StartedJob,
        limits: SchedulerLimits,
        tokenizer: Tokenizer | None,
        sampling: SamplingParams,
    ) -> None:
        self.config = config = spec.config
        self.tokenizer = tokenizer
        self.report: StartReport = job.report
        self.orchestrator = make_orchestrator(spec, limits, job.engine_ranks, job.report.ranks)
        self.scheduler = self.orchestrator.scheduler
        self._prompts = PromptReader(spec.target, tokenizer)
        self.adapters = AdapterTable(config.adapters, config.num_adapter_slots)
        self.default_sampling = sampling
        self._requests = EngineRequests(
            *(self.scheduler, self._prompts, tokenizer, self.adapters, spec.target.vocab_size),
            on_end=lambda statistics: self.orchestrator.totals.add_request(statistics),
        )
        self._lost: list[CompletionDelta] = []
        self._failure: RankFailedError | None = None
        self._loads = AdapterLoads(self.adapters, self.orchestrator, lambda: self.scheduler.slots_in_use)

    @classmethod
    def open(
        cls, job: RuntimeConfig | JobSpec, on_load_progress: Callable[[int, int], None] | None = None
    ) -> LLMEngine | None:
        """Take this process's part in the job. Called on every rank of it.

        Args:
            job: its configuration, or all that is known of it.
            on_load_progress: called with the bytes of weights that are in place and that will be, over all ranks.

        Returns:
            The engine core on rank 0, or in a job of one process. None on worker ranks, once they have served to the
            end of the job.

        Raises:
            TrtrunError: a path, a model or the configuration is wrong; one line says what to do.
            PlacementError: the MPI world has another size than the devices need.
            RankFailedError: a rank could not start.
        """
        spec = job if isinstance(job, JobSpec) else JobSpec(job)
        config = spec.config
        spec.read_models()  # on every rank: what is wrong with a directory is said before ranks wait for each other
        draft = None if config.draft is None or config.draft.is_translated else config.draft.model
        tokenizer = read_shared_tokenizer(config.tokenizer or config.target.model, draft)
        sampling = SamplingParams.from_mapping(sampling_defaults(config))
        started = open_job(spec, on_load_progress)
        if started is None:
            return None
        model, draft_model = spec.target, spec.draft
        draft_context = draft_model.max_position_embeddings if draft_model is not None else None
        if config.translates_drafts:
            draft_context = None  # its store follows texts by itself, in tokens of its own
        context, windows = target_context(config, model), window_rule(config, spec.models)
        snapshots = num_snapshots(config, spec.models)
        has_states = any(one is not None and one.layers_with_states for one in (model, draft_model))
        limits = replace(
            SchedulerLimits.of(config, context, draft_context, started.size.blocks),
            max_num_tokens=spec.models.most_tokens,
            max_shared_tokens=config.max_num_tokens,
            prompt_tile=tile_width(model, len(config.target.devices), config.target.devices[0]),
            drafts_in_parallel=spec.models.mask_token is not None,
            most_chunk=None if windows is None else windows.chunk,
            most_reported=max(1, _MOST_REPORTED // model.vocab_size),
            enable_block_reuse=config.kv_cache.enable_block_reuse and (snapshots > 0 or not has_states),
            has_longer_context=context < model.max_position_embeddings,
            windows=windows,
            num_places=started.size.places,
            num_snapshots=snapshots,
        )
        return cls(spec, started, limits, tokenizer, sampling)

    @property
    def activity(self) -> Activity:
        """The record of what the thread that takes the steps is doing."""
        return self.orchestrator.activity

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests) or bool(self._lost)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, a plan is still out, or an adapter is being loaded."""
        return self.has_unfinished_requests or self.orchestrator.has_work or bool(self._loads)

    def num_waiting_of(self, group: Hashable) -> int:
        """Completions of a group, as `add_request` was given it, that never had a row."""
        return self.scheduler.num_waiting_of(group)

    def prepare(self, sampling: SamplingParams) -> None:
        """Make tokens of bad words, which `add_request` then need not do: that may take as long as some rounds, and any
        thread may do it.

        Raises:
            InvalidRequestError: a parameter that the model cannot follow.
        """
        self._prompts.check(sampling)

    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: RequestId | None = None,
        generated: Mapping[int, Sequence[int]] | None = None,
        group: Hashable = None,
        owner: Hashable = None,
    ) -> RequestId:
        """Queue the `n` completions of a prompt, all or none.

        A request may go on where another engine over the same models left it: its `generated` tokens count as output
        for penalties, min_tokens, stop strings and max_tokens, positions stay, and so the next token is the one that
        would have followed there, greedy or with the same `seed`. (With `speculation.use_logits` it follows the same
        distribution; which token it is depends on the rounds.)

        Args:
            prompt: a text or token ids.
            sampling: None is `default_sampling`.
            request_id: the caller's own; None makes one.
            generated: output tokens by completion, of a request that goes on. Completions that are not named have
                ended. Deltas tell only what is new: tokens, text and statistics begin behind these tokens.
            group: of requests that somebody asked for together: groups take turns at rows, and none keeps another one
                waiting. None makes the request a group of its own.
            owner: of the group, such as a client: owners take turns at rows before their groups do, and one that has
                none is given a row of the one that has most. None is an owner, too.

        Returns:
            The request's id, which its deltas carry.

        Raises:
            InvalidRequestError: it can never run, wants more drafted than the configuration says, its id is in use, or
                one of its completions had ended; nothing else is affected.
            QueueFullError: as many wait as may (`scheduler.max_waiting`).
        """
        tokens, sampling = self._prompts.encode(prompt), sampling or self.default_sampling
        self.scheduler.limits.check_prompt(len(tokens))
        self._prompts.check(sampling)
        self.scheduler.limits.check_draft_len(sampling.draft_len)
        self.scheduler.limits.check_lookahead(sampling.lookahead_config)
        check_adapter(sampling.lora_name, self.adapters.names)
        behind = None
        if generated is not None:
            behind = {index: self._prompts.encode(found) if found else () for index, found in generated.items()}
        return self.add_checked(tokens, sampling, request_id, behind, group, owner)

    def add_checked(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        request_id: RequestId | None,
        generated: Mapping[int, Sequence[int]] | None,
        group: Hashable,
        owner: Hashable = None,
    ) -> RequestId:
        """Add a request whose prompt is tokens that can run, with parameters that the model can follow: its
        caller has checked them by `PromptReader` and `SchedulerLimits`.

        Raises:
            InvalidRequestError: its id is in use, one of its completions had ended, or its adapter is gone.
            QueueFullError: as many wait as may.
        """
        return self._requests.add(prompt, sampling, request_id, generated, group, owner)

    def abort_request(self, request_id: RequestId) -> bool:
        """End a request now, without a further delta; False when it is not known (any more)."""
        return self._requests.abort(request_id)

    def has_begun(self, request_id: RequestId) -> bool:
        """Whether a completion of the request has, or had, a row; False when the request is not known (any more)."""
        return self._requests.has_begun(request_id)

    def step(self) -> list[CompletionDelta]:
        """Keep the ranks supplied with plans, and take one verdict in. If all that is left is an adapter
        that ranks read, it waits for it a moment.

        Returns:
            What the round added, one delta for each completion that gained tokens or ended.

        Raises:
            RankFailedError: a rank failed; the message names it, and the job is over.
        """
        deltas = self._guard(self._step)
        lost, self._lost = self._lost, []
        return lost + deltas

    def drain(self) -> None:
        """Take in the verdicts of plans that are still out, once no request is left; nothing while one is."""
        if not self._requests:
            self._guard(self.orchestrator.drain)

    def add_request_work(self, work: str, seconds: float) -> None:
        """Count what requests decide the time of, and rounds waited for: one of `timing.telemetry.REQUEST_WORK`."""
        self.orchestrator.totals.add_request_work(work, seconds)

    def statistics(self) -> dict[str, Any]:
        """Totals since the start or the last reset, ready for JSON; times are seconds."""
        forced = self.config.speculation.forced_acceptance
        return self.orchestrator.totals.as_dict() | ({} if forced is None else {"forced_acceptance": forced})

    def reset_statistics(self) -> None:
        """Start the totals again at zero."""
        self.orchestrator.totals = RunStatistics(draft_losses=self.orchestrator.totals.draft_losses)

    def set_speculation(self, enabled: bool) -> None:
        """Switch between drafting and the target alone, while no request runs. Without a draft it stays off."""
        self.drain()
        self.scheduler.set_speculation(enabled)

    def begin_adapter(self, name: str, path: Path, on_end: Callable[[TrtrunError | None], None]) -> None:
        """Have an adapter loaded on every target rank: read beside the rounds of the steps that follow, one adapter
        after the other, and put into its slot between two of them. Nothing changes where that fails.

        Args:
            name: that requests will call it by.
            path: of its directory, the same on every host.
            on_end: called in a step, or in `close`, once requests may name it (None), or with why they may not: an
                InvalidRequestError where there is one of that name or no slot is free, a CheckpointError where a rank
                cannot load it.
        """
        self._loads.begin(name, path, on_end)

    def drop_adapter(self, name: str) -> None:
        """Requests that come may not name an adapter any more; those that have it go on.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        with self.activity.between(Phase.ADAPTERS, f"in unloading adapter {show_value(name)}"):
            self.adapters.drop(name)

    def check_idle(self) -> None:
        """Raise RuntimeError when no request runs but a KV block is still held: a defect."""
        self.scheduler.idle_is_whole()

    def close(self) -> None:
        """Let the engine ranks end; requests that still run are dropped.

        Raises:
            RankFailedError: a rank failed, and no call has said so yet.
        """
        try:
            if self._failure is None:
                self._requests.abort_all()
                self.drain()
        finally:
            closed = InvalidRequestError("the engine was closed while the adapter was loaded")
            self._loads.end_all(self._failure or closed)
            with self.activity.between(Phase.ENDING):
                self.orchestrator.close()

    def prompt_token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """The prompt's tokens of a request that goes on."""
        return self._requests.prompt_token_ids(request_id)

    def _guard(self, work: Callable[[], T]) -> T:
        """Do some rounds' work; whatever goes wrong, what is left is whole, or says that it has failed."""
        if self._failure is not None:
            raise self._failure
        try:
            return work()
        except RankFailedError as error:
            self._failure = error
            raise
        except BaseException:
            self._recover()
            raise

    def _step(self) -> list[CompletionDelta]:
        has_rounds = self.orchestrator.has_work
        if self._loads:
            self._loads.go_on(0.0 if has_rounds else _ADAPTER_SECONDS)
        gains = self.orchestrator.step() if has_rounds else []
        started, began = time.perf_counter(), time.thread_time()
        deltas = [self._requests.tell(gain) for gain in gains]
        self.orchestrator.add_committing(time.perf_counter() - started)
        self.add_request_work("texts", self.orchestrator.commit_seconds + time.thread_time() - began)
        return deltas

    def _recover(self) -> None:
        """Recover from an exception in the middle of a round: forget all requests, so that the next one finds all
        whole.

        The requests end with an error, which the next step tells.
        """
        self._lost += self._requests.lose_all()
        try:
            self.orchestrator.reset()
        except BaseException as error:
            self._failure = RankFailedError(f"the engine could not go on after an error ({error}); start it again")
            raise
