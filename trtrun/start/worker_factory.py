"""From a rank's engines to its worker: with which drafter, over which exchange.

It knows who sits where and the drafting methods. It does not know weights, KV stores or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import torch

from parallel.communicator import Communicator
from parallel.groups import Groups
from parallel.link import Link
from parallel.topology import Role
from parallel.transports.device_gate import KEY_NUMBERS, DeviceGate
from parallel.watchdog.activity import Activity
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.engine.heads.head_rows import FeatureLayers, HeadRows
from trtrun.engine.heads.running_heads import ReadingHeads, RunningHeads
from trtrun.engine.heads.stored_heads import MaskedHeads, MaskedLayers, StoredHeads
from trtrun.engine.runner import Engine
from trtrun.errors import CheckpointError
from trtrun.guiding.grammars import Grammars, Spelling, grammars_of
from trtrun.guiding.row_guides import RowGuides
from trtrun.kvcache.formats import choose_format
from trtrun.memory.memory_requirements import HiddenKind
from trtrun.memory.spaces import guess_space, guess_steps, head_space
from trtrun.rounds.exchange.exchange import DeviceExchange, Exchange
from trtrun.rounds.exchange.gated_drafts import GatedDrafts
from trtrun.rounds.exchange.hidden_link import HiddenLink
from trtrun.rounds.exchange.message_exchange import MessageExchange
from trtrun.rounds.round import Worker
from trtrun.speculation.drafters import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.translated_rows import Translation
from trtrun.start.beside_engines import RankHeads
from trtrun.start.job_spec import JobSpec, read_draft_vocabularies
from trtrun.threads import count_cores
from trtrun.timing.phase_clock import HostPhases, phase_clock
from trtrun.tokens.text import Tokenizer, read_tokenizer


@dataclass(frozen=True)
class GroupOfTarget:
    """The target's ranks, as a drafter on them sees these (`speculation.protocols.TargetGroup`).

    Attributes:
        communicator: of the target's group, whose first rank decides.
    """

    communicator: Communicator

    @property
    def decides(self) -> bool:
        """Whether this rank decides for the group."""
        return self.communicator.rank == 0

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the group's first rank has, on all of its ranks."""
        return tokens if self.communicator.size == 1 else self.communicator.broadcast(tokens, 0)


