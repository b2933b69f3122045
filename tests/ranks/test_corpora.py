"""A corpus that one rank of the target reads: the same on all of them, or none, and no rank waits for it then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import configuration
from mpi4py import MPI

from parallel.communicator import Communicator
from trtrun.errors import ConfigError
from trtrun.start.beside_engines import load_corpus

pytestmark = pytest.mark.mpi
ROWS = [{"token_ids": [3, 1, 4, 1, 5]}, {"token_ids": [2, 7, 1]}]


def test_one_rank_reads_for_all_and_says_what_is_wrong(folder: Path, communicator: Communicator) -> None:
    """The second file is bad where nobody looks before the start; the sum behind it meets on all ranks."""
    for name, end, is_good in (("good", "", True), ("bad", "no JSON\n", False)):
        path = folder / f"{name} {MPI.COMM_WORLD.rank}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + end)
        config = configuration(folder / "target", None, speculation={"method": "suffix", "suffix_corpus": str(path)})
        device = communicator.device
        try:
            found = load_corpus(config, 199, communicator, device)
        except ConfigError as error:
            assert not is_good and communicator.rank == 0 and "line 3: not valid JSON" in str(error)
            found = None
        assert (found is not None) == is_good
        counted = communicator.all_reduce(torch.ones(1, device=device))
        assert int(counted) == communicator.size
        if found is not None:
            assert found.num_bytes == 4 * (10 + 6 + config.speculation.suffix_decoding_max_tree_depth)
