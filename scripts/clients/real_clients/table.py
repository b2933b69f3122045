"""Clients that nobody here wrote: what is installed for each, how it is called, and what it says when all is well.

Each has an environment of its own. Versions are those that the table in the docs has. It starts nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

from scripts.clients.real_clients.agent_table import AGENTS
from scripts.clients.real_clients.calls import Call, Client, Place, says
from scripts.clients.real_clients.harness_table import HARNESS, HARNESS_BESIDE
from scripts.clients.real_clients.tool_table import TOOL_CLIENTS

ALONE = Path(__file__).resolve().parent / "benchmark_alone.py"
BENCHMARK_NEEDS = (
    "aiohttp",
    "huggingface_hub",
    "msgspec",
    "numpy",
    "orjson",
    "pandas",
    "pillow",
    "psutil",
    "pyyaml",
    "pyzmq",
    "regex",
    "requests",
    "tqdm",
    "transformers>=5,<6",
)
NUM_REQUESTS = 8
STREAMED = "The only thing we have to fear is"
OPENAI_CLIENTS = Path(__file__).resolve().parent / "openai_clients.py"
OPENAI_SAYS = (
    r"hosted_vllm too long: ContextWindowExceededError",
    r"openai code: context_length_exceeded",
    r"models: \[\('\w+', \d+\)\]",
    r"answer put back: 4",
)


def _sglang(backend: str) -> Call:
    def words(place: Place) -> Sequence[object]:
        return (
            ALONE,
            place.unpacked,
            "sglang.benchmark.serving",
            "sglang.benchmark,sglang.srt.utils.network",
            "--backend",
            backend,
            "--base-url",
            place.url,
            "--model",
            "ensemble" if backend == "trt" else place.model,
            "--tokenizer",
            place.tokenizer,
            "--dataset-name",
            "random-ids",
            "--random-input-len",
            24,
            "--random-output-len",
            16,
            "--random-range-ratio",
            1,
            "--num-prompts",
            3 * NUM_REQUESTS,
            "--disable-tqdm",
            "--output-file",
            "sglang.jsonl",
        )

    done = rf"Successful requests:\s+{3 * NUM_REQUESTS}\s"
    # One row for all, so that requests wait.
    options = ("--set", "scheduler.max_batch_size=1") if backend == "sglang-oai" else ()
    return Call(f"--backend {backend}", words, says(done, r"Output token throughput"), options)


def _vllm(backend: str, path: str) -> Call:
    def words(place: Place) -> Sequence[object]:
        return (
            ALONE,
            place.unpacked,
            "vllm.benchmarks.serve",
            "vllm.benchmarks,vllm.utils.argparse_utils,vllm.utils.gc_utils,vllm.utils.network_utils",
            "--backend",
            backend,
            "--base-url",
            place.url,
            "--endpoint",
            path,
            "--model",
            place.model,
            "--tokenizer",
            place.tokenizer,
            "--dataset-name",
            "random",
            "--random-input-len",
            24,
            "--random-output-len",
            16,
            "--num-prompts",
            NUM_REQUESTS,
            "--disable-tqdm",
        )

    return Call(
        f"--backend {backend}",
        words,
        says(rf"Successful requests:\s+{NUM_REQUESTS}\s", r"Speculative Decoding", r"Acceptance length"),
    )


def _guidellm(path: str) -> Call:
    def words(place: Place) -> Sequence[object]:
        backend = f"kind=openai_http,target={place.url},model={place.model},request_format={path}"
        return (
            Path(place.python).with_name("guidellm"),
            "run",
            "--backend",
            backend,
            "--profile",
            "kind=concurrent,streams=2",
            "--constraint",
            f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer",
            f"kind=huggingface_auto,model={place.tokenizer}",
            "--data",
            "kind=synthetic_text,prompt_tokens=24,output_tokens=16",
            "--disable-console-interactive",
            "--output",
            "kind=json,path=guidellm.json",
        )

    def check(said: str, place: Place) -> str:
        report = json.loads((place.folder / "guidellm.json").read_text(encoding="utf-8"))
        totals = report["benchmarks"][0]["metrics"]["request_totals"]
        good = totals["successful"] == NUM_REQUESTS and not totals["errored"]
        return "" if good else f"requests: {json.dumps(totals)}"

    return Call(path, words, check)


def _aiperf(kind: str) -> Call:
    def words(place: Place) -> Sequence[object]:
        return (
            Path(place.python).with_name("aiperf"),
            "profile",
            "--model",
            place.model,
            "--url",
            place.url,
            "--endpoint-type",
            kind,
            "--streaming",
            "--use-server-token-count",
            "--tokenizer",
            place.tokenizer,
            "--concurrency",
            2,
            "--request-count",
            NUM_REQUESTS,
            "--isl",
            24,
            "--osl",
            16,
            "--extra-inputs",
            "ignore_eos:true",
            "--extra-inputs",
            "temperature:0",
            "--server-metrics",
            place.metrics,
            "--ui",
            "none",
        )

    def check(said: str, place: Place) -> str:
        (file,) = place.folder.glob("artifacts/*/profile_export_aiperf.json")
        report = json.loads(file.read_text(encoding="utf-8"))
        count = report.get("request_count", {}).get("avg")
        errors = report.get("error_summary")
        return "" if count == NUM_REQUESTS and not errors else f"{count} requests, errors: {errors}"

    # Offline it takes a directory for the name of a tokenizer on the hub, and looks for that.
    return Call(kind, words, check, variables=lambda place: {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""})


_BATCHER = "inflight_batcher_llm/client/inflight_batcher_llm_client.py"
_END_TO_END = "tools/inflight_batcher_llm/end_to_end_test.py"
_METRICS = "ci/L0_backend_trtllm/base_metrics_verification_tests.py"


def _batcher(name: str, *options: object) -> Call:
    def words(place: Place) -> Sequence[object]:
        return (
            place.backend / _BATCHER,
            "--url",
            place.grpc,
            "--tokenizer-dir",
            place.tokenizer,
            "--request-output-len",
            200,
            *options,
        )

    return Call(f"inflight_batcher_llm_client.py {name}".rstrip(), words, says(r"Output sequence"))


def _end_to_end(protocol: str, *options: str) -> Call:
    def words(place: Place) -> Sequence[object]:
        return (
            place.backend / _END_TO_END,
            "-u",
            place.grpc if protocol == "grpc" else f"{place.host}:{place.port}",
            "-i",
            protocol,
            "--max-input-len=500",
            f"--dataset={place.backend}/ci/L0_backend_trtllm/simple_data.json",
            *options,
        )

    name = " ".join((f"end_to_end_test.py -i {protocol}", *options))
    # At times the HTTP client of tritonclient waits in its destructor for a pool that has ended, and never exits.
    last_words = "Total Latency" if protocol == "http" else ""
    return Call(name, words, says(), last_words=last_words)


def _streamed() -> Call:
    """What their CI does before the test of metrics: one streamed request, whose metrics it keeps."""

    def words(place: Place) -> Sequence[object]:
        return (
            place.backend / "inflight_batcher_llm/client/end_to_end_grpc_client.py",
            "--url",
            place.grpc,
            "--streaming",
            "--output-len",
            16,
            "--prompt",
            STREAMED,
        )

    def check(said: str, place: Place) -> str:
        with urlopen(place.metrics) as answer:
            (place.folder.parent / "end_to_end_token_metrics.out").write_bytes(answer.read())
        return ""

    return Call("end_to_end_grpc_client.py --streaming", words, check, own_server=True)


def _base_metrics() -> Call:
    """It counts from the server's start, at the ports that it names itself, and reads what `_streamed` has kept."""

    def variables(place: Place) -> dict[str, str]:
        from tokenizers import Tokenizer

        shutil.copy(place.folder.parent / "end_to_end_token_metrics.out", place.folder)
        shutil.copy(place.backend / "ci/L0_backend_trtllm/simple_data.json", place.folder)
        tokens = Tokenizer.from_file(str(place.tokenizer / "tokenizer.json")).encode(STREAMED).ids
        return {"BACKEND_ROOT": str(place.backend), "STREAM_INPUT_SIZE": str(len(tokens)), "STREAM_OUTPUT_SIZE": "16"}

    def words(place: Place) -> Sequence[object]:
        return (place.backend / _METRICS, "TRTLLMBaseMetricsTest.test_end_to_end")

    ports = ("--http-port", "8000", "--metrics-port", "8002")
    return Call("base_metrics_verification_tests.py", words, says(r"\nOK"), ports, variables)