@dataclass(frozen=True)
class WorkerFactory:
    """One rank with its engines.

    Attributes:
        spec: of the job.
        rank: this one.
        groups: its communicators.
        device: of its engines.
        engines: by role.
        heads: what the rank has of them.
        head_rows: whose rows these are fed; None where they keep none.
        corpus: that the method looks up, on a rank that holds the target; None without.
        num_blocks: blocks of every KV store, but for those of guesses.
        activity: where the process says what it is doing.
        draft_is_lost: whether the draft engine is gone for good.
    """

    spec: JobSpec
    rank: int
    groups: Groups
    device: torch.device
    engines: Mapping[str, Engine]
    heads: RankHeads
    head_rows: HeadRows | None
    corpus: object | None
    num_blocks: int
    activity: Activity
    draft_is_lost: Callable[[], bool]

    @property
    def config(self) -> RuntimeConfig:
        """The job's configuration."""
        return self.spec.config

    def make_worker(self, exchange: Exchange | None = None) -> Worker:
        """The rank's part of each round, over `exchange` or the job's own."""
        drafter = self._make_drafter()
        leads_draft, leads_target = self.rank == self._drafting_leader, self.rank == self.spec.topology.target_leader
        guides = self._make_guides(is_ready=exchange is None) if leads_target or drafter is not None else None
        if guides is not None and drafter is not None:
            drafter.guide(guides)
        return Worker(
            exchange=exchange or (self._make_messages(guides) if self.config.drafts_apart else self._make_link()),
            drafter=drafter,
            target=self.engines.get("target"),
            leads_draft=leads_draft,
            leads_target=leads_target,
            use_logits=self.config.speculation.use_logits,
            device=self.device,
            activity=Activity() if exchange else self.activity,
            phases=phase_clock(self.device) if (leads_draft or leads_target) and not exchange else HostPhases(),
            forced_acceptance=self.config.speculation.forced_acceptance,
            guides=guides,
            draft=self.engines.get("draft"),
            adapter_seconds=self.config.launch.adapter_seconds,
        )

    def _make_guides(self, *, is_ready: bool) -> RowGuides:
        """Make the guides of the target's rows, where these are decided or drafted; where `is_ready`, their vocabulary
        is read now, in a thread, so that no round has to wait for it."""
        ends, vocab = self.spec.target.eos_token_ids, self.spec.target.vocab_size
        # In this thread: nobody else may look at a tokenizer that is just being made.
        tokenizer = self._read_tokenizer() if is_ready else None
        spelling = Spelling.of(tokenizer, vocab, ends) if tokenizer is not None and ends else None

        def make_grammars() -> Grammars:
            return grammars_of((spelling or Spelling.of(self._read_tokenizer(), vocab, ends)).read())

        slot, group = self.spec.topology.slot(self.rank), self.groups.target
        assert slot is not None
        slots = len(self.spec.topology.slots_of_host(slot.host))
        threads = torch.get_num_threads() if self.device.type == "cpu" else count_cores() // slots
        in_place = self._drafting_role is Role.TARGET and group is not None and group.size > 1
        share = GroupOfTarget(group).share if in_place and group is not None else None
        seconds = self.config.launch.heartbeat_seconds
        drafting = self.groups.draft
        if share is None and drafting is not None and drafting.size > 1:  # a matcher's bounds are each rank's own
            share = GroupOfTarget(drafting).share
        follows = not in_place or self.rank == self.spec.topology.target_leader
        guides = RowGuides(
            make_grammars,
            vocab,
            self.device,
            threads,
            share,
            follows=follows,
            activity=self.activity,
            seconds=seconds,
        )
        if spelling is not None and follows:
            guides.prepare()
        return guides

    def _read_tokenizer(self) -> Tokenizer | None:
        """The target's; the draft's is the same as a rule, and a host of drafts may have no other."""
        config = self.config
        others = None if config.draft is None or config.draft.is_translated else config.draft.model
        for directory in (config.tokenizer or config.target.model, others):
            with suppress(CheckpointError):  # rank 0 says so of its own
                found = read_tokenizer(directory) if directory else None
                if found is not None:
                    return found
        return None

    def _make_drafter(self) -> Drafter | None:
        """The method's drafter, where this rank is one of those that draft."""
        config = self.config
        if self._drafting_role not in self.spec.topology.roles(self.rank):
            return None
        is_apart = config.drafts_apart
        context = DrafterContext(
            config.speculation,
            self.engines.get("draft"),
            self.engines.get("target"),
            self.spec.target.vocab_size,
            guess_space(config, self.num_blocks) if is_apart else None,
            guess_steps(config) if is_apart else (),
            self.spec.models.mask_token,
            heads=self._make_stored_heads() if self.heads.keep else self.heads.loaded,
            corpus=self.corpus,
            group=GroupOfTarget(self.groups.target) if self.groups.target is not None else None,
            translation=self._make_translation() if config.translates_drafts else None,
        )
        return DRAFTERS.get(config.speculation.method)(context)

    def _make_translation(self) -> Translation:
        """What a draft model with another tokenizer needs.

        Raises:
            CheckpointError: a tokenizer is missing on this host, or cannot be matched.
        """
        config = self.config
        assert config.draft is not None
        vocabularies = read_draft_vocabularies(self.spec)
        return Translation(
            vocabularies,
            self.engines["draft"].rows.beside(self.spec.target.vocab_size),
            self.spec.target.vocab_size,
            num_blocks=self.num_blocks,
            most_tokens=self.spec.models.most_tokens,
            reuses_blocks=config.kv_cache.enable_block_reuse,
            by_text=config.draft.vocabulary == "text",
            is_apart=config.drafts_apart,
        )

    def _make_stored_heads(self) -> RunningHeads:
        """The heads, with a store of as many blocks as the target's, and more for trees and guesses; or over the
        target's own."""
        kv_format = choose_format(self.config.kv_cache.dtype)
        space, guesses = head_space(self.config, self.num_blocks), 0
        assert self.head_rows is not None
        method = METHODS[self.config.speculation.method]
        if method.reads_keys:
            return ReadingHeads(cast(FeatureLayers, self.heads.loaded), self.head_rows)
        if method.drafts_masked:
            without_graphs = replace(self.head_rows, capture=None, graph_shapes=None)
            return MaskedHeads(cast(MaskedLayers, self.heads.loaded), without_graphs, space, kv_format)
        if self.head_rows.are_own:
            guesses = guess_space(self.config, self.num_blocks).num_blocks
        return StoredHeads(cast(FeatureLayers, self.heads.loaded), self.head_rows, space, kv_format, guesses)

    @property
    def _drafting_role(self) -> Role | None:
        return self.config.drafting_role

    @property
    def _drafting_leader(self) -> int | None:
        topology = self.spec.topology
        return topology.target_leader if self._drafting_role is Role.TARGET else topology.draft_leader

    def _make_messages(self, guides: RowGuides | None) -> MessageExchange:
        topology, groups = self.spec.topology, self.groups
        assert groups.mail is not None and groups.workers is not None and topology.draft_leader is not None
        return MessageExchange(
            mail=groups.mail,
            rank=self.rank,
            draft_ranks=topology.draft_ranks,
            target_ranks=topology.target_ranks,
            peers=groups.workers,
            draft_peer=topology.worker_ranks.index(topology.draft_leader),
            target_peer=topology.worker_ranks.index(topology.target_leader),
            group=groups.target,
            target_vocab_size=self.spec.target.vocab_size,
            use_logits=self.config.speculation.use_logits,
            draft_is_lost=self.draft_is_lost,
            hidden=self._make_hidden_link(),
            gated=self._make_gated_drafts(guides),
            tells_guesses=self._waits_at_gates and self.config.drafts_ahead,
        )

    @property
    def _waits_at_gates(self) -> bool:
        """Whether target ranks launch rounds before their drafts are there: where no device has to wait for its host,
        and no more than a chain of tokens comes from a draft model."""
        section = self.config.speculation
        return self.device.type == "cuda" and section.method == "draft_target" and not section.use_logits

    def _make_gated_drafts(self, guides: RowGuides | None) -> GatedDrafts | None:
        """This target rank's end of rounds that are launched before their drafts are there; None where they are not."""
        group = self.groups.target
        if group is None or not self._waits_at_gates:
            return None
        if self.rank != self.spec.topology.target_leader:
            return GatedDrafts(None, group)
        assert guides is not None
        rows, draft_len = self.config.scheduler.max_batch_size, self.config.draft_len
        most_guessed = guess_space(self.config, 0).most_guesses * (KEY_NUMBERS + draft_len)
        gate = DeviceGate(self.device, rows * (draft_len + 1), rows, most_guessed)
        return GatedDrafts(gate, group, lambda plan: bool(guides.guided(plan.decode_rows.tolist())))

    def _make_hidden_link(self) -> HiddenLink | None:
        """This rank's end of the way of hidden states, where it has one."""
        topology, groups, leads_target = self.spec.topology, self.groups, self.rank == self.spec.topology.target_leader
        kind = HiddenKind.of(self.config, self.spec.target, self.heads.plan)
        if kind is None or (not leads_target and self.rank != topology.draft_leader):
            return None
        assert groups.mail is not None and groups.workers is not None
        other = topology.draft_leader if leads_target else topology.target_leader
        assert other is not None
        return HiddenLink(
            mail=groups.mail,
            peers=groups.workers,
            rank=other,
            peer=topology.worker_ranks.index(other),
            shape=kind.shape,
            dtype=kind.dtype,
            most_bytes=kind.bytes_under_way(self.spec.models),
        )

    def _make_link(self) -> DeviceExchange:
        section = self.config.speculation
        return DeviceExchange(
            Link(self.spec.topology, self.rank, self.groups.workers),
            in_place=self._drafting_role is Role.TARGET,
            leads_draft=self.rank == self._drafting_leader,
            target_vocab_size=self.spec.target.vocab_size if "target" in self.engines else None,
            looks_texts_up=isinstance(section, HybridOptions) and section.enable_suffix_decoding,
        )
