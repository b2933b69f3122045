"""What `trtrun run` shows beside the rows of its output: texts, refusals, and the line at its end.

It knows wording. It does not know how rows come about (run.py) or where they are kept (journal.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch.batch.rows import PromptRow
from trtrun.outputs import CompletionOutput, RequestOutput


def print_texts(rows: Sequence[PromptRow], outputs: Mapping[int, RequestOutput], has_text: bool) -> None:
    """All completions under the index of their prompt."""
    for row in rows:
        for completion in outputs[row.index].completions if row.index in outputs else ():
            number = f"{row.index}" if len(outputs[row.index].completions) == 1 else f"{row.index}.{completion.index}"
            print(f"--- {number} ({completion.finish_reason})")
            print(completion.text if has_text else join_tokens(completion.token_ids))
            for line in _logprob_lines(completion):
                print(line)
    sys.stdout.flush()


def _logprob_lines(completion: CompletionOutput) -> list[str]:
    return [
        f"    token {entry.token_id}: logprob {entry.logprob:.4f}"
        + "".join(f", {token}: {value:.4f}" for token, value in entry.alternatives)
        for entry in completion.logprobs or ()
    ]


def join_tokens(tokens: Sequence[int]) -> str:
    """Token ids as text, for a model without a tokenizer."""
    return " ".join(str(token) for token in tokens)


def tell(line: str) -> None:
    """Say one line to the user."""
    print(f"trtrun: {line}", file=sys.stderr, flush=True)


def tell_refusal(index: int, error: str) -> None:
    """Say why a row was not run."""
    tell(f"row {index} refused: {error}")


def summarize(num_rows: int, refused: int, elapsed: float, statistics: Mapping[str, Any]) -> str:
    """The figures of a run that came to its end; `elapsed` is in seconds, without loading."""
    tokens = statistics["num_tokens"]
    line = f"{num_rows} prompts, {tokens} tokens in {elapsed:.2f} s ({tokens / max(elapsed, 1e-9):.1f} tokens/s)"
    if statistics["num_draft_tokens"]:
        line += f", mean acceptance length {statistics['mean_acceptance_length']:.2f}"
    line += f", {statistics['num_rounds']} rounds"
    return line + (f", {refused} refused" if refused else "")


def describe_drain(cause: str | None, num_done: int, num_rows: int) -> str:
    """What a drained run leaves, and how to go on."""
    return (
        f"drained after {cause}: {num_done} of {num_rows} rows are done, {num_rows - num_done} are left; "
        "the same command with --resume runs them"
    )
