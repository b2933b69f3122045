"""Engines by command line: TensorRT-LLM's documents from checkpoint to text, as they stand; jobs of several ranks."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click
import pytest
import torch
from checkpoints import make_checkpoint
from click.testing import CliRunner
from commands import ROOT, Configs, Run, error_line
from engines import build_engine
from pipelines import make_llm

from launch.commands.write_models import build, run_conversion
from launch.compat.tensorrt_llm import build as tensorrt_llm_build
from launch.compat.tensorrt_llm.build import make_options, parse_arguments
from launch.compat.tensorrt_llm.convert import parse_arguments as parse_conversion
from trtrun import SamplingParams
from trtrun.errors import ConfigError

BUILDS = """
trtllm-build \\
--checkpoint_dir=${DRAFT_CKPT_PATH} \\
--output_dir=${DRAFT_ENGINE_PATH} \\
--gemm_plugin=float16 \\
--use_paged_context_fmha=enable \\
--max_batch_size=${MAX_BATCH_SIZE} \\
--max_input_len=${MAX_INPUT_LEN} \\
--max_seq_len=${MAX_SEQ_LEN}
trtllm-build \\
--checkpoint_dir=${TARGET_CKPT_PATH} \\
--output_dir=${TARGET_ENGINE_PATH} \\
--gemm_plugin=float16 \\
--use_paged_context_fmha=enable \\
--speculative_decoding_mode=draft_tokens_external \\
--max_batch_size=${MAX_BATCH_SIZE} \\
--max_draft_len=${MAX_DRAFT_LEN} \\
--max_input_len=${MAX_INPUT_LEN} \\
--max_seq_len=${MAX_SEQ_LEN}
"""
CONVERSIONS = """
python3 convert_checkpoint.py \\
--model_dir=${DRAFT_MODEL_PATH} \\
--output_dir=${DRAFT_CKPT_PATH} \\
--dtype=float16
python3 convert_checkpoint.py \\
--model_dir=${TARGET_MODEL_PATH} \\
--output_dir=${TARGET_CKPT_PATH} \\
--dtype=float16
"""
RUN = """
python3 examples/run.py \\
--tokenizer_dir=${TARGET_MODEL_PATH} \\
--draft_engine_dir=/workspace/engine-draft \\
--engine_dir=/workspace/engine-target \\
--draft_target_model_config="[4,[0],[1],False]" \\
--max_output_len=256 \\
--kv_cache_enable_block_reuse \\
--kv_cache_free_gpu_memory_fraction=0.5 \\
--output_generation_logits \\
--input_text="How does Draft-Sampling work?"
"""
ANOTHER_BUILD = """
trtllm-build \\
\u2013checkpoint_dir./ckpt-target-70b \\
\u2013output_dir=./target-engine \\
\u2013gpt_attention_plugin float16 \\
\u2013workers 1 \\
\u2013gemm_plugin=fp8 \\
\u2013use_paged_context_fmha=enable \\
\u2013multiple_profiles enable \\
\u2013max_batch_size=32 \\
\u2013max_seq_len=131072 \\
\u2013low_latency_gemm_plugin fp8 \\
\u2013speculative_decoding_mode=draft_tokens_external \\
\u2013max_draft_len 10
"""

FIRST_BUILD = """
python3 examples/llama/build.py \\
    --model_dir ${TARGET_MODEL_PATH} \\
    --dtype float16 \\
    --use_gpt_attention_plugin float16 \\
    --use_gemm_plugin float16 \\
    --output_dir examples/llama/out
