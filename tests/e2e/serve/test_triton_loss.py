"""An engine that is killed while Triton's clients wait: streams and answers are those that nobody has disturbed."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
from servers import ONE_PROCESS, PATIENCE, PLAIN, serving, write_config
from triton_clients import (
    AS_PARAMETERS,
    PROMPT,
    SEEDED,
    StreamReader,
    connected,
    inputs_of,
    is_final,
    of_text,
    of_tokens,
    text_of,
    tokens_of,
)

from trtrun import LLM

pytestmark = pytest.mark.timeout(400)
OPTIONS: dict[str, Any] = SEEDED | {"max_tokens": 100, "end_id": -1}


def test_a_killed_engine_costs_no_stream_and_no_answer(pair: Path, tmp_path: Path, llm: LLM) -> None:
    settings: dict[str, Any] = {"scheduler": {"max_batch_size": 8}, "kv_cache": {"max_tokens": 8192}}
    asked = replace(
        AS_PARAMETERS[id(SEEDED)],
        max_tokens=100,
        ignore_eos=True,
        return_context_logits=True,
        return_generation_logits=True,
    )
    (output,) = llm.generate([PROMPT], asked)
    (completion,) = output.completions
    tokens = tokens_of(llm, PROMPT)
    with (
        serving(write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **settings)) as server,
        connected("grpc", server) as texts,
        connected("grpc", server) as numbers,
        connected("http", server) as web,
        ThreadPoolExecutor(2) as pool,
    ):
        first_event = Event()

        def read_events() -> str:
            values = of_text(PROMPT, OPTIONS | {"stream": True})
            url = f"{server.url}/v2/models/tensorrt_llm_bls/generate_stream"
            with httpx.stream("POST", url, json=values, timeout=PATIENCE, verify=PLAIN) as answer:
                lines = []
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        lines.append(line.removeprefix("data: "))
                        first_event.set()
            return "".join(json.loads(line)["text_output"] for line in lines)

        events = pool.submit(read_events)
        whole = pool.submit(web.infer, "ensemble", inputs_of("http", of_text(PROMPT, OPTIONS)))
        parsers = [StreamReader(texts), StreamReader(numbers)]
        parsers[0].send("tensorrt_llm_bls", of_text(PROMPT, OPTIONS | {"stream": True}))
        wanted = {"return_context_logits": True, "return_generation_logits": True}
        parsers[1].send("tensorrt_llm", of_tokens(tokens, OPTIONS | wanted | {"stream": True}))
        found = [[reader.take() for _ in range(3)] for reader in parsers]
        assert not any(map(is_final, found[0] + found[1]))
        assert first_event.wait(PATIENCE)
        os.kill(server.engine(), signal.SIGKILL)
        server.wait_for("it is started again (1 of ")
        for results, reader in zip(found, parsers, strict=True):
            results += reader.read()
        assert "".join(map(text_of, found[0])) == completion.text == events.result(PATIENCE)
        told = [token for result in found[1] for token in result.as_numpy("output_ids")[0, 0].tolist()]
        assert told == list(completion.token_ids)
        assert np.array_equal(found[1][0].as_numpy("context_logits")[0], output.context_logits)
        assert all(result.as_numpy("context_logits") is None for result in found[1][1:])
        logits = [result.as_numpy("generation_logits")[0, 0] for result in found[1]]
        assert np.array_equal(np.concatenate([one for one in logits if one.size]), completion.generation_logits)
        assert text_of(whole.result(PATIENCE)) == completion.text
        assert server.wait_idle()["trtrun:engine_restarts_total"] == 1
