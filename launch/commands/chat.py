"""`trtrun chat`: parse its command line; the conversation is `launch.chat`'s."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from launch.commands.prompts import given_sampling
from launch.exit_codes import ExitCode, describe_exit_codes
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.errors import ConfigError

_OF_REQUESTS = ("max_tokens", "temperature", "top_p", "seed", "draft_len", "chat_template_kwargs")


def _parse_object(context: click.Context, option: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """An object of JSON; None where the option is not given."""
    try:
        found = None if value is None else json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{value!r} is no JSON ({error})") from None
    if found is not None and not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is no object: write such as '{{\"enable_thinking\": false}}'")
    return found


@click.command(epilog=f"Exit status: {describe_exit_codes()}")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="YAML file of the job.")
@click.option("--url", metavar="URL", help="A server that runs, such as http://127.0.0.1:8000, instead of a job.")
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="F", help="With that server's key.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set any key of the YAML file.")
@click.option("--speculation", type=click.Choice(list(METHODS)), help="Short for --set speculation.method=….")
@click.option("--system", metavar="TEXT", help="What the system is told.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.  [default: to the context's end]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: what the model says, else 1]")
@click.option("--top-p", type=float, help="Keep the smallest set of tokens with this probability.")
@click.option("--seed", type=int, help="Makes sampled answers repeatable.")
@click.option("--draft-len", type=int, metavar="K", help="Most draft tokens a round; 0 is plain decoding.")
@click.option(
    "--chat-template-kwargs",
    callback=_parse_object,
    metavar="JSON",
    help="Further values for the chat template, such as '{\"enable_thinking\": false}'.",
)
def chat(
    config_path: Path | None,
    url: str | None,
    api_key_file: Path | None,
    overrides: tuple[str, ...],
    speculation: str | None,
    system: str | None,
    **values: Any,
) -> int:
    """Talk to a model in the terminal.

    With --config a server is started for the conversation, on any number of ranks, and ends with it. With --url one
    that runs is asked. Answers stream, with their speed and the share of accepted draft tokens; Ctrl-C stops one.
    Without a terminal each line of the input is a message.
    """
    from launch.chat.client import ChatClient
    from launch.chat.own_server import own_server
    from launch.chat.session import Session

    if (config_path is None) == (url is None):
        raise click.UsageError("give --config FILE, or --url URL of a server that runs, one of the two")
    if url is not None and (overrides or speculation is not None):
        raise click.UsageError("--set and --speculation are of a job: a server that runs has its own")
    if config_path is not None and api_key_file is not None:
        raise click.UsageError("--api-key-file is of a server that runs, with --url")
    serving: AbstractContextManager[ChatClient]
    if url is not None:
        serving = nullcontext(ChatClient(url, None if api_key_file is None else _read_key(api_key_file)))
    else:
        words = ["--config", str(config_path), *(word for item in overrides for word in ("--set", item))]
        serving = own_server(words + ([] if speculation is None else ["--speculation", speculation]))
    with serving as client:
        client.look()
        Session(client, system, _options(values)).run()
    return ExitCode.DONE


def _options(values: Mapping[str, Any]) -> dict[str, object]:
    return {name: value for name, value in given_sampling(values).items() if name in _OF_REQUESTS}


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").split("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key in {path}: {error}") from None
