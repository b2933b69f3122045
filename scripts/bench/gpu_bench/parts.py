"""The parts of the benchmark by name: what each measures, on how many devices, and about how long it takes.

A part fills tables from `trtrun bench`'s JSON. It knows configurations and figures. It does not know when it runs.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.gpu_bench.ahead_parts import TRAINED_MTP
from scripts.bench.gpu_bench.head_parts import play_eagle3_apart, play_heads, play_heads_beside_vllm
from scripts.bench.gpu_bench.kinds_parts import play_adapters, play_budgets, play_guided
from scripts.bench.gpu_bench.part import Part
from scripts.bench.gpu_bench.peer_parts import PEER_SHAPES, TEMPERATURE, TOP_P, play_first_tokens, play_shape, play_vllm
from scripts.bench.gpu_bench.placement_parts import play_check, play_exactness, play_parallel_apart, play_placement
from scripts.bench.gpu_bench.placements import ONE, PLACEMENTS, Placement, find_apart
from scripts.bench.gpu_bench.quantized_parts import play_quantized, play_quantized_kv
from scripts.bench.gpu_bench.rank_loss import play_killed_draft, play_killed_target, play_seed_command
from scripts.bench.gpu_bench.round_parts import (
    PROFILED_PAIRS,
    play_expert_layers,
    play_expert_tiles,
    play_round_kernels,
)
from scripts.bench.gpu_bench.start_parts import PROCESSES, play_engines, play_starts, play_useless_draft
from scripts.bench.gpu_bench.tables import name_workload
from scripts.bench.gpu_bench.text_draft_parts import TEXT_DRAFT_PAIRS, play_text_drafts
from scripts.bench.gpu_bench.two_devices import list_two_device_parts
from scripts.bench.gpu_bench.workbench import Options, Workbench
from scripts.harness.children import run

DESCRIBE_HOST = Path(__file__).resolve().parent / "describe_host.py"
FAMILY_PAIRS = ("27b-states", "35b-a3b", "v2-lite", "gpt-oss-20b", "gpt-oss-120b")
"""Pairs of other families, in dummy weights."""
WANTED_RATE = 181.74
"""Tokens a second of a 70B target with a 1B draft that others have published."""


def list_parts(options: Options) -> dict[str, Part]:
    """The parts of a host with so many devices, in the order in which they run."""
    parts = [Part("card", "devices, versions, speed of reading", 10, play_card)]
    parts += _one_device(options) if options.num_devices == 1 else _placements(options)
    return {part.name: part for part in parts}


def _one_device(options: Options) -> Iterator[Part]:
    has_vllm = options.vllm_python is not None
    large = 50 + 35 * len(options.acceptances)
    yield Part("8b", "8B-shaped pair, plain and speculative", 55, play_rows)
    yield Part("8b-long", "the same with long prompts", 45, play_long)
    yield Part("8b-sampled", f"the same at temperature {TEMPERATURE}, beside greedy", 55, play_sampled)
    about = "the first run of each workload beside later ones, in two processes"
    yield Part("cold", about, 150, partial(play_cold, placement=ONE))
    yield Part("cold-3b", f"{about}: 3B-shaped pair", 120, partial(play_cold, placement=ONE, pair="3b"))
    about = "a draft that is never right, settings as shipped, beside plain decoding, in two processes"
    yield Part("useless", about, 180, partial(play_useless_draft, placement=ONE))
    yield Part(
        "starts", "from the command to ready, with cold caches and warm ones", 130, partial(play_starts, placement=ONE)
    )
    about = "from the command to ready, of checkpoints and of engines that are built of them"
    yield Part("engine", about, 300, partial(play_engines, placement=ONE), False)
    yield Part("exactness", "texts equal to plain decoding's", 45, partial(play_exactness, placement=ONE))
    yield Part("1b", "1B-shaped target, plain", 25, play_small)
    yield Part("70b", "70B-shaped pair, plain and with forced acceptance", large, play_large)
    about = "8B- and 70B-shaped targets in FP8, FP8 in blocks and 4 bits, beside bfloat16"
    yield Part("quantized", about, 270, partial(play_quantized, placement=ONE))
    about = "8B-shaped target behind prompts of 8,000 tokens, keys and values plain and of 8 bits"
    yield Part("quantized-kv", about, 180, partial(play_quantized_kv, placement=ONE, pair="8b"))
    about = "v2-lite-shaped target behind prompts of 8,000 tokens, latents plain and of 8 bits"
    yield Part("latents-kv", about, 180, partial(play_quantized_kv, placement=ONE, pair="v2-lite"), False)
    about = "8B- and 70B-shaped targets, 1B-shaped drafts step by step and in parallel"
    yield Part("parallel", about, 170, play_parallel)
    about = "30B-A3B-shaped pair, 128 experts of which a token chooses 8, plain and speculative"
    yield Part("experts", about, 120, play_experts)
    about = "layers of experts by what they are held in: Qwen3-30B-A3B's and gpt-oss-120b's shapes"
    yield Part("expert-layers", about, 100, play_expert_layers, options.kind == "cuda")
    about = "the same with other tiles than those that are used"
    yield Part("expert-tiles", about, 70, play_expert_tiles, False)
    for pair in PROFILED_PAIRS:
        about = f"{pair}-shaped pair, what each kernel of a round takes"
        yield Part(f"kernels:{pair}", about, 80, partial(play_round_kernels, pair=pair), False)
    for pair in FAMILY_PAIRS:
        yield Part(pair, f"{pair}-shaped pair, plain and speculative", 90, partial(play_family, pair=pair), False)
    for pair in TEXT_DRAFT_PAIRS:
        about = f"{pair}-shaped target with drafts out of a corpus, plain and speculative"
        yield Part(f"text-drafts:{pair}", about, 80, partial(play_text_drafts, pair=pair), False)
    yield Part("27b-mtp", "27b-states-shaped target with an MTP layer, plain and speculative", 70, play_mtp, False)
    about = "27b-states-shaped pair, states of 32 and of 16 bits"
    yield Part("27b-narrow", about, 150, play_narrow_states, False)
    about = "27b-states-shaped target behind prompts of up to 100,000 tokens"
    yield Part("27b-long", about, 150, play_long_states, False)
    yield Part("guided", "guided rows beside unguided ones, plain and speculative", 80, play_guided)
    yield Part("budgets", "rows whose thoughts have a budget beside others, plain and speculative", 60, play_budgets)
    yield Part(
        "adapters", "rows of 16 adapters beside rows of the base model, plain and speculative", 90, play_adapters
    )
    about = "8B-shaped target with heads on its own device: Medusa's and EAGLE's"
    yield Part("heads", about, 200, partial(play_heads, placement=ONE))
    about = "Medusa's and EAGLE-3's heads beside vLLM"
    yield Part("vllm-heads", about, 400, partial(play_heads_beside_vllm, placement=ONE), has_vllm)
    about = "first tokens of long prompts beside vLLM"
    yield Part("vllm-first", about, 150, play_first_tokens, has_vllm)
    for pair in PEER_SHAPES:
        play = partial(play_shape, pair=pair)
        yield Part(f"vllm:{pair}", f"{pair}-shaped target beside vLLM, made-up weights, plain", 300, play, False)
    yield Part("vllm", "8B-shaped pair beside vLLM", 330, partial(play_vllm, placement=ONE), has_vllm)


def _placements(options: Options) -> Iterator[Part]:
    places = PLACEMENTS[options.num_devices]
    for place in places:
        if place.num_jobs == 1:
            yield Part(f"check:{place.name}", f"links of: {place.about}", 12, partial(play_check, placement=place))
    for pair, seconds in (("8b", 45), ("70b", 80)):
        for place in places:
            jobs = 2 if place.is_apart and place.num_jobs == 1 else 1
            play = partial(play_placement, pair=pair, placement=place)
            yield Part(f"{pair}:{place.name}", f"{pair}-shaped pair: {place.about}", jobs * seconds, play)
        if pair == "8b":
            play = partial(play_cold, placement=places[0])
            about = f"the first run of each workload beside later ones, in two processes: {places[0].about}"
            yield Part("cold", about, 150, play)
            if options.num_devices == 2:
                about = "a draft in parallel that is always right, on the target's device and on one of its own"
                yield Part("parallel-apart", about, 220, partial(play_parallel_apart, apart=find_apart(2)))
                about = "an EAGLE-3 head on the target's device and on one of its own, and whether texts are equal"
                yield Part("eagle3-apart", about, 120, partial(play_eagle3_apart, apart=find_apart(2)))
                play = partial(play_killed_draft, has_head=True)
                yield Part("kill-head", "the rank of an EAGLE-3 head is killed in the middle of a run", 80, play, False)
            yield Part("kill-draft", "a draft rank is killed in the middle of a run", 70, play_killed_draft)
            yield Part("kill-target", "a target rank is killed in the middle of a run", 30, play_killed_target)
    for place in places:
        if place.num_jobs == 1:
            play = partial(play_exactness, placement=place)
            usual = options.num_devices == 2
            yield Part(f"exactness:{place.name}", f"texts equal to plain decoding's: {place.about}", 50, play, usual)
    for place in places:
        if not place.is_apart and len(place.draft) == 1:
            play, usual = partial(play_vllm, placement=place), options.vllm_python is not None
            yield Part(f"vllm:{place.name}", f"8b-shaped pair beside vLLM: {place.about}", 360, play, usual)
    if options.num_devices == 2:
        yield from list_two_device_parts()
    if options.num_devices == 8:
        yield Part("seed-command", "scripts/run.py with draft and target on all eight", 75, play_seed_command)


def play_card(bench: Workbench) -> None:
    """Where the figures are from."""
    host = run([sys.executable, DESCRIBE_HOST], bench.folder, bench.deadline).succeed().last_json()
    bench.keep({"host": host})
    bench.read_bytes_per_s = host.get("read_bytes_per_s", 0.0)
    table = bench.table("Host", "what", "value")
    devices = host["devices"]
    table.add("devices", f"{len(devices)} x {devices[0]}" if devices else "CPU slots")
    for name in ("driver", "cuda", "python", "date"):
        table.add(name, host.get(name) or "-")
    table.add("versions", ", ".join(f"{name} {version}" for name, version in host["versions"].items()))
    if bench.read_bytes_per_s:
        table.add("reads, TB/s", bench.read_bytes_per_s / 1e12)


def play_rows(bench: Workbench) -> None:
    """Plain and speculative decoding of few rows and many."""
    scale = bench.options.scale
    report = bench.bench(bench.config("8b", ONE, most_rows=scale.most_rows), [*scale.rows, scale.most_rows])
    _speed_table(bench, "8B-shaped pair, one device", report)


def play_long(bench: Workbench) -> None:
    """Long prompts, with the time to the first token."""
    report = bench.bench(bench.config("8b", ONE), bench.options.scale.long_prompts)
    _speed_table(bench, "8B-shaped pair, long prompts", report)


def play_sampled(bench: Workbench) -> None:
    """Sampling beside greedy, in one job."""
    rows = bench.options.scale.rows
    sampled = [f"{number}@{TEMPERATURE}" for number in rows]
    report = bench.bench(bench.config("8b", ONE), [*rows, *sampled], "--top-p", TOP_P)
    entries = {(entry["rows"], bool(entry["temperature"])): entry for entry in report["results"]}
    title = f"8B-shaped pair, temperature {TEMPERATURE}, top_p {TOP_P}, beside greedy (tokens/s)"
    table = bench.table(title, "rows", "mode", "greedy", "sampled", "sampled ÷ greedy", "per round")
    for number in rows:
        for mode in ("plain", "speculative"):
            greedy, other = entries[number, False][mode], entries[number, True][mode]
            rates = (greedy["tokens_per_s"], other["tokens_per_s"])
            rounds = greedy["round_wall_ms"] / other["round_wall_ms"]  # acceptance is another thing when sampling
            table.add(number, mode, *rates, rates[1] / rates[0], rounds)


def play_cold(bench: Workbench, placement: Placement, pair: str = "8b") -> None:
    """What the first to send a workload gets, at the settings that a user finds: in a process that finds nothing of
    earlier runs with the pair, and in the next one."""
    workloads = bench.options.scale.cold[bench.options.num_devices]
    most_rows = max(int(re.split("[x@]", workload)[0]) for workload in workloads)
    config = bench.config(pair, placement, most_rows=most_rows, as_shipped=True)
    for process in PROCESSES:
        report = bench.bench(config, workloads, "--cold", variables=bench.own_caches(f"cold-{pair}"))
        _cold_table(bench, f"{pair}-shaped pair, {process} process, {placement.about}", report)


def _cold_table(bench: Workbench, about: str, report: dict[str, Any]) -> None:
    title = f"First runs: {about} (tokens/s); ready after {report['start_s']:.1f} s"
    columns = ("rows", "mode", "first", "next five", "first ÷ median of next", "round ms, first", "round ms, next")
    table = bench.table(title, *columns, "captures", "compilations")
    for entry in report["results"]:
        for mode in ("plain", "speculative"):
            case = entry[mode]
            first, *following = case["tokens_per_s_runs"]
            made = (case["num_captures"], case["num_compilations"])
            later = ", ".join(f"{rate:.0f}" for rate in following)
            first_round, *next_rounds = case["round_wall_ms_runs"]
            rounds = (first_round, statistics.median(next_rounds))
            table.add(name_workload(entry), mode, first, later, case["first_over_next"], *rounds, *made)


def play_small(bench: Workbench) -> None:
    """A small target alone: the share of the memory's speed that is left at 1 row."""
    report = bench.bench(bench.config("1b", ONE, drafts=False), bench.options.scale.rows)
    _speed_table(bench, "1B-shaped target, plain", report)
    table = bench.table("1B-shaped target, one row", "ms a token", "reads, TB/s", "share of what the device reads")
    step = report["results"][0]["plain"]["round_wall_ms"]
    rate = 1e3 * bench.read_bytes("1b") / step
    table.add(step, rate / 1e12, rate / bench.read_bytes_per_s if bench.read_bytes_per_s else None)