BACKEND = "v0.18.0"
OPENAI = "/v1/completions", "/v1/chat/completions"
CLIENTS = (
    Client("guidellm", "0.8.1", [_guidellm(path) for path in OPENAI], ["guidellm==0.8.1", "torch==2.13.0"]),
    Client(
        "SGLang's bench_serving",
        "0.5.23",
        [
            _sglang(name)
            for name in ("sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat", "lmdeploy", "lmdeploy-chat", "trt")
        ],
        BENCHMARK_NEEDS,
        "sglang==0.5.23",
    ),
    Client(
        "vLLM's benchmarks/serve.py",
        "0.33.0",
        [_vllm(name, path) for name, path in zip(("openai", "openai-chat"), OPENAI, strict=True)],
        BENCHMARK_NEEDS,
        "vllm==0.33.0",
    ),
    Client("aiperf", "0.13.0", [_aiperf("completions"), _aiperf("chat")], ["aiperf==0.13.0"]),
    Client(
        "litellm and openai-python",
        "1.106.2, 2.54.0",
        [Call("whole, streams, refusals", lambda place: (OPENAI_CLIENTS, f"{place.url}/v1"), says(*OPENAI_SAYS))],
        ["litellm==1.106.2", "openai==2.54.0"],
    ),
    HARNESS,
    HARNESS_BESIDE,
    *TOOL_CLIENTS,
    *AGENTS,
    Client(
        "tensorrtllm_backend",
        BACKEND,
        [
            _batcher(""),
            _batcher("--streaming", "--streaming"),
            _batcher("--stop-after-ms 200", "--stop-after-ms", 200, "--request-id", 1),
            _batcher("--streaming --stop-after-ms 200", "--streaming", "--stop-after-ms", 200, "--request-id", 1),
            _batcher("--stop-via-request-cancel", "--stop-after-ms", 200, "--stop-via-request-cancel"),
            _end_to_end("http"),
            _end_to_end("grpc"),
            _end_to_end("http", "--test-bls"),
            _streamed(),
            _base_metrics(),
        ],
        ["tritonclient[all]==2.73.0", "transformers>=5,<6", "torch==2.13.0", "pandas", "requests", "tabulate"],
        needs_backend=True,
    ),
)
