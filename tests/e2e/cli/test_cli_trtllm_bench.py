"""scripts/trtllm_bench.py: trtllm-bench's command lines, and its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from commands import ROOT, Run

from trtrun import LLM, SamplingParams

SCRIPT = [sys.executable, str(ROOT / "scripts" / "trtllm_bench.py")]
KEYS = {
    "engine": "model model_path engine_dir version backend dtype kv_cache_dtype quantization",
    "world_info": "tp_size pp_size ep_size world_size max_batch_size max_num_tokens scheduling_policy "
    "kv_cache_percentage issue_rate",
    "request_info": "num_requests avg_num_concurrent_requests avg_input_length avg_output_length",
    "performance": "total_latency_ms avg_request_latency_ms request_throughput_req_s system_output_throughput_tok_s "
    "system_total_throughput_tok_s output_throughput_per_user_tok_s output_throughput_per_gpu_tok_s "
    "request_latency_percentiles_ms",
    "streaming_metrics": "token_output_speed_tok_s avg_ttft_ms avg_tpot_ms tpot_percentiles ttft_percentiles "
    "gen_tps_percentiles",
    "decoding_stats": "mode num_draft_tokens_percentiles num_accepted_draft_tokens_percentiles "
    "draft_acceptance_rate_percentiles acceptance_length_percentiles",
    "dataset": "isl_stats osl_stats seq_len_stats num_requests dataset_path max_isl max_osl max_sequence_length "
    "avg_isl avg_osl avg_sequence_length",
}
"""Of trtllm-bench's report."""


def test_throughput_with_a_draft_over_two_ranks(trtrun: Run, tmp_path: Path) -> None:
    prompts = ["def main(", "import os", "class A"]
    rows = [{"task_id": number, "prompt": text, "output_tokens": 6 + number} for number, text in enumerate(prompts)]
    dataset, options = tmp_path / "data.jsonl", tmp_path / "options.yaml"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options.write_text(
        "speculative_config: {decoding_type: Draft_Target, max_draft_len: 4, speculative_model: 'asset:draft'}\n"
        "kv_cache_config: {free_gpu_memory_fraction: 0.1}\n",
        encoding="utf-8",
    )
    words = ["--model", "asset:target", "--workspace", tmp_path, "throughput", "--dataset", dataset, "--tp", 2]
    words += ["--concurrency", 2, "--max_batch_size", 4, "--max_seq_len", 512, "--streaming", "--warmup", 1]
    words += ["--extra_llm_api_options", options, "--set", "speculation.pacing=fixed"]
    for name in ("report", "output", "request"):
        words += [f"--{name}_json", tmp_path / f"{name}.json"]
    done = trtrun(*words, "--iteration_log", tmp_path / "rounds.jsonl", words=SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('--tp is \'target.devices=["cpu:0", "cpu:1"]\'') == 1
    assert "Total Output Throughput (tokens/sec):" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report == json.loads(done.stdout.splitlines()[-1])
    for section, names in KEYS.items():
        assert set(report[section]) == set(names.split()), section
    assert report["machine"] is None and report["world_info"]["world_size"] == report["world_info"]["tp_size"] == 2
    assert report["request_info"]["avg_output_length"] == 7 and report["dataset"]["max_osl"] == 8
    acceptance = report["acceptance"]
    assert 0 < acceptance["num_accepted_draft_tokens"] <= acceptance["num_draft_tokens"]
    assert 1 < acceptance["mean_acceptance_length"] <= 5
    requests = json.loads((tmp_path / "request.json").read_text(encoding="utf-8"))
    assert [row["output_tokens"] for row in requests] == [6, 7, 8]
    assert (tmp_path / "rounds.jsonl").read_text(encoding="utf-8").count("\n") > 2
    texts = json.loads((tmp_path / "output.json").read_text(encoding="utf-8"))
    with LLM(target="asset:target", device="cpu:0") as llm:
        sampling = [SamplingParams(max_tokens=6 + number, temperature=0, ignore_eos=True) for number in range(3)]
        plain = llm.generate(prompts, sampling)
    assert [texts[str(number)] for number in range(3)] == [output.completions[0].text for output in plain]


def test_latency_of_a_prepared_dataset_without_a_draft(trtrun: Run, tmp_path: Path) -> None:
    dataset = tmp_path / "made" / "data.jsonl"
    lengths = ["--input-mean", 8, "--input-stdev", 2, "--output-mean", 3, "--output-stdev", 0, "--num-requests", 2]
    made = trtrun(
        "-m", "asset:target", "prepare-dataset", "--output", dataset, "token-norm-dist", *lengths, words=SCRIPT
    )
    assert made.returncode == 0, made.stderr
    done = trtrun("-m", "name", "--model_path", "asset:target", "latency", "--dataset", dataset, words=SCRIPT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["engine"]["model"] == "name" and report["request_info"]["num_requests"] == 2
    assert report["world_info"]["max_batch_size"] == 1 and "decoding_stats" not in report
    assert report["acceptance"] is None and report["streaming_metrics"]["avg_ttft_ms"] > 0
    (tmp_path / "sampling.yaml").write_text("temperature: 0.8\ntop_pp: 0.9\n", encoding="utf-8")
    words = ["latency", "--dataset", dataset, "--sampler_options", tmp_path / "sampling.yaml"]
    wrong = trtrun("-m", "asset:target", *words, words=SCRIPT)
    assert wrong.returncode == 2 and "top_pp" in wrong.stderr
    late = trtrun("-m", "asset:target", "latency", "--dataset", dataset, "--max_seq_len", 5, words=SCRIPT)
    assert late.returncode == 2 and "task 0: " in late.stderr