def play_experts(bench: Workbench) -> None:
    """A mixture, plain and with a draft of its first layers, of few rows and many."""
    scale = bench.options.scale
    report = bench.bench(bench.config("30b-a3b", ONE, most_rows=scale.most_rows), [*scale.rows, scale.most_rows])
    _speed_table(bench, "30B-A3B-shaped pair, one device", report)


def play_family(bench: Workbench, pair: str) -> None:
    """A target of another family, plain and with a draft of its first layers."""
    _speed_table(
        bench, f"{pair}-shaped pair, one device", bench.bench(bench.config(pair, ONE), bench.options.scale.rows)
    )


def play_mtp(bench: Workbench) -> None:
    """A target that drafts with a layer of its own."""
    config = bench.config("27b-states", ONE, drafts=False, **TRAINED_MTP)
    _speed_table(bench, "27b-states-shaped target with an MTP layer", bench.bench(config, bench.options.scale.rows))


def play_narrow_states(bench: Workbench) -> None:
    """Whether states of half the bytes take less time, where many rows have some."""
    for dtype in ("float32", "bfloat16"):
        option = ("--set", f"kv_cache.state_dtype={dtype}")
        report = bench.bench(bench.config("27b-states", ONE), bench.options.scale.rows, *option)
        _speed_table(bench, f"27b-states-shaped pair, states in {dtype}", report)


