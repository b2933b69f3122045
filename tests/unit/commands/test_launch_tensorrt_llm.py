"""The command line of examples/run.py: how it is mended and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import pytest
from checkpoints import make_checkpoint
from eagle_heads import make_eagle_head, write_eagle_head
from engines import build_engine
from hub_caches import fill_cache
from huggingface_hub import constants

from launch.compat.tensorrt_llm import build as tensorrt_llm_build
from launch.compat.tensorrt_llm import convert as tensorrt_llm_convert
from launch.compat.tensorrt_llm import quantize as tensorrt_llm_quantize
from launch.compat.tensorrt_llm.engine_options import (
    make_runtime_config,
    parse_choices,
    parse_draft_config,
    parse_lookahead_config,
)
from launch.compat.tensorrt_llm.quoting_fixes import mend_words, naming_options
from launch.compat.tensorrt_llm.run import parse_arguments
from trtrun.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["\u2013engine_dir", "x"], ["--engine_dir", "x"]),
        (["--a", "=", "b"], ["--a=b"]),
        (["--", "max_output_len", "100", "--", "a=b", "--"], ["--max_output_len", "100", "--a=b", "--"]),
        (["--", "a prompt", "--", "4"], ["--", "a prompt", "--", "4"]),
        (["\u2013a", "=", "\u201c[10,[0],", "False]\u201d", "c"], ["--a=[10,[0], False]", "c"]),
        (["--input_text=\u201cHow", "does", "it?\u201d"], ["--input_text=How does it?"]),
        (["\u201cHello\u201d, she said"], ["\u201cHello\u201d, she said"]),
        (["\u201cnever closed", "--a"], ["\u201cnever closed", "--a"]),
        (["--input_text", "a \u2013 b", "\u2013 c", "="], ["--input_text", "a \u2013 b", "\u2013 c", "="]),
    ],
)
def test_what_web_pages_do_is_undone_and_prompts_stay(written: list[str], read: list[str]) -> None:
    assert mend_words(written) == read


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        (tensorrt_llm_convert.run, "--model_dir nowhere --output_dir out", "^--model_dir: no such directory"),
        (tensorrt_llm_convert.run, "--model_dir asset:target --output_dir .", r"^--output_dir \."),
        (tensorrt_llm_build.run, "--checkpoint_dir asset:draft --output_dir out --tp_size 0", "^--tp_size is 0"),
        (
            tensorrt_llm_build.run,
            "--checkpoint_dir asset:draft --output_dir out --max_num_tokens 2 --max_batch_size 4",
            "^--max_num_tokens is 2, too .*, or --max_batch_size smaller",
        ),
        (
            tensorrt_llm_quantize.run,
            "--model_dir asset:draft --output_dir out --qformat fp8 --awq_block_size 12",
            "^--awq_block_size is 12",
        ),
        (
            tensorrt_llm_quantize.run,
            "--model_dir asset:draft --output_dir out --qformat int4_awq --calib_dataset texts",
            "^--calib_dataset texts: no such file",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_options_that_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Sequence[str]], int], words: str, message: str
) -> None:
    (tmp_path / "mine").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run(words.split())
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_options_in_paths_keep_their_names() -> None:
    message = r"^--model_dir /hub/models--model/--model and --models: no --force$"
    with pytest.raises(ConfigError, match=message), naming_options({"--model": "--model_dir"}):
        raise ConfigError("--model /hub/models--model/--model and --models: no --force")


def test_the_draft_configuration_is_read_as_literals() -> None:
    assert parse_draft_config("[4,[0],[1, 2],True]") == (4, [0], [1, 2], True)
    for text in (
        "[4,[0],[1]]",
        "[4,[0],[],True]",
        "[4,[0],[1],1]",
        "[4.5,[0],[1],True]",
        "exit()",
        "[4,[-1],[1],True]",
        "",
    ):
        with pytest.raises(click.UsageError):
            parse_draft_config(text)


WORDS = ["--engine_dir", "target", "--max_output_len", "8", "--input_text", "a", "b"]
DRAFT = ["--draft_engine_dir", "draft", "--draft_target_model_config", "[10,[0,1],[1],True]"]


@pytest.mark.parametrize(("has_gpu", "kind"), [(True, "cuda"), (False, "cpu")])
def test_options_become_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, kind: str
) -> None:
    for name in ("target", "draft", "words"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    extra = ["--kv_cache_free_gpu_memory_fraction=0.35", "--kv_cache_enable_block_reuse", "--tokenizer_dir=words"]
    arguments = parse_arguments([*WORDS, *DRAFT, *extra])
    config = make_runtime_config(arguments, has_gpu)
    assert arguments.input_text == ["a", "b"]
    assert config.target.devices == (f"{kind}:1",)
    assert config.draft_devices == (f"{kind}:0", f"{kind}:1")
    assert (config.speculation.draft_len, config.speculation.use_logits) == (10, True)
    assert (config.kv_cache.free_memory_fraction, config.kv_cache.enable_block_reuse) == (0.35, True)
    assert config.tokenizer == tmp_path / "words"


def test_without_a_draft_the_target_decodes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    config = make_runtime_config(parse_arguments(WORDS), has_gpu=False)
    assert config.speculation.method == "none"
    assert not config.kv_cache.enable_block_reuse


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--num_beams", "2"], "beam search"),
        (["--use_py_session"], "no Python session"),
        (["--max_output_length", "3"], "did you mean '--max_output_len'?"),
        (DRAFT[:2], "of heads goes with --medusa_choices, --eagle_choices or --eagle_use_dynamic_tree"),
        (["--num_beams", "two"], "invalid int value"),
    ],
)
def test_what_is_not_supported_is_refused(extra: list[str], said: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        parse_arguments([*WORDS, *extra])
    assert said in raised.value.message


@pytest.mark.parametrize("written", ["[[0],[0, 0],[1]]", "\u201c[[0], [0,0], [1]]\u201d", "mc_sim_7b_63"])
def test_medusa_choices_are_a_tree_of_heads_beside_the_target_or_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    for name in ("target", "heads"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    beside = make_runtime_config(parse_arguments([*WORDS, "--medusa_choices", written]), has_gpu=False)
    apart = make_runtime_config(
        parse_arguments([*WORDS, f"--medusa_choices={written}", "--draft_engine_dir=heads"]), has_gpu=False
    )
    for config, name in ((beside, "target"), (apart, "heads")):
        assert config.heads is not None and config.heads.model == tmp_path / name and config.draft is None
        assert (config.draft_len, config.draft_nodes[-1]) == ((4, 63) if "mc" in written else (2, 3))


def test_engines_of_several_ranks_have_as_many_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no option counts them."""
    build_engine(make_checkpoint(tmp_path / "source"), tmp_path / "target", 2)
    monkeypatch.chdir(tmp_path)
    for options in (
        [],
        ["--lookahead_config", "[2,2,2]"],
        ["--medusa_choices", "[[0]]", "--draft_engine_dir", "source"],
    ):
        config = make_runtime_config(parse_arguments([*WORDS, *options]), has_gpu=False)
        assert config.target.devices == ("cpu:0", "cpu:1")
    words = [*WORDS, "--draft_engine_dir", "source", "--draft_target_model_config", "[4,[0],[1],False]"]
    with pytest.raises(ConfigError, match=r"target\.devices: the engine was built for 2 devices, not for 1"):
        make_runtime_config(parse_arguments(words), has_gpu=False)


