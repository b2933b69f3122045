"""The command line of TensorRT-LLM's trtllm-build, and of the build.py before it, answered by `trtrun build`.

Behind scripts/trtllm_build.py. How many ranks share the model says the checkpoint, as there, if no option does; the
older build.py took Hugging Face's directory as --model_dir. It knows these command lines, and nothing of how an engine
is built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from launch.cli import guarded, leave
from launch.commands.write_models import BuildOptions, make_folders_above, run_build
from launch.compat.tensorrt_llm.quoting_fixes import LenientParser, naming_options
from trtrun.configuration.engine_directory import Limits
from trtrun.configuration.model_paths import find_model
from trtrun.models.config import read_model_config
from trtrun.tools.building.settings import BuildSettings
from trtrun.tools.quantizing.directory import find_tp_size
from trtrun.weights.checkpoint import read_json
from trtrun.weights.tensorrt_llm_config import is_tensorrt_llm, read_tp_size

IDLE = (
    *(
        "gemm_plugin",
        "gpt_attention_plugin",
        "nccl_plugin",
        "low_latency_gemm_plugin",
        "low_latency_gemm_swiglu_plugin",
    ),
    *("gemm_swiglu_plugin", "gemm_allreduce_plugin", "fp8_rowwise_gemm_plugin", "bert_attention_plugin"),
    *("workers", "opt_num_tokens", "opt_batch_size", "max_prompt_embedding_table_size"),
    *("use_paged_context_fmha", "use_fp8_context_fmha", "context_fmha", "context_fmha_fp32_acc", "paged_kv_cache"),
    *("kv_cache_type", "tokens_per_block", "remove_input_padding", "multiple_profiles", "use_fused_mlp"),
    *("reduce_fusion", "user_buffer", "norm_quant_fusion", "use_custom_all_reduce", "enable_xqa", "multi_block_mode"),
    *("gather_context_logits", "gather_generation_logits", "gather_all_token_logits", "logits_dtype"),
    *("strongly_typed", "builder_opt", "builder_force_num_profiles", "profiling_verbosity", "log_level"),
    *("input_timing_cache", "output_timing_cache", "monitor_memory", "enable_debug_output", "fast_build"),
    *("max_encoder_input_len", "streamingllm", "weight_sparsity", "weight_streaming", "pp_reduce_scatter"),
    *("use_gemm_plugin", "use_gpt_attention_plugin", "use_rmsnorm_plugin", "use_inflight_batching", "parallel_build"),
    *("enable_context_fmha", "enable_context_fmha_fp32_acc", "use_context_fmha_for_generation", "paged_state"),
    *("lora_plugin", "lora_ckpt_source", "max_lora_rank", "moe_plugin", "mamba_conv1d_plugin", "lookup_plugin"),
    *("attention_qk_half_accumulation", "strip_plan", "max_multimodal_len", "gpus_per_node", "cluster_key"),
)
"""Options of the original that there is nothing to do for: plugins, profiles and caches of its compiler, a paged cache
that there always is, log probabilities, which requests ask for, and adapters, which the YAML file names."""

OPTIONS = {
    "--checkpoint": "--checkpoint_dir",
    "--output": "--output_dir",
    "--tp": "--tp_size",
    "--max-batch-size": "--max_batch_size",
    "--max-num-tokens": "--max_num_tokens",
    "--max-seq-len": "--max_seq_len",
    "--max-draft-len": "--max_draft_len",
}
"""By the names that trtrun's own command has for them."""

UNSUPPORTED = {
    "lora_dir": "name adapters in the YAML file, by `adapters`",
    "model_config": "give --checkpoint_dir",
    "build_config": "give its values as options",
    "auto_parallel": "give --tp_size",
    **dict.fromkeys(("model_cls_file", "model_cls_name", "dry_run", "visualize_network"), "leave it out"),
}
"""What to do in place of each."""

