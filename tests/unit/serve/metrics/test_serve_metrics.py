"""What the server counts: names, labels and sums, as Prometheus would read them."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from engine_messages import LIMITS, delta_of
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.engine import messages
from launch.serve.metrics import FrontendMetrics, ModelRecorder, Stage
from launch.serve.metrics.families import FrontendTotals
from launch.serve.metrics.server_metrics import write_exposition
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import LARGEST_COUNT
from trtrun.timing.telemetry import RunStatistics

LEFT_OUT = {"nv_gpu_", "vllm:iteration_tokens_total"}
"""Which the page of docs says that there are none of."""
NAMES = r"\b(?:vllm|trtrun):\w+|\bnv_\w+"

ROOT = Path(__file__).resolve().parents[4]
READY = messages.Ready(version="1", config_hash="h", limits=asdict(LIMITS), memory={"cpu": 5, "gpu": 7})
LOADING = messages.Standing(rank=1, phase="adapters", doing="in loading adapter 'x'", seconds=3, still_seconds=1)
STATUS = messages.Status(
    num_running=3,
    num_waiting=2,
    num_free_blocks=8,
    num_blocks=32,
    totals={
        "num_rounds": 7,
        "verifying_s": 0.5,
        "draft_losses": 1,
        "foresight": {"due_by_place": [1, 3], "foreseen_by_place": [0, 2]},
    },
    num_prefilling=1,
    num_prefill_tokens=20,
    num_preempted=1,
)


def samples_of(exposition: bytes) -> dict[str, float]:
    """Every sample by its name and its labels, in their order, but for the served model's."""
    found = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            labels = [f'{name}="{value}"' for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[sample.name + (f"{{{','.join(labels)}}}" if labels else "")] = sample.value
    return found


def busy_metrics() -> FrontendMetrics:
    """Of a server that has answered a request, refused another and lost an engine."""
    metrics = FrontendMetrics("pair", 4)
    metrics.count_refusal(429)
    metrics.count_restart()
    with metrics.models.begin("ensemble") as request:
        request.enter(Stage.INFER)
    observed = metrics.begin(40, 2, 30, 10.0)
    before = {}
    for choice, seconds, rounds in ((0, 1.0, 1), (1, 1.5, 2), (0, 2.0, 3), (1, 4.0, 3)):
        delta = delta_of((1, 2), "stop" if rounds == 3 else None, rounds=rounds)
        statistics = replace(delta.statistics, admitted=0.25, num_preemptions=choice, num_cached_prompt_tokens=16)
        observed.observe(choice, replace(delta, statistics=statistics), before.get(choice), 10.0 + seconds)
        before[choice] = statistics
    observed.end(is_whole=True, now=15.0)
    return metrics


def test_totals_go_on_over_engines_and_names_are_vllms() -> None:
    metrics = FrontendMetrics('a "model"', 4)
    observed = metrics.begin(10, 1, 40, 1.0)
    before = None
    for rounds, now in ((1, 1.5), (3, 2.0)):
        delta = delta_of((1, 2), "stop" if rounds == 3 else None, rounds=rounds)
        observed.observe(0, delta, before, now)
        before = delta.statistics
    observed.end(is_whole=True, now=3.0)
    totals = RunStatistics(num_rounds=7, verifying=0.5, num_captures=3, num_compilations=20).as_dict()
    status = messages.Status(num_running=1, num_waiting=2, num_free_blocks=3, num_blocks=4, totals=totals)
    text = metrics.render(READY, status).decode()
    metrics.count_loss()
    metrics.count_restart()
    later = metrics.render(READY, status).decode()
    labels = 'model_name="a \\"model\\""'
    for line in (
        f"vllm:prompt_tokens_total{{{labels}}} 10.0",
        f"vllm:generation_tokens_total{{{labels}}} 4.0",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 3.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 4.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 1.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 3.0',
        f"vllm:time_to_first_token_seconds_sum{{{labels}}} 0.5",
        f"vllm:e2e_request_latency_seconds_sum{{{labels}}} 2.0",
        f"vllm:num_requests_running{{{labels}}} 1.0",
        f"vllm:num_requests_waiting{{{labels}}} 2.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"trtrun:rounds_total{{{labels}}} 7.0",
        f"trtrun:captures_total{{{labels}}} 3.0",
        f"trtrun:compilations_total{{{labels}}} 20.0",
    ):
        assert line in text
    assert f"trtrun:rounds_total{{{labels}}} 14.0" in later
    assert f"trtrun:captures_total{{{labels}}} 6.0" in later and f"trtrun:compilations_total{{{labels}}} 40.0" in later
    assert f"trtrun:engine_restarts_total{{{labels}}} 1.0" in later
    metrics.count_loss()
    assert f"trtrun:rounds_total{{{labels}}} 21.0" in metrics.render(READY, status).decode()
    assert f"trtrun:engine_up{{{labels}}} 0.0" in metrics.render(None, None).decode()
    assert metrics.totals.num_restarts == 1
    assert metrics.totals.mean_acceptance_length == pytest.approx(1 + 1 / 3)


def test_requests_count_for_the_model_that_they_name_with_the_time_of_each_stage() -> None:
    clock = iter([0.0, 1.0, 4.0, 4.5, 10.0, 12.0]).__next__
    recorder = ModelRecorder(clock)
    with recorder.begin("ensemble") as request:
        request.enter(Stage.INFER)
        request.enter(Stage.OUTPUT)
        request.move_to_queue(2.0)
        request.num_inferences = 3
    with pytest.raises(Refusal), recorder.begin("ensemble"):
        raise Refusal(Kind.BUSY, "later")
    text = write_exposition(recorder.collect()).decode()
    labels = '{model="ensemble",version="1"}'
    for name, value in {
        "request_success": 1, "count": 3, "exec_count": 1, "request_duration_us": 6.5e6, "queue_duration_us": 2e6,
        "compute_input_duration_us": 1e6, "compute_infer_duration_us": 1e6, "compute_output_duration_us": 5e5,
    }.items():  # fmt: skip
        assert f"# TYPE nv_inference_{name} counter" in text
        assert float(text.split(f"nv_inference_{name}{labels} ")[1].split("\n")[0]) == value
    assert 'nv_inference_request_failure{model="ensemble",reason="REJECTED",version="1"} 1\n' in text
    assert 'nv_inference_request_failure{model="ensemble",reason="OTHER",version="1"} 0\n' in text


def test_the_parts_of_a_model_share_its_requests_and_its_time() -> None:
    clock = iter([0.0, 1.0, 4.0, 4.5, 10.0, 11.0, 13.0]).__next__
    recorder = ModelRecorder(clock)
    names = ("reads", "generates", "writes")
    recorder.compose("ensemble", names)
    assert not re.search("ensemble|reads", write_exposition(recorder.collect()).decode()), "nobody has asked yet"
    request = recorder.begin("ensemble")
    request.num_inferences = 2
    request.enter(Stage.INFER)
    pending = [recorder.read(name).num_pending for name in ("ensemble", *names)]
    request.begin_answer()
    request.begin_answer()
    assert (
        pending == [1, 0, 1, 0] and recorder.read("ensemble").num_pending == recorder.read("generates").num_pending == 0
    )
    request.move_to_queue(2.0)
    request.enter(Stage.OUTPUT)
    request.succeed()
    whole, parts = recorder.read("ensemble"), [recorder.read(name) for name in names]
    assert [part.num_successes for part in parts] == [1] * 3 and [part.num_inferences for part in parts] == [2] * 3
    assert [part.success_seconds for part in parts] == [1.0, 3.0, 0.5]
    for stage in Stage:
        assert sum(part.seconds[stage] for part in parts) == whole.seconds[stage] > 0
    with pytest.raises(ValueError), recorder.begin("ensemble") as failed:
        failed.enter(Stage.INFER)
        raise ValueError
    assert [part.num_successes for part in parts] == [2, 1, 1]
    assert [part.num_failures for part in parts] == [{}, {"BACKEND": 1}, {}] and parts[1].failure_seconds == 2.0
    assert whole.num_pending == parts[1].num_pending == 0


def test_tritons_metrics_are_written_as_triton_writes_them() -> None:
    """Whole numbers, and a bucket's bound behind the other labels: programs read them by regular expressions."""
    text = busy_metrics().render(READY, STATUS).decode()
    lines = [line for line in text.splitlines() if line.startswith(("nv_inference", "nv_llm"))]
    assert all(re.fullmatch(r"\d+", line.rpartition(" ")[2]) for line in lines) and len(lines) > 20
    labels = 'model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="50"'
    assert re.search(rf"^nv_llm_input_token_len_bucket{{{labels}}} 1$", text, re.MULTILINE)
    assert 'nv_inference_pending_request_count{model="ensemble",version="1"} 0\n' in text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refusal(Kind.BUSY, ""), "REJECTED"),
        (Refusal(Kind.UNAVAILABLE, ""), "REJECTED"),
        (Refusal(Kind.TIMEOUT, ""), "BACKEND"),
        (Refusal(Kind.INVALID, ""), "OTHER"),
        (Refusal(Kind.UNKNOWN_MODEL, ""), None),
        (asyncio.CancelledError(), "CANCELED"),
        (GeneratorExit(), "CANCELED"),
        (ValueError(), "BACKEND"),
    ],
)
def test_a_request_fails_once_for_the_reason_that_ended_it(error: BaseException, reason: str | None) -> None:
    recorder = ModelRecorder()
    request = recorder.begin("ensemble")
    request.fail_with(error)
    totals = recorder.read("ensemble")
    assert totals.num_failures == ({reason: 1} if reason else {}) and totals.num_pending == 0
    if reason:
        request.succeed()
        request.fail_with(ValueError())
        assert totals.num_successes == 0 and totals.num_failures == {reason: 1}


