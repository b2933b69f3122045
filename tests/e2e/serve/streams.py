"""Streams that are read as they come, and compared with what nobody has disturbed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
from servers import PATIENCE, PLAIN, Server

from trtrun import LLM, SamplingParams


class Streamed:
    """A streaming request that is read as it comes."""

    def __init__(self, server: Server, prompt: str, options: dict[str, Any]) -> None:
        values = {"model": "pair", "prompt": prompt, **options}
        asked = {"stream_options": {"include_usage": True}, "return_token_ids": True, "return_token_origins": True}
        self._values = values | {"stream": True} | asked
        self._url = server.url + "/v1/completions"
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.origins = ""
        self.num_logprobs = 0
        self.errors: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self.has_begun = threading.Event()
        self.is_over = False

    def read(self) -> Streamed:
        """Read to the end."""
        with httpx.stream("POST", self._url, json=self._values, timeout=PATIENCE, verify=PLAIN) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        self.is_over = True
        return self

    @property
    def num_tokens(self) -> int:
        """That have come so far."""
        return len(self.origins)

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.last = chunk
        for choice in chunk["choices"]:
            index = choice["index"]
            self.tokens.setdefault(index, []).extend(choice["token_ids"])
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.origins += choice["token_origins"]
            self.num_logprobs += len((choice["logprobs"] or {"tokens": ()})["tokens"])
            if len(self.tokens[index]) >= 8:
                self.has_begun.set()

    def check(self, llm: LLM) -> None:
        """Compare it with what nobody has disturbed, and its counters with itself."""
        assert self.errors == []
        options = {name: value for name, value in self._values.items() if name in SamplingParams.__dataclass_fields__}
        (output,) = llm.generate([self._values["prompt"]], SamplingParams(**options))
        for completion in output.completions:
            assert tuple(self.tokens[completion.index]) == completion.token_ids
            assert self.texts[completion.index] == completion.text
        total = sum(map(len, self.tokens.values()))
        assert self.last["usage"]["completion_tokens"] == self.num_logprobs == total == len(self.origins)
        speculation = self.last["metrics"]["speculative_decoding"]
        num_drafts, num_accepted = speculation["num_spec_steps"], speculation["num_accepted_draft_tokens"]
        # Each draft gives the accepted tokens and one more, over all engines. The last round may give too many.
        assert num_drafts - len(self.tokens) <= self.origins.count("r") + self.origins.count("b") <= num_drafts
        assert num_accepted - len(self.tokens) * 4 <= self.origins.count("a") <= num_accepted


@contextmanager
def reading(*streams: Streamed) -> Iterator[None]:
    """Read streams, each in a thread: all have begun when the block does, and behind it all are read to their ends.

    What goes wrong while one is read is raised behind the block.
    """
    with ThreadPoolExecutor(len(streams)) as pool:
        read = [pool.submit(stream.read) for stream in streams]
        for stream in streams:
            assert stream.has_begun.wait(PATIENCE)
        yield
        for future in read:
            future.result(timeout=PATIENCE)
