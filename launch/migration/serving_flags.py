"""Options of `vllm serve`, trtllm-serve and trtllm-bench, and the key that each stands for here, or why there is none.

One table: `trtrun serve` and scripts/trtllm_bench.py read command lines by it, and docs/migrate-from-vllm.md is made
of it. It knows no command line.
"""

from __future__ import annotations

import json
from typing import Any

import click

from launch.migration.flags import (
    Changes,
    Flag,
    Takes,
    becomes,
    context_length,
    devices,
    fraction,
    idle,
    one_of,
    only,
    read_object,
    refused,
    spreads,
    whole,
)
from launch.migration.speculative_configs import read_tensorrt_llm, read_vllm
from trtrun.errors import nearest


def _served_name(given: Any) -> str:
    names = [given] if isinstance(given, str) else list(given)
    if len(names) != 1:
        raise ValueError("a model has one name here")
    return str(names[0])


def _lora_modules(given: Any) -> dict[str, str]:
    """Directories by name, of `name=path` or objects of JSON."""
    found = {}
    for module in [given] if isinstance(given, str) else map(str, given):
        if module.startswith("{"):
            fields = read_object(module)
            name, path = fields.get("name"), fields.get("path")
        else:
            name, _, path = module.partition("=")
        if not name or not path:
            raise ValueError("write name=directory")
        found[str(name)] = str(path)
    return found


def _port(given: Any) -> Changes:
    """The API's port, as there; the other two are free ones, so that several servers of a host do not meet."""
    return {"server.http_port": whole(given), "server.grpc_port": 0, "server.metrics_port": 0}


def _origins(given: Any) -> list[str]:
    found = json.loads(given) if isinstance(given, str) and given.startswith("[") else [given]
    return [str(origin) for origin in found]


def _speculative_config(given: Any) -> Changes:
    """vLLM's, as JSON."""
    changes = read_vllm(given)
    if "draft.devices" in changes:
        changes["draft.devices"] = devices(changes["draft.devices"])
    return changes


_CHECKPOINT = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4"),
    *("fbgemm_fp8", "auto", "none"),
)
_TOOLS = {"openai": "gpt-oss", "qwen3_xml": "qwen3_coder", "qwen3": "hermes", "glm4": "glm45"}
_THOUGHTS = {"openai_gptoss": "gpt-oss", "deepseek-r1": "deepseek_r1"}
_DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in ("auto", "float16", "bfloat16", "float32")}
_KV_DTYPES = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "float16": "plain", "bfloat16": "plain"}

