"""A server whose models are names in a Hugging Face cache: what they are called, and that they are the same models. It
is started with options of vllm serve's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_caches import fill_cache
from servers import ONE_PROCESS, serving, write_config

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.timeout(300)


def test_the_model_is_called_by_its_name(pair: Path, llm: LLM, tmp_path: Path) -> None:
    for name in ("target", "draft"):
        fill_cache(tmp_path / "hub", f"org/{name}", pair / name)
    config = write_config(tmp_path / "serve.yaml", Path("org"), ONE_PROCESS, server={"model_name": None})
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    options = ["--max-num-seqs", "3", "--disable-log-requests", "--no-enable-prefix-caching"]
    with serving(config, *options, environment=environment) as server:
        assert "trtrun: here --max-num-seqs is --max-batch-size 3; --no-enable-prefix-caching is" in server.lines[0]
        assert server.get("/v2/models/ensemble/config").raise_for_status().json()["max_batch_size"] == 3
        (model,) = server.get("/v1/models").raise_for_status().json()["data"]
        assert model["id"] == "org/target"
        assert server.get("/v1/models/org/target").raise_for_status().json()["id"] == "org/target"
        asked = {"model": "org/target", "prompt": "def main(", "temperature": 0, "max_tokens": 8}
        told = server.post("/v1/completions", asked).raise_for_status().json()
        assert told["model"] == "org/target"
        status = server.get("/status").raise_for_status().json()
    plain = llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=8))[0].completions[0].text
    assert told["choices"][0]["text"] == plain
    assert [status["models"][role]["name"] for role in ("target", "draft")] == ["org/target", "org/draft"]
