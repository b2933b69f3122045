"""The command `trtrun`: run, plan, bench.

It parses command lines and turns errors into one line each. Everything heavy is imported inside the commands, so that
--help and a mistyped option answer at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from parallel.errors import ParallelError
from trtrun import __version__
from trtrun.config import RuntimeConfig, load_config
from trtrun.errors import TrtrunError

USER_ERROR = 2
DEFECT = 1
INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="trtrun")
def cli() -> None:
    """Lossless speculative decoding of large language models over MPI."""


def _with_config(command: Command) -> Command:
    """Add --config, --set and --speculation."""
    options = (
        click.option(
            "--config",
            "config_path",
            required=True,
            type=click.Path(path_type=Path),
            help="YAML file: models, devices, speculation, KV cache, scheduler.",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set any key of the YAML file, such as speculation.draft_len=8. May be repeated.",
        ),
        click.option(
            "--speculation",
            type=click.Choice(["draft_target", "none"]),
            help="Short for --set speculation.method=…; none runs the target alone.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@_with_config
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt. May be repeated.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help='Rows {"prompt": "…"} or {"prompt_token_ids": […]}, with any sampling parameter.',
)
@click.option("--output", metavar="FILE.jsonl", help='Write one row for each prompt, in input order ("-": stdout).')
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run finished in --output; run the rest.")
@click.option("--max-tokens", type=int, help="Most tokens to generate for each prompt.  [default: 128]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: 0]")
@click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 keeps all.")
@click.option("--top-p", type=float, help="Keep the smallest set of tokens with this probability.")
@click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest.")
@click.option("--seed", type=int, help="Makes sampled output repeatable.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End at this text. May be repeated.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end of text.")
def run(
    config_path: Path,
    overrides: tuple[str, ...],
    speculation: str | None,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    output: str | None,
    resume: bool,
    **sampling: object,
) -> int:
    """Complete prompts.

    Started plainly it starts mpirun itself where the devices need several ranks. Sampling options hold for rows that do
    not name their own. Exit status: 0; 1 when a row was refused (its reason is in the row's `error`); 2 when nothing
    could run.
    """
    from launch.job import Job
    from launch.options import RunOptions

    given = {name: value for name, value in sampling.items() if value is not None and value != ()}
    options = RunOptions(prompts, prompts_file, output, given, resume)
    if not prompts and prompts_file is None:
        raise click.UsageError("nothing to do: give --prompt TEXT or --prompts FILE.jsonl")
    if resume and output in (None, "-"):
        raise click.UsageError("--resume needs --output FILE.jsonl, the file to go on with")
    job = Job(_load(config_path, overrides, speculation), sys.argv[1:])

    def check() -> None:
        from launch.mpirun import find_place
        from launch.run import check_run, finish_resumed

        # Ranks that are started already have to agree that nothing is left: that is play_run's part.
        finished = finish_resumed(options) if resume and find_place() is None else None
        if finished is not None:
            raise click.exceptions.Exit(finished)
        check_run(job, options)

    status = job.enter(check)
    if status is not None:
        return status
    from launch.run import play_run

    return play_run(job.config, options)


@cli.command()
@_with_config
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(config_path: Path, overrides: tuple[str, ...], speculation: str | None, as_json: bool) -> int:
    """Show each rank's host, device, role, bytes and KV tokens, and the mpirun command, without loading weights."""
    from launch.job import Job

    arguments = ["run", "--config", str(config_path), *(word for value in overrides for word in ("--set", value))]
    if speculation is not None:
        arguments += ["--speculation", speculation]
    job = Job(_load(config_path, overrides, speculation), [*arguments, "--prompt", "TEXT"])
    from launch.plan import make_plan, print_plan

    print_plan(make_plan(job), as_json)
    return 0


@cli.command()
@_with_config
@click.option("--rows", default="1,4,16", show_default=True, help="Numbers of prompts that run together.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2), help="Tokens for each prompt.")
@click.option("--prompt-tokens", default=32, show_default=True, type=click.IntRange(1), help="Length of each prompt.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Medians are over these.")
@click.option("--peer", type=click.Choice(["transformers"]), help="Measure this on the same weights and prompts too.")
@click.option("--seed", type=click.IntRange(0), help="Of the random prompts.  [default: drawn, and printed]")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def bench(
    config_path: Path, overrides: tuple[str, ...], speculation: str | None, rows: str, as_json: bool, **numbers: Any
) -> int:
    """Measure plain and speculative decoding in one run, on fresh random prompts; the last line is JSON."""
    from launch.job import Job
    from launch.options import BenchOptions

    counts = tuple(int(part) for part in rows.split(",") if part.strip().isdecimal() and int(part) > 0)
    if not counts or len(counts) != len(rows.split(",")):
        raise click.BadParameter("write numbers with commas between, such as 1,4,16", param_hint="'--rows'")
    job = Job(_load(config_path, overrides, speculation), sys.argv[1:])
    options = BenchOptions(rows=counts, as_json=as_json, **numbers)

    def check() -> None:
        from launch.bench import check_bench

        check_bench(job, options)

    status = job.enter(check)
    if status is not None:
        return status
    from launch.bench import play_bench

    return play_bench(job, options)


def _load(path: Path, overrides: Sequence[str], speculation: str | None) -> RuntimeConfig:
    extra = [] if speculation is None else [f"speculation.method={speculation}"]
    return load_config(path, [*overrides, *extra])


def guarded(action: Callable[[], int]) -> int:
    """Run an action; turn what the user got wrong into one line and an exit status. Defects keep their traceback."""
    try:
        return action()
    except SystemExit as error:  # a worker rank's end
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except click.ClickException as error:
        message = error.format_message()
        hint = "; see --help" if isinstance(error, click.UsageError) else ""
        return _fail(message.rstrip(".") + hint)
    except (TrtrunError, ParallelError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone, as in `trtrun run … | head`. Python would complain again at its own end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DEFECT
    except Exception:
        traceback.print_exc()
        return DEFECT


def _fail(line: str) -> int:
    from launch.job import print_error

    print_error(line)
    return USER_ERROR


def main() -> None:
    """Entry of the console script and of `python -m launch.cli`."""

    def action() -> int:
        # Outside standalone mode click returns the command's value, and 0 after --help or --version.
        return int(cli.main(args=sys.argv[1:] or ["--help"], prog_name="trtrun", standalone_mode=False) or 0)

    leave(guarded(action))


def leave(status: int) -> NoReturn:
    """End this process. A rank that fails takes its job along, however it was started.

    MPI's own end waits for all ranks, so a rank that just exits would hang the job. `python -m mpi4py` prevents that,
    but a user's `mpirun … trtrun run …` does not have it.
    """
    if status and "mpi4py.MPI" in sys.modules:
        from mpi4py.run import set_abort_status

        set_abort_status(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
