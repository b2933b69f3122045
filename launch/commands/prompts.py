"""Options that say which input rows there are, the same for every command that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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


def parse_biases(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, float] | None:
    """The callback of an option that takes `ID=NUMBER` again and again; None where it is not given."""
    biases: dict[str, float] = {}
    for value in values:
        token, _, number = value.partition("=")
        try:
            biases[str(int(token))] = float(number)
        except ValueError:
            raise click.BadParameter(f"{value!r} is no bias: write ID=NUMBER, such as 5=-100") from None
    return biases or None


def parse_sequences(context: click.Context, option: click.Parameter, values: Sequence[str]) -> list[list[int]] | None:
    """Token ids between commas, as rows of a file have them; None where the option is not given."""
    try:
        return [[int(token) for token in value.split(",")] for value in values] or None
    except ValueError:
        raise click.BadParameter("a sequence is token ids between commas, such as 5,6") from None


def parse_guided(context: click.Context, option: click.Parameter, value: str | None) -> object:
    """An object of JSON, as rows of a file have it; None where the option is not given."""
    try:
        return None if value is None else json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f'{value!r} is no JSON ({error}): write such as \'{{"regex": "[0-9]+"}}\'') from None


_OPTIONS = (
    click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt. May be repeated."),
    click.option(
        "--prompts",
        "prompts_file",
        type=click.Path(path_type=Path),
        metavar="FILE.jsonl",
        help='Rows {"prompt": "…"}, {"prompt_token_ids": […]} or {"messages": […]}, with any sampling parameter; '
        "or rows of an OpenAI batch.",
    ),
    click.option(
        "--max-tokens",
        type=int,
        help="Most tokens to generate; a huge number: to the context's end.  [default: 128]",
    ),
    click.option("--min-tokens", type=int, help="No end of text before this many tokens."),
    click.option("--temperature", type=float, help="0 is greedy.  [default: 0]"),
    click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 keeps all."),
    click.option("--top-p", type=float, help="Keep the smallest set of tokens with this probability."),
    click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest."),
    click.option("--seed", type=int, help="Makes sampled output repeatable."),
    click.option("--n", type=int, help="Completions of each prompt, 1 to 128.  [default: 1]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End at this text. May be repeated."),
    click.option(
        "--include-stop-str-in-output", is_flag=True, default=None, help="Leave that text at the end of the output."
    ),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        help="End at this token, as at the model's end of text. May be repeated.",
    ),
    click.option(
        "--stop-sequence",
        "stop_sequences",
        multiple=True,
        callback=parse_sequences,
        metavar="ID,ID",
        help="End at these tokens, one behind the other. May be repeated.",
    ),
    click.option(
        "--guided",
        callback=parse_guided,
        metavar="JSON",
        help='What the text must be, such as {"json": {…}}, {"regex": "…"} or {"choice": ["…"]}.',
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end of text."),
    click.option(
        "--skip-special-tokens/--no-skip-special-tokens",
        default=None,
        help="Whether special tokens are left out of texts.  [default: skip]",
    ),
    click.option("--repetition-penalty", type=float, help="Above 1: fewer tokens of prompt and output again."),
    click.option("--presence-penalty", type=float, help="Taken off logits of tokens in the output, -2 to 2."),
    click.option("--frequency-penalty", type=float, help="The same, once for each time, -2 to 2."),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=parse_biases,
        metavar="ID=NUMBER",
        help="Add this to a token's logit, -100 to 100. May be repeated.",
    ),
    click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never write this. May be repeated."),
    click.option(
        "--logprobs",
        type=int,
        metavar="K",
        help="Report each token's log probability, and those of the K likeliest.",
    ),
    click.option(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="Report the log probability of each token of the prompt, and those of the K likeliest.",
    ),
    click.option(
        "--draft-len", type=int, metavar="K", help="Most draft tokens a round for a prompt; 0 is plain decoding."
    ),
    click.option(
        "--draft-token-id",
        "draft_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        help="A token that may follow the prompt, verified as a draft. May be repeated, in order.",
    ),
    click.option(
        "--lookahead-config",
        type=int,
        nargs=3,
        metavar="W N G",
        help="Of a prompt: window, n-gram and verification set, at most speculation.lookahead_config.",
    ),
    click.option(
        "--thinking-token-budget",
        type=int,
        metavar="N",
        help="Most tokens of thoughts: behind them the mark that ends thoughts must follow.",
    ),
    click.option(
        "--thinking-mark",
        "thinking_marks",
        multiple=True,
        metavar="TEXT",
        help="In front of thoughts, behind them.  [default: <think>, </think>]",
    ),
    click.option(
        "--stop-in-thoughts/--no-stop-in-thoughts",
        default=None,
        help="Whether --stop counts in thoughts, too.  [default: it does]",
    ),
    click.option("--lora-name", metavar="NAME", help="An adapter of the configuration.  [default: the base model]"),
    click.option("--cache-salt", metavar="TEXT", help="Share what is kept with requests of the same one alone."),
)


def with_prompts(command: Command) -> Command:
    """Add --prompt, --prompts and the sampling options, which `given_sampling` sorts out."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def given_sampling(values: Mapping[str, object]) -> dict[str, object]:
    """The sampling options that stand on the command line."""
    return {name: value for name, value in values.items() if value is not None and value != ()}
