"""Masks of tokens: what a bit forbids is impossible, everything else is as it was, by torch and by the kernel."""

from __future__ import annotations

import pytest
import torch
from sampling_rows import DEVICE

from trtrun.kernels.torch.operations import TorchOperations
from trtrun.sampling.row_steps import TokenMasks


def random_masks(
    rows: int, positions: int, vocabulary: int, seed: int
) -> tuple[torch.Tensor, TokenMasks, torch.Tensor]:
    """Logits, masks of some of the places, and which tokens are allowed [rows, positions, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, positions, vocabulary), generator=generator)
    words = -(-vocabulary // 32)
    bits = torch.randint(-(2**31), 2**31, (rows * positions, words), generator=generator).to(torch.int32)
    places = torch.randperm(rows * positions, generator=generator).to(torch.int32).view(rows, positions)
    places = torch.where(torch.rand(places.shape, generator=generator) < 0.3, -1, places)
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row in range(rows):
        for position in range(positions):
            place = int(places[row, position])
            for token in range(vocabulary) if place >= 0 else ():
                allowed[row, position, token] = (int(bits[place, token // 32]) >> (token % 32)) & 1 == 1
    return logits, TokenMasks(places, bits), allowed


@pytest.mark.parametrize(("rows", "positions", "vocabulary"), [(1, 1, 31), (3, 4, 100), (2, 1, 4130), (0, 1, 64)])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_what_a_bit_forbids_is_impossible(rows: int, positions: int, vocabulary: int, by_kernel: bool) -> None:
    if by_kernel:
        pytest.importorskip("triton", reason="needs triton: pip install triton")
        from trtrun.kernels.triton.sampling.penalties import mask_tokens
    else:
        mask_tokens = TorchOperations().mask_tokens
    logits, masks, allowed = random_masks(rows, positions, vocabulary, seed=vocabulary)
    before = logits.clone()
    on_device = [one.to(DEVICE) for one in (logits, masks.places, masks.bits)]
    found = mask_tokens(*on_device).cpu()
    assert torch.equal(found, before.masked_fill(~allowed, -torch.inf)) and torch.equal(logits, before)
    # A view whose rows are apart, as of logits that are padded.
    padded = torch.nn.functional.pad(on_device[0], (0, 3))[..., :vocabulary]
    assert torch.equal(mask_tokens(padded, *on_device[1:]).cpu(), found)


def test_places_are_picked_by_row() -> None:
    logits, masks, allowed = random_masks(2, 5, 40, seed=1)
    columns = torch.tensor([[0, 3, 3], [4, 0, 1]])
    picked = logits.gather(1, columns.unsqueeze(2).expand(-1, -1, 40))
    of_picked = allowed.gather(1, columns.unsqueeze(2).expand(-1, -1, 40))
    assert torch.equal(masks.picked(columns).apply(picked), picked.masked_fill(~of_picked, -torch.inf))
