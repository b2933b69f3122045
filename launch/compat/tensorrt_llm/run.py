"""The command line of TensorRT-LLM's examples/run.py for draft-target models, Medusa and lookahead, answered by trtrun.

Engine directories are those of `trtrun build`, or model directories; CPU slots take the place of GPUs where there are
none. Behind scripts/run.py. It knows that command line and its habits, such as `mpirun -n 1` around a job of many
ranks, and nothing of how the job runs.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from launch.cli import guarded, leave
from launch.compat.tensorrt_llm.quoting_fixes import CLOSING_QUOTES, OPENING_QUOTES, LenientParser
from launch.exit_codes import ExitCode
from launch.jobs.mpi.job import Job
from parallel.mpi_rank import find_mpi_rank
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.configuration.engine_defaults import find_engines
from trtrun.configuration.engine_directory import EngineDescription
from trtrun.configuration.model_paths import find_model
from trtrun.errors import shorten
from trtrun.heads.eagle_tensors import find_eagle_method

MODULE = "launch.compat.tensorrt_llm.run"
DRAFT_OPTION = "--draft_target_model_config"
MEDUSA_OPTION = "--medusa_choices"
EAGLE_OPTION = "--eagle_choices"
DYNAMIC_OPTION = "--eagle_use_dynamic_tree"
TOP_K_OPTION = "--eagle_dynamic_tree_max_top_k"
LOOKAHEAD_OPTION = "--lookahead_config"
USUAL_TEXT = "Born in north-east France, Soyer trained as a"
"""The original's prompt where none is given."""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of examples/run.py.

    Raises:
        click.UsageError: an option is unknown, lacks its value or is not supported.
    """
    parser = LenientParser(prog="run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--engine_dir", required=True, help="The target's engine, or model directory.")
    parser.add_argument("--draft_engine_dir", help="The draft's engine, or model directory.")
    parser.add_argument("--tokenizer_dir", help="Where the tokenizer is, if not beside the target.")
    parser.add_argument(
        DRAFT_OPTION,
        metavar='"[4,[0],[1],False]"',
        help="draft_len, the draft's devices, the target's devices, use_logits.",
    )
    parser.add_argument(
        MEDUSA_OPTION,
        metavar='"[[0],[0,0],[1]]"',
        help="Paths of a tree, or its name: Medusa heads draft, of --draft_engine_dir or beside the target's weights.",
    )
    parser.add_argument(
        EAGLE_OPTION,
        metavar='"[[0],[0,0],[1]]"',
        help="Paths of a tree, or its name: an EAGLE head drafts, of --draft_engine_dir.",
    )
    parser.add_argument(
        DYNAMIC_OPTION, action="store_true", help=f"An EAGLE head drafts dynamic trees; with {TOP_K_OPTION}."
    )
    parser.add_argument(TOP_K_OPTION, type=int, help="Tokens of each depth that are continued.")
    parser.add_argument(
        LOOKAHEAD_OPTION,
        metavar='"[7,7,7]"',
        help="Window size, n-gram size and verification set size: the target drafts for itself.",
    )
    parser.add_argument("--max_output_len", type=int, required=True, help="Most tokens to generate.")
    parser.add_argument("--input_text", nargs="+", default=[USUAL_TEXT], help="One prompt or several.")
    parser.add_argument("--kv_cache_enable_block_reuse", action="store_true")
    parser.add_argument("--kv_cache_free_gpu_memory_fraction", type=float, help="Of memory that is free.")
    parser.add_argument("--output_generation_logits", action="store_true", help="Print each token's log probability.")
    parser.add_argument("--num_beams", type=int, default=1, help="Only 1: beam search is not supported.")
    parser.add_argument("--use_py_session", action="store_true", help="Not supported.")
    arguments = parser.parse_mended(words)
    if arguments.num_beams > 1:
        raise click.UsageError(f"--num_beams {arguments.num_beams}: beam search is not supported with a draft model")
    if arguments.use_py_session:
        raise click.UsageError("--use_py_session: there is no Python session; leave the option out")
    chosen = {
        DRAFT_OPTION: arguments.draft_target_model_config is not None,
        MEDUSA_OPTION: arguments.medusa_choices is not None,
        EAGLE_OPTION: arguments.eagle_choices is not None,
        DYNAMIC_OPTION: arguments.eagle_use_dynamic_tree,
        LOOKAHEAD_OPTION: arguments.lookahead_config is not None,
    }
    given = [option for option, is_given in chosen.items() if is_given]
    if len(given) > 1:
        raise click.UsageError(f"{given[0]} and {given[1]} are two methods: give one of them")
    if arguments.eagle_use_dynamic_tree != (arguments.eagle_dynamic_tree_max_top_k is not None):
        raise click.UsageError(f"{DYNAMIC_OPTION} and {TOP_K_OPTION} go together: give both, or none")
    if chosen[EAGLE_OPTION] or chosen[DYNAMIC_OPTION]:
        if arguments.draft_engine_dir is None:
            raise click.UsageError(f"{given[0]} needs --draft_engine_dir: the directory of the EAGLE head")
        return arguments
    if arguments.medusa_choices is not None:
        return arguments
    if arguments.lookahead_config is not None and arguments.draft_engine_dir is not None:
        raise click.UsageError(f"{LOOKAHEAD_OPTION} drafts without a draft model: leave --draft_engine_dir out")
    if (arguments.draft_engine_dir is None) != (arguments.draft_target_model_config is None):
        raise click.UsageError(
            f"--draft_engine_dir and {DRAFT_OPTION} go together: give both, or none for plain decoding; a directory of "
            f"heads goes with {MEDUSA_OPTION}, {EAGLE_OPTION} or {DYNAMIC_OPTION}"
        )
    return arguments


def parse_draft_config(text: str) -> tuple[int, list[int], list[int], bool]:
    """Read `[draft_len, [draft devices], [target devices], use_logits]`, as literals only.

    Raises:
        click.UsageError: it is something else.
    """
    try:
        value = ast.literal_eval(text.strip(OPENING_QUOTES + CLOSING_QUOTES + " "))
        draft_len, draft_devices, target_devices, use_logits = value
        devices = [*draft_devices, *target_devices]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        devices = None
    fits = (
        devices is not None
        and type(draft_len) is int
        and isinstance(use_logits, bool)
        and bool(draft_devices)
        and bool(target_devices)
        and all(type(device) is int and device >= 0 for device in devices)
    )
    if not fits:
        raise click.UsageError(
            f'{DRAFT_OPTION} {text!r}: write "[draft_len,[draft devices],[target devices],use_logits]", '
            'such as "[4,[0],[1],False]"'
        )
    return draft_len, list(draft_devices), list(target_devices), use_logits


def parse_choices(text: str, option: str) -> object:
    """Read a list of paths, as literals only, or the name of a tree; what is in it the configuration checks.

    Raises:
        click.UsageError: it is something else.
    """
    text = text.strip(OPENING_QUOTES + CLOSING_QUOTES + " ")
    return text if text.isidentifier() else _parse_list(option, text, _CHOICES)


def parse_lookahead_config(text: str) -> object:
    """Read `[window size, n-gram size, verification set size]`, as literals only; what they are the configuration
    checks.

    Raises:
        click.UsageError: it is no list.
    """
    return _parse_list(LOOKAHEAD_OPTION, text.strip(OPENING_QUOTES + CLOSING_QUOTES + " "), _SIZES)


_CHOICES = 'paths of ranks, such as "[[0],[0,0],[1]]", or the name of a tree'
_SIZES = 'window size, n-gram size and verification set size, such as "[7,7,7]"'


def _parse_list(option: str, text: str, expected: str) -> object:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list | tuple):
        raise click.UsageError(f"{option} {shorten(text)}: write {expected}")
    return value


def make_runtime_config(arguments: argparse.Namespace, has_gpu: bool) -> RuntimeConfig:
    """The configuration that the options stand for; device numbers are CPU slots where there is no GPU, which kind
    of EAGLE head drafts its files say, and how many devices a target has that no option counts its engine."""
    draft_len, draft_devices, use_logits = 4, [0], False
    models = {"target": {"model": arguments.engine_dir}, "draft": {"model": arguments.draft_engine_dir}}
    engines = find_engines(models, None, "run.py")
    target_devices = list(range(engines["target"].tp_size if "target" in engines else 1))
    if arguments.draft_target_model_config is not None:
        draft_len, draft_devices, target_devices, use_logits = parse_draft_config(arguments.draft_target_model_config)
        draft_devices = _fit_devices(draft_devices, engines.get("draft"))
        target_devices = _fit_devices(target_devices, engines.get("target"))
    kind = "cuda" if has_gpu else "cpu"
    values: dict[str, Any] = {
        "target": {"model": arguments.engine_dir, "devices": [f"{kind}:{index}" for index in target_devices]},
        "speculation": {"draft_len": draft_len, "use_logits": use_logits},
        "kv_cache": {"enable_block_reuse": arguments.kv_cache_enable_block_reuse},
    }
    if arguments.medusa_choices is not None:
        choices = parse_choices(arguments.medusa_choices, MEDUSA_OPTION)
        values["speculation"] = {"method": "medusa", "medusa_choices": choices}
        values["draft"] = {"model": arguments.draft_engine_dir or arguments.engine_dir}
    elif arguments.eagle_choices is not None or arguments.eagle_use_dynamic_tree:
        if arguments.eagle_choices is not None:
            tree: dict[str, object] = {"eagle_choices": parse_choices(arguments.eagle_choices, EAGLE_OPTION)}
        else:
            tree = {"eagle_topk": arguments.eagle_dynamic_tree_max_top_k}
        method = find_eagle_method(find_model(Path(arguments.draft_engine_dir), None, "--draft_engine_dir"))
        values["speculation"] = {"method": method, **tree}
        values["draft"] = {"model": arguments.draft_engine_dir}
    elif arguments.lookahead_config is not None:
        sizes = parse_lookahead_config(arguments.lookahead_config)
        values["speculation"] = {"method": "lookahead", "lookahead_config": sizes}
    elif arguments.draft_engine_dir is not None:
        devices = [f"{kind}:{index}" for index in draft_devices]
        values["draft"] = {"model": arguments.draft_engine_dir, "devices": devices}
    else:
        values["speculation"]["method"] = "none"
    if arguments.tokenizer_dir is not None:
        values["tokenizer"] = arguments.tokenizer_dir
    if arguments.kv_cache_free_gpu_memory_fraction is not None:
        values["kv_cache"]["free_memory_fraction"] = arguments.kv_cache_free_gpu_memory_fraction
    return make_config(values, where="run.py")


def _fit_devices(devices: list[int], engine: EngineDescription | None) -> list[int]:
    """The first of the devices, as many as the engine was built for: published command lines list all of a host's."""
    return devices if engine is None else devices[: engine.tp_size]