def play_long_states(bench: Workbench) -> None:
    """What a token takes behind short prompts and long ones, where three of four layers keep a state."""
    config = bench.config("27b-states-long", ONE, drafts=False)
    report = bench.bench(config, bench.options.scale.states, "--max-tokens", 32, "--repeats", 1)
    table = bench.table("27b-states-shaped target, plain", "rows", "ms a token", "first token ms")
    for entry in report["results"]:
        case = entry["plain"]
        table.add(name_workload(entry), case["time_per_output_token_ms"], case["time_to_first_token_ms"])


def play_parallel(bench: Workbench) -> None:
    """A draft model that drafts all tokens in one forward beside one of the same shape that drafts step by step."""
    scale, (accepted, *_) = bench.options.scale, bench.options.acceptances
    for large, names, rows in (("8B", ("8b-1b", "8b-parallel"), scale.rows), ("70B", ("70b", "70b-parallel"), [1])):
        draft_len = bench.pair(names[0]).draft_len
        columns = ("rows", "drafts", "tokens a round", "tokens/s", "round ms", "plain step ms", "round ÷ plain step")
        table = bench.table(f"{large}-shaped target, 1B-shaped draft, draft_len {draft_len}", *columns)
        for name, how in zip(names, ("step by step", "in parallel"), strict=True):
            forced = min(accepted, draft_len + 1)
            for entry in bench.bench(bench.config(name, ONE, forced_acceptance=forced), rows)["results"]:
                plain, speculative = entry["plain"], entry["speculative"]
                step, took = plain["round_wall_ms"], speculative["round_wall_ms"]
                gained = (speculative["mean_acceptance_length"], speculative["tokens_per_s"])
                table.add(entry["rows"], how, *gained, took, step, took / step)


