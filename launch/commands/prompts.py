"""Options that say which input rows there are, the same for every command that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from launch.batch.options import Part

Command = TypeVar("Command", bound=Callable[..., Any])


def parse_part(context: click.Context, parameter: click.Parameter, value: str | None) -> Part | None:
    """The callback of an option that takes `I/N`, with 1 ≤ I ≤ N."""
    if value is None:
        return None
    number, slash, count = value.partition("/")
    if not slash or not (number.isdecimal() and count.isdecimal()) or not 1 <= int(number) <= int(count):
        raise click.BadParameter(f"{value!r} is no part: write I/N with I from 1 to N, such as 1/4")
    return Part(int(number), int(count))


def with_prompts(command: Command) -> Command:
    """Add --prompt, --prompts and the sampling options, which `given_sampling` sorts out."""
    options = (
        click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt. May be repeated."),
        click.option(
            "--prompts",
            "prompts_file",
            type=click.Path(path_type=Path),
            metavar="FILE.jsonl",
            help='Rows {"prompt": "…"} or {"prompt_token_ids": […]}, with any sampling parameter.',
        ),
        click.option("--max-tokens", type=int, help="Most tokens to generate for each prompt.  [default: 128]"),
        click.option("--temperature", type=float, help="0 is greedy.  [default: 0]"),
        click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 keeps all."),
        click.option("--top-p", type=float, help="Keep the smallest set of tokens with this probability."),
        click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest."),
        click.option("--seed", type=int, help="Makes sampled output repeatable."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End at this text. May be repeated."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end of text."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def given_sampling(values: Mapping[str, object]) -> dict[str, object]:
    """The sampling options that stand on the command line."""
    return {name: value for name, value in values.items() if value is not None and value != ()}