"""


def words_of(text: str, variables: dict[str, object]) -> list[list[str]]:
    """Command lines as a shell takes them, without the program."""
    for name, value in variables.items():
        text = text.replace(f"${{{name}}}", str(value))
    lines = [line for line in text.strip().replace("\\\n", " ").splitlines() if line]
    return [[word for word in shlex.split(line) if word != "python3"][1:] for line in lines]


def test_the_documented_way_from_checkpoint_to_text(
    pair: Path, trtrun: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All lines as they stand, but for the folder /workspace, and a dtype whose texts are exact on CPUs."""
    variables: dict[str, object] = {
        **{f"{role.upper()}_MODEL_PATH": pair / role for role in ("draft", "target")},
        **{f"{role.upper()}_CKPT_PATH": tmp_path / f"ckpt-{role}" for role in ("draft", "target")},
        **{f"{role.upper()}_ENGINE_PATH": tmp_path / f"engine-{role}" for role in ("draft", "target")},
        **{"MAX_BATCH_SIZE": 4, "MAX_DRAFT_LEN": 10, "MAX_INPUT_LEN": 3200, "MAX_SEQ_LEN": 4800},
    }
    for words in words_of(CONVERSIONS.replace("float16", "bfloat16"), variables):
        assert run_conversion(parse_conversion(words)) == 0
    for words in words_of(BUILDS, variables):
        assert tensorrt_llm_build.run(words) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "trtllm_build.py: nothing to do for --gemm_plugin, --use_paged_context_fmha, --max_input_len",
        "trtllm_build.py: nothing to do for --gemm_plugin, --use_paged_context_fmha, --speculative_decoding_mode, "
        "--max_input_len",
    ]
    engine = json.loads((tmp_path / "engine-target" / "engine.json").read_text())
    assert engine["limits"] == {"max_batch_size": 4, "max_seq_len": 4800, "max_draft_len": 10}
    assert engine["dtype"] == "bfloat16"
    ((*words, prompt),) = words_of(RUN.replace("/workspace", str(tmp_path)), variables)
    words[words.index("--max_output_len=256")] = "--max_output_len=24"  # the model never ends
    done = trtrun(*words, prompt, words=[sys.executable, str(ROOT / "scripts" / "run.py")])
    assert done.returncode == 0, done.stderr
    with make_llm(tmp_path / "ckpt-target", tokenizer=pair / "target") as llm:  # type: ignore[arg-type]
        (output,) = llm.generate(["How does Draft-Sampling work?"], SamplingParams(max_tokens=24))
    assert f'Output [Text 0 Beam 0]: "{output.completions[0].text}"' in done.stdout
    assert "Log probabilities [Text 0]: " in done.stdout