def play_large(bench: Workbench) -> None:
    """The large pair: plain, and what speculation gives by how many tokens a round gains."""
    shapes, options = bench.pair("70b"), bench.options
    title = (
        f"70B-shaped target ({options.target_quantization}), 1B-shaped draft ({options.draft_quantization}), one row"
    )
    columns = ("tokens a round", "tokens/s", "round ms", "plain tokens/s", "plain step ms", "round ÷ plain step")
    table = bench.table(f"{title}, draft_len {shapes.draft_len}", *columns)
    rounds: list[float] = []
    for acceptance in options.acceptances:
        forced = min(acceptance, shapes.draft_len + 1)
        (entry,) = bench.bench(bench.config("70b", ONE, forced_acceptance=forced), [1])["results"]
        plain, speculative = entry["plain"], entry["speculative"]
        step, length = plain["round_wall_ms"], speculative["mean_acceptance_length"]
        rounds.append(speculative["round_wall_ms"])
        table.add(length, speculative["tokens_per_s"], rounds[-1], plain["tokens_per_s"], step, rounds[-1] / step)
    # A round takes as long whatever is accepted: the rest of the curve follows from the rounds above.
    mean = sum(rounds) / len(rounds)
    curve = bench.table("The same reckoned from these rounds", "tokens a round", "tokens/s")
    for length in range(1, shapes.draft_len + 2):
        curve.add(length, 1e3 * length / mean)
    curve.add(WANTED_RATE * mean / 1e3, WANTED_RATE)


def _speed_table(bench: Workbench, title: str, report: dict[str, Any]) -> None:
    """A line for each mode of each workload."""
    columns = ("rows", "mode", "tokens/s", "ratio to plain", "ms a token", "first token ms", "acceptance", "round ms")
    table = bench.table(title, *columns, "drafting ms", "verifying ms")
    for entry in report["results"]:
        for mode in ("plain", "speculative"):
            if mode in entry:
                case, speculative = entry[mode], mode == "speculative"
                table.add(
                    name_workload(entry), mode, case["tokens_per_s"],
                    case["tokens_per_s"] / entry["plain"]["tokens_per_s"],
                    case["time_per_output_token_ms"], case["time_to_first_token_ms"],
                    case["mean_acceptance_length"] if speculative else None, case["round_wall_ms"],
                    case["round_ms"]["drafting"] if speculative else None, case["round_ms"]["verifying"],
                )  # fmt: skip
