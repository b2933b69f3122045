"""`trtrun check --against transformers`: the target's first layers beside those of transformers, for people or as
JSON."""

from __future__ import annotations

import dataclasses
import json

import torch

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.engine_directory import read_engine
from trtrun.errors import ConfigError
from trtrun.models.config import ModelConfig
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import read_tokenizer
from trtrun.tools.comparing.transformers_layers import compare

_NUM_RANDOM = 24


def compare_target(spec: JobSpec, num_layers: int, prompt: str | None, as_json: bool) -> int:
    """Print what differs; the exit status is 0 where nothing does.

    Raises:
        TrtrunError: the target is no Hugging Face directory with weights, or a prompt of fewer than two tokens.
    """
    config, path = spec.config, spec.config.target.model
    if config.target.load_format == "dummy" or read_engine(path) is not None:
        raise ConfigError("--against transformers needs the weights of a Hugging Face directory as target.model")
    model = spec.target
    if model.quant_method is not None:
        raise ConfigError(f"--against transformers compares plain weights, and {path} is quantized")
    found = compare(path, model, num_layers, _tokens_of(config, model, prompt))
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "verdict": found.verdict}))
    else:
        for index, far in enumerate(found.apart):
            behind = f"layer {index - 1}" if index else "the embedding"
            print(f"behind {'the last norm' if index == len(found.apart) - 1 else behind}: apart by {far:.1e}")
        print(found.verdict)
    return 0 if found.differs is None else 1


def _tokens_of(config: RuntimeConfig, model: ModelConfig, prompt: str | None) -> list[int]:
    if prompt is None:
        generator = torch.Generator().manual_seed(0)
        tokens: list[int] = torch.randint(model.vocab_size, (_NUM_RANDOM,), generator=generator).tolist()
        return tokens
    tokenizer = read_tokenizer(config.target.model)
    if tokenizer is None:
        raise ConfigError("--prompt needs a tokenizer, which the target does not have: leave it out")
    tokens = tokenizer.encode(prompt)
    if len(tokens) < 2:
        raise ConfigError("--prompt has fewer than two tokens: give a longer text")
    return tokens