def run(words: Sequence[str]) -> int:
    """Run the job that the command line asks for; returns the exit status."""
    from launch.batch.options import RunOptions

    arguments = parse_arguments(words)
    is_on_gpus = has_gpu()
    config = make_runtime_config(arguments, is_on_gpus)
    sampling: dict[str, object] = {"max_tokens": arguments.max_output_len}
    if arguments.output_generation_logits:
        sampling["logprobs"] = 0
    options = RunOptions(prompts=arguments.input_text, sampling=sampling)
    job = Job(config, list(words), module=MODULE, nests=True)

    def check() -> None:
        from launch.batch.checks import check_run

        check_run(job, options)
        place, world_size = find_mpi_rank(), job.topology.world_size
        is_rank_of_a_parent = place is not None and place.size == world_size > 1
        if is_rank_of_a_parent:
            return
        if not is_on_gpus:
            print("run.py: no GPU here; each device number is a CPU slot", file=sys.stderr, flush=True)
        if arguments.draft_target_model_config is not None and config.draft is not None:
            _, *named, _ = parse_draft_config(arguments.draft_target_model_config)
            used = [config.draft.devices, config.target.devices]
            for role, listed, taken in zip(("draft", "target"), named, used, strict=True):
                if len(taken) < len(listed):
                    line = f"the {role}'s engine was built for {len(taken)} of the {len(listed)} devices: the first"
                    print(f"run.py: {line}", file=sys.stderr, flush=True)

    status = job.enter(check)
    return _play(job, options) if status is None else status