def test_a_command_line_of_a_web_page_for_several_ranks(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many ranks as the checkpoint was converted for; the model's context is shorter."""
    monkeypatch.chdir(tmp_path)
    words = [
        "--model_dir",
        str(pair / "target"),
        "--output_dir",
        "ckpt-target-70b",
        "--tp_size",
        "2",
        "--dtype",
        "auto",
    ]
    assert run_conversion(parse_conversion(words)) == 0
    ((*given,),) = words_of(ANOTHER_BUILD, {})
    assert tensorrt_llm_build.run(given) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["tp_size"] == 2
    assert "--max_seq_len 131072 is more than the model's context, 65536 tokens, which is taken" in said.err
    assert "--gpt_attention_plugin" in said.err and "--multiple_profiles" in said.err
    limits = json.loads(Path("target-engine/engine.json").read_text())["limits"]
    assert limits == {"max_batch_size": 32, "max_seq_len": 65536, "max_draft_len": 10}


def test_the_build_of_the_first_versions(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a Hugging Face directory, into directories that are not there yet; prompts and answers had limits apart."""
    monkeypatch.chdir(tmp_path)
    ((*words,),) = words_of(FIRST_BUILD, {"TARGET_MODEL_PATH": pair / "target"})
    lengths = ["--max_input_len", "300", "--max_output_len=200"]
    assert tensorrt_llm_build.run([*words, *lengths, "--world_size", "2"]) == 0
    engine = json.loads(Path("examples/llama/out/engine.json").read_text())
    assert (engine["dtype"], engine["limits"], len(engine["shards"])) == ("float16", {"max_seq_len": 500}, 2)
    said = capsys.readouterr().err
    assert said == "trtllm_build.py: nothing to do for --use_gemm_plugin, --use_gpt_attention_plugin\n"
    with pytest.raises(click.UsageError, match="--max_output_len needs --max_input_len beside it, or --max_seq_len"):
        make_options(parse_arguments([*words, "--max_output_len", "9"]))
    Path("file").touch()
    with pytest.raises(ConfigError, match="--output_dir file/engine: "):
        tensorrt_llm_build.run(["--model_dir", str(pair / "target"), "--output_dir", "file/engine"])


def test_checkpoints_say_how_many_devices_engines_have(tmp_path: Path) -> None:
    """Quantized ones, too, in whose files ranks have no place; an option goes before."""
    source = make_checkpoint(tmp_path / "source", dtype=torch.bfloat16)

    def count(*words: str) -> int:
        return make_options(parse_arguments(["--checkpoint_dir", str(source), *words])).settings.tp_size

    assert (count(), count("--tp_size=2")) == (1, 2)
    report = source / "quantization_report.jsonl"
    for identity, expected in (({"tp_size": 2}, 2), ({"tp_size": "x"}, 1), ({}, 1), ([], 1)):
        report.write_text(json.dumps({"layer": 0}) + "\n" + json.dumps({"identity": identity}) + "\n")
        assert count() == expected
    report.write_text("{")
    assert (count(), count("--tp_size=2")) == (1, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_beam_width", "2"], "--max_beam_width 2: beam search is not supported"),
        (["--lora_dir", "x"], "--lora_dir is not supported: name adapters in the YAML file, by `adapters`"),
        (["--max_batchsize", "2"], r"unknown option '--max_batchsize' \(did you mean '--max_batch_size'\?\)"),
        (["--speculative_decoding_mode", "explicit_draft_tokens"], "invalid choice: 'explicit_draft_tokens'"),
    ],
)
def test_what_trtllm_build_had_and_is_not_supported_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        tensorrt_llm_build.parse_arguments(["--checkpoint_dir", "x", *words])


def test_a_job_of_three_ranks_runs_engines_and_check_knows_them(
    pair: Path, config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    runner = CliRunner()
    engine = tmp_path / "target-engine"
    words = ["--checkpoint", str(pair / "target"), "--output", str(engine), "--tp", "2", "--max-batch-size", "6"]
    made = runner.invoke(build, [*words, "--device", "cpu"])
    assert made.exit_code == 0 and json.loads(made.output.splitlines()[-1])["built_for"] == "any", made.output
    draft = build_engine(pair / "draft", tmp_path / "draft-engine")
    models = ("--set", f"target.model={engine}", "--set", f"draft.model={draft}")
    values = config({"target": ["cpu:0", "cpu:1"], "draft": ["cpu:0"]})
    prompt = ("--prompt", "def main", "--max-tokens", 24)
    plain = trtrun("run", "--config", values, *prompt, "--set", 'target.devices=["cpu:0"]', "--speculation", "none")
    done = trtrun("run", "--config", values, *prompt, *models)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    checked = trtrun("check", "--config", values, *models, "--json")
    assert checked.returncode == 0, checked.stderr
    compared = [rank["compared_bytes"] for rank in json.loads(checked.stdout)["ranks"]]
    assert compared[1] > compared[2] > 0 == compared[0]  # a draft's, too
    plan = trtrun("plan", "--config", values, *models, "--json")
    assert plan.returncode == 0, plan.stderr
    planned = json.loads(plan.stdout)
    assert "target: an engine of target for any device, float32; at most 6 as max_batch_size" in planned["notes"]
    ranks = planned["start"]["ranks"]
    sizes = [file.stat().st_size for file in sorted(engine.glob("rank*"))]
    assert all(0 < size - rank["read_bytes"] < 20_000 for size, rank in zip(sizes[1:], ranks[1:], strict=True))
    one = ("--set", 'target.devices=["cpu:0"]', *models)
    for command in ("run", "check", "plan"):
        more = prompt if command == "run" else ()
        said = error_line(trtrun(command, "--config", values, *more, *one))
        assert "target.devices: the engine was built for 2 devices, not for 1" in said
    content = bytearray((draft / "rank0.safetensors").read_bytes())
    content[-1] ^= 1
    (draft / "rank0.safetensors").write_bytes(content)
    alone = ("--set", f"target.model={draft}", "--set", 'target.devices=["cpu:0"]', "--speculation", "none")
    said = error_line(trtrun("check", "--config", values, *alone))
    assert "target: " in said and "rank0.safetensors is damaged: 'model." in said
    (engine / "rank1.safetensors").write_bytes(b"")
    for command in ("check", "plan"):
        assert "rank1.safetensors is truncated" in error_line(trtrun(command, "--config", values, *models))
