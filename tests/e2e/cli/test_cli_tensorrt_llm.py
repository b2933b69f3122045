"""scripts/run.py: command lines of TensorRT-LLM's examples/run.py as they stand in its documents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import MPIRUN, ROOT, Run
from forked_commands import forked_words

SCRIPT = [sys.executable, str(ROOT / "scripts" / "run.py")]


def test_lookahead_needs_no_draft_model(pair: Path, trtrun: Run) -> None:
    words = ["--engine_dir", pair / "target", "--max_output_len", "12", "--input_text", "a prompt"]
    plain = trtrun(*words, words=SCRIPT)
    done = trtrun(*words, "--lookahead_config", "[3,3,2]", words=SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout and 'Output [Text 0 Beam 0]: "' in done.stdout


def test_under_mpirun_with_one_rank_and_as_a_web_page_prints_it(pair: Path, trtrun: Run) -> None:
    done = trtrun(
        *(
            "\u2013tokenizer_dir",
            pair / "target",
            "--draft_engine_dir",
            pair / "draft",
            "--engine_dir",
            pair / "target",
        ),
        *("\u2013draft_target_model_config", "=", "\u201c[10,[0,1],[0,1],", "False]\u201d"),
        *("--kv_cache_free_gpu_memory_fraction=0.1", "--max_output_len=8", "--kv_cache_enable_block_reuse"),
        *("--input_text", "first", "second prompt"),
        words=[*MPIRUN, "-n", "1", *forked_words(), *SCRIPT],
    )
    assert done.returncode == 0, done.stderr
    assert 'Input [Text 1]: "second prompt"' in done.stdout
    assert done.stdout.count("Output [Text") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--num_beams", "2"), "beam search is not supported"),
        (("--use_py_session",), "--use_py_session"),
        (("--draft_target_model_config", "__import__('os').getpid()"), 'such as "[4,[0],[1],False]"'),
        (("--draft_target_model_config", "[4,[0],[1]]"), 'such as "[4,[0],[1],False]"'),
        (("--max_output_length", "4"), "did you mean '--max_output_len'?"),
    ],
)
def test_what_is_not_supported_is_one_line(pair: Path, trtrun: Run, arguments: tuple[str, ...], said: str) -> None:
    words = ["--engine_dir", pair / "target", "--draft_engine_dir", pair / "draft", "--max_output_len", "4"]
    words += ["--draft_target_model_config", "[4,[0],[0],False]", "--input_text", "x"]
    done = trtrun(*words, *arguments, words=SCRIPT)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
