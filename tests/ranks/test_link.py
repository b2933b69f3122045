"""The link between the engines in every placement: drafts one way, verdicts the other, nothing else anywhere."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from topologies import HERE

from parallel.errors import LinkError
from parallel.groups import open_groups
from parallel.link import Link
from parallel.topology import Topology

pytestmark = pytest.mark.mpi

# rows, draft_len, probability_rows, vocab: usual, no probabilities, nobody decodes, nothing drafted, megabytes.
ROUNDS = [(3, 4, 2, 17), (3, 4, 0, 17), (0, 4, 0, 17), (5, 0, 0, 17), (1, 1, 1, 17), (8, 5, 8, 20_000), (2, 3, 1, 17)]


def draft_of(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, draft_len, probability_rows, vocab = ROUNDS[index]
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, vocab, (rows, draft_len), generator=generator)
    probs = torch.rand(probability_rows, draft_len, vocab, generator=generator)
    lens = torch.randint(0, draft_len + 1, (rows,), generator=generator)
    return tokens, lens, probs if probability_rows else None


def verdict_of(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, draft_len, *_ = ROUNDS[index]
    rows += 1  # a row whose last prefill chunk runs is sampled, too
    generator = torch.Generator().manual_seed(100 + index)
    return (
        torch.randint(1, draft_len + 2, (rows,), generator=generator),
        torch.randint(-1, 99, (rows, draft_len + 1), generator=generator),
    )


@pytest.mark.parametrize("topology", HERE.values(), ids=HERE.keys())
def test_drafts_and_verdicts_arrive_where_they_are_needed(topology: Topology, world: MPI.Intracomm) -> None:
    groups = open_groups(world, topology, torch.device("cpu"))
    rank = world.rank
    if rank in topology.worker_ranks:
        link = Link(topology, rank, groups.workers)
        for index, (rows, draft_len, probability_rows, vocab) in enumerate(ROUNDS):
            if rank == topology.draft_leader:
                link.send_draft(*draft_of(index))
            if rank in topology.target_ranks and topology.draft_ranks:
                tokens, lens, probs = link.receive_draft(rows, draft_len, probability_rows, vocab)
                expected, expected_lens, expected_probs = draft_of(index)
                assert torch.equal(tokens, expected)
                assert torch.equal(lens, expected_lens)
                assert tokens.dtype == lens.dtype == torch.int64
                if rank == topology.target_leader and expected_probs is not None:
                    assert probs is not None
                    assert torch.equal(probs, expected_probs)
                else:
                    assert probs is None
            num_tokens, kept = verdict_of(index)
            if rank == topology.target_leader:
                link.send_verdict(num_tokens, kept)
            else:
                received, received_kept = link.receive_verdict(*kept.shape)
                assert torch.equal(received, num_tokens)
                assert torch.equal(received_kept, kept)
    else:
        assert (groups.draft, groups.target, groups.workers) == (None, None, None)
    groups.close()


@pytest.mark.parametrize("topology", HERE.values(), ids=HERE.keys())
def test_groups_have_tensor_parallel_order(topology: Topology, world: MPI.Intracomm) -> None:
    groups = open_groups(world, topology, torch.device("cpu"))
    for group, ranks in (
        (groups.draft, topology.draft_ranks),
        (groups.target, topology.target_ranks),
        (groups.workers, topology.worker_ranks),
    ):
        assert (group is not None) == (world.rank in ranks)
        if group is not None:
            assert group.all_gather(torch.tensor(world.rank)).tolist() == list(ranks)
    groups.close()


@pytest.mark.mpi(min_size=3)
def test_only_the_leaders_send(world: MPI.Intracomm) -> None:
    topology = next(iter(HERE.values()))
    groups = open_groups(world, topology, torch.device("cpu"))
    if world.rank in topology.worker_ranks:
        link = Link(topology, world.rank, groups.workers)
        if world.rank != topology.draft_leader:
            with pytest.raises(LinkError, match="the draft leader is rank"):
                link.send_draft(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        if world.rank != topology.target_leader:
            with pytest.raises(LinkError, match="the target leader is rank"):
                link.send_verdict(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
        if world.rank not in topology.target_ranks:
            with pytest.raises(LinkError, match="given no drafts"):
                link.receive_draft(1, 1, 0, 1)
    groups.close()