MODES = ("draft_tokens_external", "lookahead_decoding", "medusa", "eagle")
"""Of --speculative_decoding_mode: here the YAML file, or run.py's command line, says the method."""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of trtllm-build or build.py.

    Raises:
        click.UsageError: an option is unknown, lacks its value or is not supported.
    """
    parser = LenientParser(prog="trtllm_build.py", description=__doc__, allow_abbrev=False)
    help_ = "TensorRT-LLM's checkpoint, or Hugging Face's."
    parser.add_argument("--checkpoint_dir", "--model_dir", required=True, dest="checkpoint_dir", help=help_)
    parser.add_argument("--output_dir", default="engine_outputs", help="Of the engine.")
    parser.add_argument("--max_batch_size", type=int, help="Most rows.")
    parser.add_argument("--max_num_tokens", type=int, help="Most tokens of a round.")
    parser.add_argument("--max_seq_len", "--max_decoder_seq_len", type=int, help="Most tokens of a request.")
    parser.add_argument("--max_input_len", type=int, help="Taken, and not needed: requests may have longer prompts.")
    parser.add_argument("--max_output_len", type=int, help="With --max_input_len, in place of --max_seq_len.")
    parser.add_argument("--max_draft_len", type=int, help="Most draft tokens of a row.")
    parser.add_argument("--dtype", default="auto", help="Of activations.  [default: the checkpoint's]")
    help_ = "Devices.  [default: what the checkpoint was converted for]"
    parser.add_argument("--tp_size", "--world_size", type=int, dest="tp_size", help=help_)
    parser.add_argument("--max_beam_width", type=int, default=1, help="Only 1.")
    parser.add_argument("--speculative_decoding_mode", choices=MODES, help="Taken, and not needed.")
    parser.add_argument("--device", help="cuda or cpu: what the engine is for.  [default: what is here]")
    parser.add_argument("--force", action="store_true", help="Build anew where an engine is.")
    for name in IDLE:
        parser.add_argument(f"--{name}", nargs="?", const="", help="Taken, and not needed.")
    parser.add_argument("--lora_target_modules", nargs="+", help="Taken, and not needed.")
    for name, advice in UNSUPPORTED.items():
        parser.add_argument(f"--{name}", nargs="?", const="", help=f"Not supported: {advice}.")
    arguments = parser.parse_mended(words)
    if arguments.max_beam_width != 1:
        raise click.UsageError(f"--max_beam_width {arguments.max_beam_width}: beam search is not supported")
    refused = next((name for name in UNSUPPORTED if getattr(arguments, name) is not None), None)
    if refused is not None:
        raise click.UsageError(f"--{refused} is not supported: {UNSUPPORTED[refused]}")
    return arguments


def make_options(arguments: argparse.Namespace) -> BuildOptions:
    """What the options ask for.

    Raises:
        TrtrunError: the checkpoint cannot be read, or a value is outside its range.
    """
    checkpoint = find_model(Path(arguments.checkpoint_dir), None, "--checkpoint_dir")
    context = read_model_config(checkpoint).max_position_embeddings
    values = read_json(checkpoint, "config.json", required=True)
    max_seq_len = _max_seq_len(arguments)
    if max_seq_len is not None and max_seq_len > context:
        _say(f"--max_seq_len {max_seq_len} is more than the model's context, {context} tokens, which is taken")
        max_seq_len = context
    limits = Limits(arguments.max_batch_size, arguments.max_num_tokens, max_seq_len, arguments.max_draft_len or None)
    tp_size = arguments.tp_size
    if tp_size is None:
        tp_size = read_tp_size(values) if is_tensorrt_llm(values) else find_tp_size(checkpoint)
    settings = BuildSettings(tp_size, arguments.dtype, device=arguments.device, limits=limits)
    return BuildOptions(checkpoint, Path(arguments.output_dir), settings, arguments.force)


def _max_seq_len(arguments: argparse.Namespace) -> int | None:
    """Prompt and output together; older command lines have them apart."""
    seq_len: int | None = arguments.max_seq_len
    if seq_len is not None or arguments.max_output_len is None:
        return seq_len
    if arguments.max_input_len is None:
        raise click.UsageError("--max_output_len needs --max_input_len beside it, or --max_seq_len in place of both")
    return int(arguments.max_input_len + arguments.max_output_len)


def run(words: Sequence[str]) -> int:
    """Build what the command line asks for; returns the exit status."""
    with naming_options(OPTIONS):
        return _build(parse_arguments(words))


def _build(arguments: argparse.Namespace) -> int:
    options = make_options(arguments)
    given = [*IDLE, "lora_target_modules"]
    given += ["speculative_decoding_mode", *(["max_input_len"] if arguments.max_output_len is None else [])]
    idle = [f"--{name}" for name in given if getattr(arguments, name) is not None]
    if idle:
        _say(f"nothing to do for {', '.join(idle)}")
    make_folders_above(options.output)
    return run_build(options)


def _say(line: str) -> None:
    print(f"trtllm_build.py: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """Entry of scripts/trtllm_build.py."""
    leave(guarded(lambda: run(sys.argv[1:])))
