"""What the server counts: names, labels and sums, as Prometheus would read them."""

from __future__ import annotations

import pytest
from engine_messages import delta_of
from prometheus_client import CollectorRegistry, generate_latest

from launch.serve import messages
from launch.serve.metrics import FrontMetrics, ModelRecorder, Stage
from launch.serve.metrics.models import name_counters
from launch.serve.refusals import Kind, Refusal


def test_totals_go_on_over_engines_and_names_are_vllms() -> None:
    metrics = FrontMetrics('a "model"')
    observed = metrics.begin(10, 1.0)
    before = None
    for rounds, now in ((1, 1.5), (3, 2.0)):
        delta = delta_of((1, 2), "stop" if rounds == 3 else None, rounds=rounds)
        observed.observe(0, delta, before, now)
        before = delta.statistics
    observed.end(is_whole=True, now=3.0)
    status = messages.Status(
        num_running=1, num_waiting=2, num_free_blocks=3, num_blocks=4, totals={"num_rounds": 7, "verifying_s": 0.5}
    )
    text = metrics.render(status).decode()
    metrics.count_loss()
    metrics.count_restart()
    later = metrics.render(status).decode()
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
    ):
        assert line in text
    assert f"trtrun:rounds_total{{{labels}}} 14.0" in later
    assert f"trtrun:engine_restarts_total{{{labels}}} 1.0" in later
    assert f"trtrun:engine_up{{{labels}}} 0.0" in metrics.render(None).decode()


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
    registry = CollectorRegistry()
    registry.register(recorder)
    text = name_counters(generate_latest(registry)).decode()
    labels = '{model="ensemble",version="1"}'
    for name, value in {
        "request_success": 1, "count": 3, "exec_count": 1, "request_duration_us": 6.5e6, "queue_duration_us": 2e6,
        "compute_input_duration_us": 1e6, "compute_infer_duration_us": 1e6, "compute_output_duration_us": 5e5,
    }.items():  # fmt: skip
        assert f"# TYPE nv_inference_{name} counter" in text
        assert float(text.split(f"nv_inference_{name}{labels} ")[1].split("\n")[0]) == value
    assert 'nv_inference_request_failure{model="ensemble",reason="REJECTED",version="1"} 1.0' in text
    assert 'nv_inference_request_failure{model="ensemble",reason="OTHER",version="1"} 0.0' in text