def test_a_request_that_is_given_up_is_no_whole_one_and_no_limit_is_no_size() -> None:
    metrics = FrontendMetrics("pair", 4)
    metrics.begin(10, 1, LARGEST_COUNT, 1.0).end(is_whole=False, now=2.0)
    samples = samples_of(metrics.render(READY, STATUS))
    assert samples["trtrun:requests_aborted_total"] == 1
    assert samples["vllm:e2e_request_latency_seconds_count"] == 0
    assert samples["vllm:request_params_n_count"] == 1 and samples["vllm:request_params_max_tokens_count"] == 0


def test_a_requests_time_is_shared_out_to_queue_prompt_and_decoding() -> None:
    samples = samples_of(busy_metrics().render(READY, STATUS))
    for name, value in {
        "vllm:time_to_first_token_seconds_sum": 1.0,
        "vllm:request_queue_time_seconds_sum": 0.25,
        "vllm:request_prefill_time_seconds_sum": 0.75,
        "vllm:request_decode_time_seconds_sum": 3.0,
        "vllm:request_inference_time_seconds_sum": 3.75,
        "vllm:e2e_request_latency_seconds_sum": 5.0,
        "vllm:request_time_per_output_token_seconds_sum": 1.0,
        "vllm:inter_token_latency_seconds_sum": 1.0 / 2 + 2.5 / 2,
        "vllm:request_generation_tokens_sum": 8,
        "vllm:request_max_num_generation_tokens_sum": 4,
        "vllm:request_params_n_sum": 2,
        "vllm:request_params_max_tokens_sum": 30,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:num_preemptions_total": 1,
        'vllm:request_success_total{finished_reason="stop"}': 2,
        'trtrun:requests_refused_total{status="429"}': 1,
    }.items():
        assert samples[name] == pytest.approx(value), name


