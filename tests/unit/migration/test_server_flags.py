"""Command lines of vllm serve and trtllm-serve: what they configure here, hints, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from launch.cli import cli
from launch.migration.serving_flags import FLAGS
from launch.migration.speculative_configs import read_tensorrt_llm, read_vllm
from scripts.dev.make_flags_docs import PAGE, replace_table
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.configuration.process_sections import Section
from trtrun.errors import ConfigError

PAIR = {"method": "draft_model", "model": "asset:draft", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}


def served(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """What a command line configures, and its hints."""
    assert cli.main(["serve", *words, "--print-config"], standalone_mode=False) == 0
    printed = capsys.readouterr()
    return yaml.safe_load(printed.out), printed.err


def test_a_command_line_of_vllm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    words = ["asset:target", "-tp", "2", "--max-model-len=1k", "--max-num-seqs", "3", "--max_num_batched_tokens", "900"]
    words += ["--gpu-memory-utilization", "0.8", "--speculative-config", json.dumps(PAIR), "--dtype", "half"]
    words += ["--kv-cache-dtype", "fp8_e4m3", "--no-enable-prefix-caching", "--enforce-eager", "--port", "8010"]
    words += ["--served-model-name", "mine", "--tool-call-parser", "openai", "--enable-auto-tool-choice"]
    words += [
        "--quantization",
        "awq",
        "--disable-log-requests",
        "--lora-modules",
        f"a={first}",
        json.dumps({"name": "b", "path": str(second)}),
    ]
    words += ["--allowed-origins", '["https://a", "https://b"]', "--host", "0.0.0.0", "--disable-custom-all-reduce"]
    values, told = served(capsys, *words)
    assert values == {
        "target": {"model": "asset:target", "devices": ["cpu:0", "cpu:1"], "dtype": "float16"},
        "draft": {"model": "asset:draft", "devices": ["cpu:0"]},
        "speculation": {"method": "draft_target", "draft_len": 5},
        "scheduler": {"max_seq_len": 1000, "max_batch_size": 3, "max_num_tokens": 900},
        "kv_cache": {"free_memory_fraction": 0.8, "dtype": "fp8", "enable_block_reuse": False},
        "adapters": {"a": str(first), "b": str(second)},
        "cuda_graphs": False,
        "server": {
            **{"host": "0.0.0.0", "http_port": 8010, "grpc_port": 0, "metrics_port": 0, "model_name": "mine"},
            **{"tool_parser": "gpt-oss", "allowed_origins": ["https://a", "https://b"]},
        },
    }
    assert "--max-num-seqs is --max-batch-size 3;" in told
    assert "--max_num_batched_tokens is --set scheduler.max_num_tokens=900;" in told
    assert "--disable-log-requests (nothing to do: nothing is logged of requests;" in told


def test_fields_of_a_speculative_config_may_stand_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["asset:target", "--speculative_config.method", "ngram", "--speculative-config.num_speculative_tokens=3"]
    values, _ = served(capsys, "--model", *words, "-O3", "--served-model-name", "[mine")
    assert values["speculation"] == {"method": "ngram", "draft_len": 3} and "draft" not in values
    assert values["server"] == {"model_name": "[mine"}


def test_a_command_line_of_trtllm_serve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2},
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": False, "dtype": "fp8"},
        "max_batch_size": 6,
        "cuda_graph_config": None,
        "disable_overlap_scheduler": True,
        "enable_attention_dp": False,
    }
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    words = ["asset:target", "--backend", "pytorch", "--max_batch_size", "4", "--max_seq_len", "500", "--tp_size", "1"]
    words += ["--pp_size", "1", "--ep_size", "1", "--kv_cache_free_gpu_memory_fraction", "0.7", "--trust_remote_code"]
    words += ["--extra_llm_api_options", str(tmp_path / "options.yaml"), "--port", "8000", "--grpc-port", "8001"]
    values, told = served(capsys, *words)
    server = values.pop("server")
    assert server == {"http_port": 8000, "grpc_port": 8001, "metrics_port": 0}
    assert values == {
        "target": {"model": "asset:target", "devices": ["cpu:0"]},
        "speculation": {"method": "ngram", "draft_len": 3, "prompt_lookup_max": 2},
        "scheduler": {"max_seq_len": 500, "max_batch_size": 6},
        "kv_cache": {"free_memory_fraction": 0.5, "enable_block_reuse": False, "dtype": "fp8"},
        "cuda_graphs": False,
    }
    assert "--pp_size (nothing to do: so in any case)" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--api-key", "secret"), "^--api-key: others on this host .*--api-key-file$"),
        (("-pp", "2"), "^-pp 2: layers are not split"),
        (("--enable-sleep-mode",), "^--enable-sleep-mode: not supported"),
        (("--kv-cache-dtype", "nvfp4"), "^--kv-cache-dtype nvfp4: write one of auto, fp8"),
        (("--max-num-seqs",), "^--max-num-seqs needs a value"),
        (("--max-num-seqs", "many"), "^--max-num-seqs many: write a whole number"),
        (("--max-model-len", "infk"), "^--max-model-len infk: write a whole number"),
        (("-tp", "0"), "^-tp 0: write a number of devices, 1 to 4096"),
        (("-tp", "1000000000"), "^-tp 1000000000: write a number of devices"),
        (("--served-model-name", "a", "b"), "^--served-model-name a b: a model has one name"),
        (("--speculative-config", "{"), "write an object of JSON"),
        (("--speculative-config", '{"method": "eagle4"}'), r"no method 'eagle4' here \(did you mean 'eagle"),
        (("--speculative-config", '{"modle": "x"}'), r"unknown field 'modle' \(did you mean 'model'"),
        (("--extra_llm_api_options", "nowhere.yaml"), "cannot read nowhere.yaml"),
        (("--lora-modules", '{"name": "a"}'), "write name=directory"),
        (("--max-num-sequences", "3"), "No such option"),
    ],
)
def test_what_is_refused_says_what_to_do(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(click.UsageError, match=said) as refused:
        cli.main(["serve", "asset:target", *words], standalone_mode=False)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speculative_config: ngram", "^speculative_config ngram: write an object"),
        ("speculative_config: {max_matching_ngram_size: two}", "write a whole number"),
        ("kv_cache_config: {max_tokens: 2026-01-01}", "kv_cache.max_tokens"),
        ("kv_cache_confi: {}", "did you mean 'kv_cache_config'"),
        ("[" * 60, "more than 50 levels"),
        ("- max_batch_size", "write fields, such as max_batch_size: 8"),
    ],
)
def test_what_is_wrong_in_a_file_of_tensorrt_llms_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises((click.UsageError, ConfigError), match=said):
        cli.main(["serve", "asset:target", "--extra_llm_api_options", str(file)], standalone_mode=False)


@pytest.mark.parametrize(
    ("read", "given", "speculation"),
    [
        (read_vllm, {"model": "asset:eagle3", "method": "eagle3", "num_speculative_tokens": 2}, {"draft_len": 2}),
        (read_vllm, {"method": "suffix", "suffix_decoding_max_tree_depth": 9}, {"suffix_decoding_max_tree_depth": 9}),
        (read_vllm, {"method": "deepseek_mtp", "num_speculative_tokens": 1}, {"method": "mtp"}),
        (read_vllm, {**PAIR, "draft_sample_method": "probabilistic"}, {"method": "draft_target", "use_logits": True}),
        (
            read_tensorrt_llm,
            {"decoding_type": "PARD", "max_draft_len": 6, "speculative_model": "asset:pard_draft"},
            {"method": "draft_target", "draft_len": 6, "parallel_drafting": "on"},
        ),
        (
            read_tensorrt_llm,
            {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model_dir": "asset:draft"},
            {"method": "draft_target", "draft_len": 3},
        ),
        (
            read_tensorrt_llm,
            {"decoding_type": "Lookahead", "max_window_size": 3, "max_ngram_size": 4, "max_verification_set_size": 2},
            {"method": "lookahead", "lookahead_config": (3, 4, 2)},
        ),
        (read_tensorrt_llm, {"decoding_type": "MTP", "num_nextn_predict_layers": 2}, {"method": "mtp", "draft_len": 2}),
        (
            read_tensorrt_llm,
            {"decoding_type": "Medusa", "medusa_choices": [[0], [1]], "speculative_model": "asset:medusa"},
            {"method": "medusa"},
        ),
    ],
)
def test_a_speculative_config_is_one_here(read: Any, given: dict[str, Any], speculation: dict[str, object]) -> None:
    values: dict[str, Any] = {"target": {"model": "asset:target", "devices": ["cpu:0"]}}
    for key, value in (read(given) | {"draft.devices": ["cpu:0"]} if "draft" in str(given) else read(given)).items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    found = make_config(values).speculation
    assert {name: getattr(found, name) for name in speculation} == speculation


def test_what_would_change_texts_is_refused() -> None:
    with pytest.raises(click.UsageError, match="texts here are those of the target alone"):
        read_tensorrt_llm({"decoding_type": "MTP", "use_relaxed_acceptance_for_thinking": True})
    with pytest.raises(click.UsageError, match="typical_acceptance_sampler: texts here"):
        read_vllm({**PAIR, "acceptance_method": "typical_acceptance_sampler"})


def test_every_key_of_the_table_is_there_and_no_name_twice() -> None:
    sections = {name: field.annotation for name, field in RuntimeConfig.model_fields.items()}
    for key in (key for flag in FLAGS if flag.here for key in flag.here.split(", ")):
        section, _, name = key.partition(".")
        kinds = [sections[section], *getattr(sections[section], "__args__", ())]
        known = [kind.model_fields for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        assert not name or any(name in fields for fields in known), key
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == replace_table(page), "run scripts/dev/make_flags_docs.py"
