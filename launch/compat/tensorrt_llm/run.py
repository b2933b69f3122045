"""The command line of TensorRT-LLM's examples/run.py for draft-target models, Medusa and lookahead, answered by trtrun.

Engine directories are those of `trtrun build`, or model directories; CPU slots take the place of GPUs where there are
none. Behind scripts/run.py. It knows that command line and its habits, such as `mpirun -n 1` around a job of many
ranks, and nothing of how the job runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from launch.cli import guarded, leave
from launch.compat.tensorrt_llm.engine_options import (
    add_engine_options,
    check_engine_options,
    has_gpu,
    make_runtime_config,
    say_slots,
)
from launch.compat.tensorrt_llm.quoting_fixes import LenientParser
from launch.exit_codes import ExitCode
from launch.jobs.mpi.job import Job

MODULE = "launch.compat.tensorrt_llm.run"
USUAL_TEXT = "Born in north-east France, Soyer trained as a"
"""The original's prompt where none is given."""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of examples/run.py.

    Raises:
        click.UsageError: an option is unknown, lacks its value or is not supported.
    """
    parser = LenientParser(prog="run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--engine_dir", required=True, help="The target's engine, or model directory.")
    add_engine_options(parser)
    parser.add_argument("--max_output_len", type=int, required=True, help="Most tokens to generate.")
    parser.add_argument("--input_text", nargs="+", default=[USUAL_TEXT], help="One prompt or several.")
    parser.add_argument("--output_generation_logits", action="store_true", help="Print each token's log probability.")
    arguments = parser.parse_mended(words)
    check_engine_options(arguments)
    return arguments


def run(words: Sequence[str]) -> int:
    """Run the job that the command line asks for; returns the exit status."""
    from launch.batch.options import RunOptions

    arguments = parse_arguments(words)
    config = make_runtime_config(arguments, has_gpu())
    sampling: dict[str, object] = {"max_tokens": arguments.max_output_len}
    if arguments.output_generation_logits:
        sampling["logprobs"] = 0
    options = RunOptions(prompts=arguments.input_text, sampling=sampling)
    job = Job(config, list(words), module=MODULE, nests=True)

    def check() -> None:
        from launch.batch.checks import check_run

        check_run(job, options)
        say_slots("run.py", arguments, job)

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


def main() -> None:
    """Entry of scripts/run.py and of `python -m launch.compat.tensorrt_llm.run`."""
    leave(guarded(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()


if __name__ == "__main__":
    main()