FLAGS: tuple[Flag, ...] = (
    becomes("target.devices", "--tensor-parallel-size", "-tp", "--tp-size", "--tp", read=devices),
    becomes("scheduler.max_seq_len", "--max-model-len", "--max-seq-len", read=context_length),
    becomes("scheduler.max_batch_size", "--max-num-seqs", "--max-batch-size", read=whole),
    becomes("scheduler.max_num_tokens", "--max-num-batched-tokens", "--max-num-tokens", read=whole),
    becomes(
        "kv_cache.free_memory_fraction",
        *("--gpu-memory-utilization", "--kv-cache-free-gpu-memory-fraction", "--free-gpu-memory-fraction"),
        "--kv-cache-free-gpu-mem-fraction",
        read=fraction,
        says="of what weights and the largest round leave",
    ),
    becomes("kv_cache.block_size", "--block-size", read=whole),
    becomes("kv_cache.dtype", "--kv-cache-dtype", read=one_of(_KV_DTYPES)),
    becomes("kv_cache.enable_block_reuse", "--enable-prefix-caching", takes=Takes.NONE),
    becomes("target.dtype", "--dtype", read=one_of(_DTYPES)),
    becomes(
        "target.quantization",
        *("--quantization", "-q"),
        read=one_of({"fp8": "fp8", **dict.fromkeys(_CHECKPOINT)}),
        says="fp8 rounds a plain checkpoint; what is quantized says so itself",
    ),
    becomes(
        "target.load_format",
        "--load-format",
        read=one_of({"auto": "auto", "safetensors": "auto", "hf": "auto", "dummy": "dummy"}),
    ),
    becomes("target.expert_parallel", "--enable-expert-parallel", "-ep", takes=Takes.NONE),
    becomes(
        "target.expert_parallel",
        *("--ep-size", "--moe-expert-parallel-size", "--ep"),
        read=lambda given: whole(given) > 1 or None,
        says="over all devices of the target",
    ),
    becomes("cuda_graphs", "--enforce-eager", takes=Takes.NONE, read=lambda given: not given),
    becomes("tokenizer", "--tokenizer"),
    spreads("speculation, draft", "--speculative-config", "-sc", read=_speculative_config),
    spreads("server.http_port", "--port", read=_port, says="gRPC and metrics get free ports"),
    becomes("server.model_name", "--served-model-name", read=_served_name, takes=Takes.MANY),
    becomes("server.tls_key", "--ssl-keyfile"),
    becomes("server.tls_cert", "--ssl-certfile"),
    becomes("server.allowed_origins", "--allowed-origins", read=_origins),
    becomes("server.reasoning_parser", "--reasoning-parser", read=lambda given: _THOUGHTS.get(given, given)),
    becomes("server.tool_parser", "--tool-call-parser", "--tool-parser", read=lambda given: _TOOLS.get(given, given)),
    becomes("server.generation_config", "--generation-config", read=one_of({"auto": "auto", "vllm": "none"})),
    becomes("adapters", "--lora-modules", read=_lora_modules, takes=Takes.MANY),
    becomes("adapter_slots.max_loaded", "--max-loras", read=whole),
    becomes("adapter_slots.max_rank", "--max-lora-rank", read=whole),
    idle("adapters have room once they are named (adapters), or with adapter_slots", "--enable-lora", takes=Takes.NONE),
    idle("always so", "--enable-auto-tool-choice", "--enable-chunked-prefill", takes=Takes.NONE),
    idle("always so", "--enable-chunked-context", "--async-scheduling", "--enable-reasoning", takes=Takes.NONE),
    idle("no code of a checkpoint is run", "--trust-remote-code", takes=Takes.NONE),
    idle("a request names its seed", "--seed"),
    idle(
        "nothing is logged of requests; -v and --log-dir are the log's",
        *("--disable-log-requests", "--enable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log"),
        *("--disable-fastapi-docs", "--enable-log-outputs"),
        takes=Takes.NONE,
    ),
    idle(
        "nothing is logged of requests; -v and --log-dir are the log's",
        *("--log-level", "--uvicorn-log-level", "--max-log-len"),
    ),
    idle("there is one backend", "--backend", "--attention-backend", "--attn-backend", "--device"),
    idle("rows that find no room wait or are preempted", "--scheduler-policy", "--swap-space"),
    idle(
        "graphs are made for all sizes at the start",
        *("--cuda-graph-sizes", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size"),
        *("--max-seq-len-to-capture", "--compilation-config", "-cc", "--optimization-level", "-O"),
    ),
    idle("graphs are made for all sizes at the start", "-O0", "-O1", "-O2", "-O3", takes=Takes.NONE),
    idle("MPI starts the ranks", "--distributed-executor-backend", "--gpus-per-node", "--api-server-count", "-asc"),
    idle("texts are made beside the rounds", "--num-postprocess-workers"),
    idle("ranks of one host sum through shared memory", "--disable-custom-all-reduce", takes=Takes.NONE),
    idle("xgrammar's grammars, compiled beside the rounds", "--guided-decoding-backend", "--structured-outputs-config"),
    idle("requests say it", "--max-logprobs", "--chat-template-content-format"),
    idle("texts alone are served", "--limit-mm-per-prompt", "--media-io-kwargs", "--mm-processor-kwargs"),
    idle("models are found in the Hugging Face cache; nothing is downloaded", "--download-dir", "--hf-token"),
    idle("adapters are held beside the weights", "--max-cpu-loras", "--lora-dtype"),
    idle(
        "the runtime decides it",
        *("--calculate-kv-scales", "--disable-cascade-attn", "--disable-sliding-window", "--use-v2-block-manager"),
        *("--disable-chunked-mm-input", "--multi-step-stream-outputs", "--language-model-only"),
        *("--fail-fast-on-attention-window-too-large", "--fully-sharded-loras"),
        takes=Takes.NONE,
    ),
    idle(
        "the runtime decides it",
        *("--long-prefill-token-threshold", "--max-long-partial-prefills", "--max-num-partial-prefills"),
        *("--num-lookahead-slots", "--num-scheduler-steps", "--preemption-mode", "--prefix-caching-hash-algo"),
        *("--config-format", "--model-impl", "--ignore-patterns", "--model-loader-extra-config"),
    ),
    idle(
        "always so, or as a request says",
        *("--enable-prompt-tokens-details", "--enable-force-include-usage", "--enable-server-load-tracking"),
        *("--exclude-tools-when-tool-choice-none", "--enable-request-id-headers", "--allow-credentials"),
        takes=Takes.NONE,
    ),
    idle("always so, or as a request says", "--logprobs-mode", "--allowed-methods", "--allowed-headers"),
    only(
        (1,),
        "layers are not split by depth: give --tensor-parallel-size as many devices",
        *("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    ),
    only(
        (1,),
        "start one server for each, and a router before them (examples/router)",
        *("--data-parallel-size", "-dp"),
    ),
    only(
        (1,),
        "not split so: give --tensor-parallel-size as many devices",
        *("--context-parallel-size", "--cp-size", "--decode-context-parallel-size", "-dcp"),
        *("--moe-cluster-parallel-size", "--cluster-size", "--nnodes"),
    ),
    only((1,), "beam search is not supported", "--max-beam-width", "--beam-width"),
    only((0,), "weights stay on the devices", "--cpu-offload-gb"),
    only(("fcfs",), "clients take turns, and their requests in order", "--scheduling-policy"),
    only(("generate", "auto"), "texts are generated, and nothing else is done", "--task", "--runner"),
    only(("auto", "hf", "slow"), "the checkpoint's own tokenizer files are read", "--tokenizer-mode"),
    refused(
        "others on this host read command lines: write the key into a file, and name that by --api-key-file",
        "--api-key",
    ),
    refused(
        "the checkpoint's own is used: put yours into chat_template.jinja of a directory with the tokenizer's files, "
        "and name that by --tokenizer",
        "--chat-template",
    ),
    refused("write MODEL as org/name@revision", "--revision", "--tokenizer-revision", "--code-revision"),
    refused("config.json says it: change a copy of it", "--hf-overrides", "--rope-scaling", "--rope-theta"),
    refused(
        "keys and values stay with the engine that computed them",
        *("--kv-transfer-config", "--kv-events-config", "--metadata-server-config-file", "--disagg-cluster-uri"),
        "--server-role",
    ),
    refused("Prometheus reads /metrics; there are no traces of requests", "--otlp-traces-endpoint"),
    refused("a program of yours may use AsyncLLM", "--middleware", "--logits-processors", "--tool-parser-plugin"),
    refused("a program of yours may use AsyncLLM", "--custom-tokenizer", "--custom-module-dirs"),
    refused(
        "kv_cache.max_tokens says how many tokens are held",
        *("--num-gpu-blocks-override", "--kv-cache-memory-bytes", "--kv-cache-memory"),
    ),
    refused("the ranks are placed by target.devices, on hosts too", "--headless", takes=Takes.NONE),
    refused("not supported", "--enable-sleep-mode", "--enable-attention-dp", takes=Takes.NONE),
    refused("requests may have chat_template_kwargs", "--default-chat-template-kwargs"),
    refused("let the proxy before the server take the path away", "--root-path"),
    refused("requests say it, or the model's generation_config.json", "--override-generation-config"),
)
"""In the order of docs. --host and --uds are the same here."""

BY_NAME = {name: flag for flag in FLAGS for name in flag.names}

_KV_FIELDS = {
    "free_gpu_memory_fraction": "kv_cache.free_memory_fraction",
    "enable_block_reuse": "kv_cache.enable_block_reuse",
    "max_tokens": "kv_cache.max_tokens",
    "tokens_per_block": "kv_cache.block_size",
}
_IDLE_KV_FIELDS = (
    *("host_cache_size", "event_buffer_max_size", "enable_partial_reuse", "copy_on_partial_reuse", "use_uvm"),
    *("sink_token_length", "max_attention_window", "onboard_blocks", "secondary_offload_min_priority"),
    *("max_gpu_total_bytes", "attention_dp_events_gather_period_ms", "cross_kv_cache_fraction"),
    *("mamba_ssm_cache_dtype", "use_kv_cache_manager_v2"),
)


def _read_kv_fields(given: Any) -> Changes:
    if not isinstance(given, dict):
        raise click.UsageError("kv_cache_config: write fields, such as free_gpu_memory_fraction: 0.9")
    changes: Changes = {}
    for name, value in given.items():
        if name == "dtype":
            changes |= BY_NAME["--kv-cache-dtype"].change(f"kv_cache_config: {name}", value)
        elif name in _KV_FIELDS:
            changes |= {_KV_FIELDS[name]: value} if value is not None else {}
        elif name not in _IDLE_KV_FIELDS:
            known = ["dtype", *_KV_FIELDS, *_IDLE_KV_FIELDS]
            raise click.UsageError(f"kv_cache_config: unknown field {name!r}{nearest(name, known)}")
    return changes


_FIELD_FLAGS = (
    spreads(
        "speculation, draft",
        "speculative_config",
        read=lambda given: {} if given is None else read_tensorrt_llm(given),
    ),
    spreads("kv_cache", "kv_cache_config", read=_read_kv_fields),
    becomes("cuda_graphs", "cuda_graph_config", "use_cuda_graph", read=lambda given: None if given else False),
    idle(
        "the runtime decides it",
        *("disable_overlap_scheduler", "moe_config", "print_iter_log", "enable_iter_perf_stats", "sampler_type"),
        *("stream_interval", "torch_compile_config", "scheduler_config", "batch_wait_timeout_ms"),
        *("batch_wait_timeout_iters", "enable_autotuner", "garbage_collection_gen0_threshold"),
        *("perf_metrics_max_requests", "return_perf_metrics", "enable_layerwise_nvtx_marker", "allreduce_strategy"),
        *("extended_runtime_perf_knob_config", "pytorch_backend_config", "mm_encoder_only", "env_overrides"),
    ),
)
FIELDS = {name: flag for flag in _FIELD_FLAGS for name in flag.names}
"""Of TensorRT-LLM's configuration (--extra_llm_api_options), those that are no options of its server."""


def normal_name(name: str) -> str:
    """An option as the table has it: with dashes, as vLLM takes both."""
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name