def test_acceptance_lengths_are_a_histogram_of_rounds() -> None:
    samples = samples_of(busy_metrics().render(READY, STATUS))
    # Each choice: three rounds of one accepted draft token.
    assert [samples[f'trtrun:acceptance_length_bucket{{le="{n}.0"}}'] for n in range(1, 6)] == [0, 6, 6, 6, 6]
    assert samples["trtrun:acceptance_length_sum"] == 12 and samples["trtrun:acceptance_length_count"] == 6
    assert samples['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'] == 6
    assert samples['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}'] == 0
    assert samples['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="3"}'] == 0
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="4"}' not in samples


def test_rounds_without_drafts_are_rounds_and_no_drafts() -> None:
    """vLLM's dashboards divide accepted tokens by drafts, whatever pacing leaves out."""
    metrics, statistics = FrontendMetrics("pair", 4), RequestStatistics()
    for drafted, accepted in ((4, 3), (0, 0), (0, 0), (2, 0), (0, 0)):
        statistics.record_round(drafted, accepted)
    delta = replace(delta_of((1, 2), "stop"), statistics=statistics)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=CompletionDelta)
    metrics.begin(10, 1, 5, 1.0).observe(0, read, None, 2.0)
    samples = samples_of(metrics.render(READY, STATUS))
    assert samples["vllm:spec_decode_num_drafts_total"] == 2 and samples["trtrun:acceptance_length_count"] == 5
    assert metrics.totals.num_row_rounds == 5 and metrics.totals.mean_acceptance_length == 1 + 3 / 5