def _play(job: Job, options: Any) -> int:
    """Rank 0 prints inputs and outputs in the form of examples/run.py."""
    from launch.batch.run import load_llm
    from launch.jobs.mpi.job import finish_mpi
    from trtrun.core.sampling_params import SamplingParams

    refused = 0
    with load_llm(job.spec) as llm:
        outputs = llm.generate(list(options.prompts), SamplingParams.from_mapping(options.sampling))
    for output in outputs:
        print(f'Input [Text {output.index}]: "{output.prompt}"')
        if output.error is not None:
            refused += 1
            print(f"run.py: input {output.index} refused: {output.error}", file=sys.stderr, flush=True)
        for completion in output.completions:
            print(f'Output [Text {output.index} Beam {completion.index}]: "{completion.text}"')
            if completion.logprobs is not None:
                values = " ".join(f"{entry.logprob:.4f}" for entry in completion.logprobs)
                print(f"Log probabilities [Text {output.index}]: {values}")
    sys.stdout.flush()
    finish_mpi()
    return ExitCode.ROWS_REFUSED if refused else ExitCode.DONE


def has_gpu() -> bool:
    """Whether there is a GPU here."""
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() > 0


def main() -> None:
    """Entry of scripts/run.py and of `python -m launch.compat.tensorrt_llm.run`."""
    leave(guarded(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
