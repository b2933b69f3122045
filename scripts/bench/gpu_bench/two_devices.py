"""The parts that only a host of two devices has: what a second GPU gives each kind of model, and what its µs are.

Seconds are reckoned from starts and speeds on one H200, cold caches included; none takes nine minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from scripts.bench.gpu_bench.ahead_parts import play_ahead, play_mtp_apart
from scripts.bench.gpu_bench.cut_parts import BOTH, one_and_both_cuts, one_and_two, play_cuts, play_texts
from scripts.bench.gpu_bench.kernel_parts import play_exchange, play_kernels
from scripts.bench.gpu_bench.part import Part
from scripts.bench.gpu_bench.placements import find_apart
from scripts.bench.gpu_bench.served_loss import play_served_loss
from scripts.bench.gpu_bench.start_parts import play_starts


def list_two_device_parts() -> Iterator[Part]:
    """In the order in which they run. They run where they are named."""
    apart = find_apart(2)
    about = "on one device and over two in turns, plain and drafted, texts compared"
    play = partial(play_cuts, pair="8b", make_ways=one_and_two)
    yield Part("tp2:8b", f"8B-shaped pair {about}", 130, play, False)
    yield Part(
        "kernels", "what each µs of an 8B-shaped plain token is, on one device and over two", 90, play_kernels, False
    )
    yield Part("exchange", "what ranks send for a layer of experts, µs by rows, and such layers cut both ways", 40,
               play_exchange, False)  # fmt: skip
    play = partial(play_cuts, pair="30b-a3b", make_ways=one_and_both_cuts, has_many_rows=True)
    yield Part("tp2:30b-a3b", f"30B-A3B-shaped pair {about}, by features and by experts", 350, play, False)
    play = partial(play_cuts, pair="gpt-oss-120b", make_ways=one_and_both_cuts, most_turns=1)
    yield Part("tp2:gpt-oss-120b", f"gpt-oss-120b-shaped pair {about}, by features and by experts", 220, play, False)
    play = partial(play_cuts, pair="27b-states", make_ways=one_and_two)
    yield Part("tp2:27b-states", f"27b-states-shaped pair {about}", 250, play, False)
    about = "texts over two devices: gated delta nets, dense and mixture, latents, Gemma 3 and 4"
    yield Part("texts", about, 330, play_texts, False)
    about = "an MTP layer on the target's device, on one of its own, and there ahead, in turns"
    yield Part("mtp-apart", f"27b-states-shaped target with {about}", 330, partial(play_mtp_apart, apart=apart), False)
    about = "8B-shaped pair on a device each: drafts behind verdicts, ahead, and as pacing chooses, in turns"
    yield Part("ahead", about, 160, partial(play_ahead, apart=apart), False)
    about = "the target's second rank of a server is killed under 24 streams, twice: gaps, and what they are"
    play = partial(play_served_loss, placement=BOTH, ranks=(2,))
    yield Part("kill-served:target", about, 130, play, False)
    about = "the same, where the next engine's processes stand by (server.standby)"
    play = partial(play_served_loss, placement=BOTH, ranks=(2,), standby=True)
    yield Part("kill-served:standby", about, 120, play, False)
    about = "the same of the draft's rank and the target's, a device each, in turns"
    yield Part("kill-served:draft", about, 190, partial(play_served_loss, placement=apart, ranks=(1, 2)), False)
    about = "from the command to ready over two devices, with cold caches and warm ones"
    yield Part("starts", about, 100, partial(play_starts, placement=BOTH, pairs=("8b",)), False)
