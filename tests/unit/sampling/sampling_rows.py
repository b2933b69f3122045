"""What tests of the kernels of sampling share: rows on a device, and what both ways make of their logits.

The fixture `sampling_kernels` of conftest.py has the kernels taken, in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sampling_reference import admission, seeded

from trtrun.core.nouns import RowAdmission
from trtrun.sampling.distributions import KernelDistributions, TorchDistributions, distributions_of
from trtrun.sampling.row_sampling import RowSampling

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
MAX_LEN = 40
P_VALUE = 1e-4
"""Of a chi-square test: below it a distribution is another one."""
COUNT = 200_000 if HAS_GPU else 100
# The interpreter is slow at searching: a filter without a search there.
CUT: dict[str, object] = {"top_p": 0.95} if HAS_GPU else {"min_p": 0.06}
TARGET_LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.4, 0.0, 1.0])
DRAFT_LOGITS = torch.tensor([1.0, 0.5, -0.2, 1.4, 1.0, -3.0])


def on_device(admissions: Sequence[RowAdmission], vocab: int) -> tuple[RowSampling, torch.Tensor, torch.Tensor]:
    """A RowSampling with these rows, their token_ids (garbage behind their tokens) and lengths."""
    sampling = RowSampling(max(one.row for one in admissions) + 1, vocab, DEVICE)
    token_ids = torch.full((len(admissions), MAX_LEN), vocab - 1, dtype=torch.int32)
    for one in admissions:
        sampling.admit([one])
        token_ids[one.row, : len(one.tokens)] = torch.from_numpy(one.tokens)
    return sampling, token_ids.to(DEVICE), torch.tensor([len(one.tokens) for one in admissions], device=DEVICE)


def both_ways(
    sampling: RowSampling, logits: torch.Tensor, rows: Sequence[int], *arguments: object
) -> tuple[KernelDistributions, TorchDistributions]:
    """By kernels, and by torch's operations on the same device."""
    found = distributions_of(sampling, logits, rows, *arguments)  # type: ignore[arg-type]
    assert isinstance(found, KernelDistributions)
    processed = sampling.process(logits, rows, *arguments)  # type: ignore[arg-type]
    return found, TorchDistributions(sampling, processed, rows, arguments[0])  # type: ignore[arg-type]


def many_rows(count: int, **values: object) -> tuple[RowSampling, torch.Tensor, torch.Tensor]:
    """`on_device` for equal rows of six tokens that differ in their seeds alone."""
    sampling = RowSampling(count, 6, DEVICE)
    sampling.admit([admission(0, [1, 2, 3], seeded(seed=0, **values))])
    sampling.share([0] * (count - 1), list(range(1, count)))
    sampling.integers[:, 0] = torch.arange(count)
    return sampling, torch.zeros((count, 9), dtype=torch.int32, device=DEVICE), torch.full((count,), 3, device=DEVICE)