def test_the_engine_under_the_names_of_tritons_backend() -> None:
    metrics = busy_metrics()
    metrics.begin(10, 1, 5, 1.0).end(is_whole=True, now=2.0)  # on a bucket's bound
    samples = samples_of(metrics.render(READY, STATUS))

    def told(name: str, label: str) -> dict[str, float]:
        pattern = re.compile(rf'nv_trt_llm_{name}_metrics{{.*{label}="(\w+)".*}}')
        return {found[1]: value for key, value in samples.items() if (found := pattern.fullmatch(key))}

    assert told("request", "request_type") == {"active": 5, "max": 4, "scheduled": 3, "context": 1, "waiting": 2}
    assert told("runtime_memory", "memory_type") == {"cpu": 5, "gpu": 7}
    assert told("kv_cache_block", "kv_cache_block_type") == {
        "max": 32, "free": 8, "used": 24, "tokens_per": 16, "reused": 2, "fraction": 0.75,
    }  # fmt: skip
    assert told("inflight_batcher", "inflight_batcher_specific_metric") == {
        "total_context_tokens": 20, "generation_requests": 2, "micro_batch_id": 0, "paused_requests": 1,
    }  # fmt: skip
    general = told("general", "general_type")
    assert general["iteration_counter"] == 7 and general["timestamp"] > 1e15
    labels = 'model="tensorrt_llm",response_metric_type="total_{}_tokens",version="1"'
    assert samples[f"nv_llm_input_token_len_sum{{{labels.format('input')}}}"] == 50
    assert samples[f'nv_llm_input_token_len_bucket{{le="10",{labels.format("input")}}}'] == 1
    assert samples[f'nv_llm_input_token_len_bucket{{le="50",{labels.format("input")}}}'] == 2
    assert samples[f'nv_llm_output_token_len_bucket{{le="10",{labels.format("output")}}}'] == 2
    assert samples["trtrun:draft_hit_rate"] == 0.5
    assert samples['vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="31"}'] == 1


def test_each_phase_of_each_rank_is_told_by_the_longest_thread() -> None:
    longer = replace(LOADING, seconds=5.0)
    samples = samples_of(busy_metrics().render(READY, STATUS, [LOADING, longer, LOADING]))
    assert samples['trtrun:engine_phase_seconds{phase="adapters",rank="1"}'] == 5.0


def test_an_engine_in_a_long_round_is_up_and_as_full_as_it_last_said() -> None:
    metrics = busy_metrics()
    told, later = samples_of(metrics.render(READY, STATUS)), samples_of(metrics.render(READY, None))
    timestamp = next(name for name in told if "timestamp" in name)
    assert told.pop(timestamp) <= later.pop(timestamp) and told == later and told["trtrun:engine_up"] == 1
    metrics.count_loss()
    starting = samples_of(metrics.render(None, None))
    assert starting["trtrun:engine_up"] == 0 and starting["vllm:num_requests_running"] == 0
    next_one = samples_of(metrics.render(READY, None))
    assert next_one["trtrun:engine_up"] == 1, "it is in its first round"
    assert next_one["vllm:num_requests_running"] == 0, "the engine before said it"
    hanging = samples_of(metrics.render(READY, None, is_hanging=True))
    assert hanging["trtrun:engine_up"] == 0


def test_without_an_engine_only_what_the_front_knows_is_told() -> None:
    samples = samples_of(FrontendMetrics("pair", 0).render(None, None))
    assert samples["trtrun:engine_up"] == 0 and samples["trtrun:requests_aborted_total"] == 0
    assert not [name for name in samples if name.startswith(("nv_trt_llm_request", "trtrun:draft_hit_rate"))]


def test_what_was_found_in_texts_is_counted_once() -> None:
    totals, first = FrontendTotals(), delta_of((3,))
    totals.add(first, None)
    totals.add(delta_of((4,), rounds=2), first.statistics)
    assert (totals.num_suffix_draft_tokens, totals.num_accepted_suffix_draft_tokens) == (3, 1)


def test_the_dashboard_asks_for_what_is_exposed_and_the_page_of_docs_has_every_name() -> None:
    exposition = busy_metrics().render(READY, STATUS, [LOADING])
    exposed = set(re.findall(r"^([\w:]+)", exposition.decode(), re.MULTILINE))
    labels: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^([\w:]+){(.*)}", exposition.decode(), re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
    board = json.loads((ROOT / "docs" / "grafana" / "trtrun-serve.json").read_text(encoding="utf-8"))
    assert board["uid"] == "trtrun-serve"
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        assert panel["description"].endswith(".") and panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = set(re.findall(NAMES, target["expr"]))
            assert names and names <= exposed, (panel["title"], names - exposed)
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["expr"].count('instance=~"$instance"') == len(re.findall(NAMES, target["expr"]))
            asked = set(re.findall(r'(\w+)=~?"', target["expr"])) | set(
                re.findall(r"{{(\w+)}}", target["legendFormat"])
            )
            for group in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", target["expr"]):
                asked |= {label.strip() for label in group.split(",")}
            told = {"instance"}.union(*(labels.get(name, set()) for name in names))  # Prometheus says whose it is
            assert asked <= told, (panel["title"], asked - told)
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"(?:\bvllm|\btrtrun):[a-z]\w+|\bnv_\w+", page)) - LEFT_OUT
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed - documented} <= documented
    assert {name for name in documented if not {name, f"{name}_bucket"} & exposed} == set()