def test_medusa_choices_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    for text in ("exit()", "[[0]", "5", "", "[[0] for _ in [0]]"):
        with pytest.raises(click.UsageError, match="write paths of ranks"):
            parse_choices(text, "--medusa_choices")
    with pytest.raises(click.UsageError, match="are two methods"):
        parse_arguments([*WORDS, *DRAFT, "--medusa_choices", "mc_sim_7b_63"])
    with pytest.raises(ConfigError, match="there is no tree 'mc_sim'"):
        make_runtime_config(parse_arguments([*WORDS, "--medusa_choices", "mc_sim"]), has_gpu=False)


def test_trees_of_an_eagle_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    head = "--draft_engine_dir=head"
    for options, sizes in (
        (("--eagle_choices", "[[0],[0, 0],[1]]"), (2, 3)),
        (("--eagle_choices=mc_sim_7b_63",), (5, 25)),
        (("--eagle_use_dynamic_tree", "--eagle_dynamic_tree_max_top_k=3"), (4, 12)),
    ):
        config = make_runtime_config(parse_arguments([*WORDS, head, *options]), has_gpu=False)
        assert config.heads is not None and config.heads.model == tmp_path / "head" and config.draft is None
        assert config.speculation.method == "eagle3" and (config.draft_len, config.draft_nodes[-1]) == sizes
    target = make_checkpoint(tmp_path / "made", seed=1)
    write_eagle_head(tmp_path / "head", make_eagle_head(target), "vllm", target)
    config = make_runtime_config(parse_arguments([*WORDS, head, "--eagle_choices=[[0]]"]), has_gpu=False)
    assert config.speculation.method == "eagle", "the files are EAGLE-1's"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = fill_cache(tmp_path / "hub", "org/head", tmp_path / "head")
    named = parse_arguments([*WORDS, "--draft_engine_dir=org/head", "--eagle_choices=[[0]]"])
    config = make_runtime_config(named, has_gpu=False)
    assert config.heads is not None and (config.speculation.method, config.heads.model) == ("eagle", snapshot)
    for options, said in (
        (("--eagle_choices=[[0]]",), "needs --draft_engine_dir"),
        ((head, "--eagle_choices=[[0]]", "--eagle_use_dynamic_tree"), "are two methods"),
        ((*DRAFT, "--eagle_choices=[[0]]"), "are two methods"),
        ((head, "--eagle_use_dynamic_tree"), "go together"),
        ((head, "--eagle_dynamic_tree_max_top_k=3"), "go together"),
    ):
        with pytest.raises(click.UsageError, match=said):
            parse_arguments([*WORDS, *options])


@pytest.mark.parametrize("written", ["[5, 4,3]", "\u201c[5,4,3]\u201d"])
def test_lookahead_config_is_sizes_of_a_target_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    config = make_runtime_config(parse_arguments([*WORDS, "--lookahead_config", written]), has_gpu=False)
    assert config.draft is None and config.heads is None and config.speculation.method == "lookahead"
    assert (config.draft_len, config.draft_nodes[-1]) == (6, 23)
    for text in ("exit()", "[5", "5", ""):
        with pytest.raises(click.UsageError, match="write window size, n-gram size and verification set size"):
            parse_lookahead_config(text)
    for other in (DRAFT, ["--medusa_choices", "mc_sim_7b_63"]):
        with pytest.raises(click.UsageError, match="--lookahead_config are two methods"):
            parse_arguments([*WORDS, *other, "--lookahead_config", written])
    with pytest.raises(click.UsageError, match="leave --draft_engine_dir out"):
        parse_arguments([*WORDS, "--draft_engine_dir", "draft", "--lookahead_config", written])
    with pytest.raises(ConfigError, match="the n-gram size is 1: set it to 2 to 16"):
        make_runtime_config(parse_arguments([*WORDS, "--lookahead_config", "[5,1,3]"]), has_gpu=False)
