"""A user's mistake is one line, exit status 2, and no rank was started for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_tokenizer
from commands import (
    MPIRUN,
    ONE_PROCESS,
    ROOT,
    THREE_RANKS,
    Configs,
    Run,
    command_environment,
    command_words,
    error_line,
    forked_command_words,
    write_rows,
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to do: give --prompt TEXT or --prompts FILE.jsonl"),
        (("--prompt", "x", "--set", "speculation.draft_length=3"), "unknown key (did you mean 'draft_len'?)"),
        (("--prompt", "x", "--set", "target.model=nowhere"), "target.model: no such directory"),
        (("--prompt", "x", "--set", "target.devices=[0,0]"), "cuda:0 stands more than once"),
        (("--prompt", "x", "--temprature", "1"), "'--temprature'"),
        (("--prompt", "x", "--temperature", "-1"), "temperature must be 0 or between 1e-30 and 1e30, not -1"),
        (("--prompt", "x", "--max-tokens", "many"), "'many' is not a valid integer"),
        (("--prompts", "nowhere.jsonl"), "cannot read the prompts file nowhere.jsonl"),
        (("--prompt", "x", "--output", "nowhere/rows.jsonl"), "does not exist"),
        (("--prompt", "x", "--set", "scheduler.max_seq_len=999999"), "scheduler.max_seq_len is 999999"),
        (("--prompt", "x", "--set", "draft.quantization=int4"), "draft: unknown quantization 'int4' (did you mean"),
        (
            ("--prompt", "x", "--set", "target.quantization=fp9"),
            "target: unknown quantization 'fp9' (did you mean 'fp8'",
        ),
        (("--prompt", "x", "--set", "target.quantization=int8"), "target: quantization int8 is for drafts alone"),
        (("--prompt", "x", "--set", "draft.quantization=int8"), "draft: quantization int8 computes in bfloat16, not"),
    ],
)
def test_a_mistake_on_the_command_line(config: Configs, trtrun: Run, arguments: tuple[str, ...], said: str) -> None:
    done = trtrun("run", "--config", config(THREE_RANKS), *arguments)
    assert said in error_line(done)
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["prompts.jsonl", "link.jsonl", "./prompts.jsonl"])
def test_an_output_that_is_the_input(config: Configs, trtrun: Run, tmp_path: Path, name: str) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "x"}])
    (tmp_path / "link.jsonl").symlink_to(prompts)
    before = prompts.read_bytes()
    done = trtrun("run", "--config", config(ONE_PROCESS), "--prompts", prompts, "--output", f"{tmp_path}/{name}")
    assert "it is the input; name another output" in error_line(done)
    assert done.returncode == 2
    assert prompts.read_bytes() == before


def test_prompts_that_are_no_file(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    for path in ("/dev/null", str(tmp_path)):
        done = trtrun("run", "--config", config(ONE_PROCESS), "--prompts", path)
        assert f"the prompts file {path} is not a file" in error_line(done)
        assert done.returncode == 2


def test_a_missing_configuration_file(trtrun: Run) -> None:
    done = trtrun("run", "--config", "nowhere.yaml", "--prompt", "x")
    assert "cannot read the configuration file nowhere.yaml" in error_line(done)


def copy_target(pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair / "target", tmp_path / "copy"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("tokenizer", "target and draft have different tokenizers: token "),
        ("truncated", "model.safetensors is truncated (1000 bytes"),
        ("layers", "has no tensor 'model.layers.3.input_layernorm.weight', which its config.json calls for"),
        ("vocabulary", "tensor 'model.embed_tokens.weight' has shape"),
        ("pickle", "pickle"),
        ("architecture", "unknown architecture 'BertModel'"),
        ("config", "has no config.json"),
        ("heads", "3 ranks"),
        ("shard", "lacks shard"),
    ],
)
def test_a_damaged_or_unfit_model(
    pair: Path, config: Configs, trtrun: Run, tmp_path: Path, damage: str, said: str
) -> None:
    copy = copy_target(pair, tmp_path)
    weights = copy / "model.safetensors"
    devices = dict(THREE_RANKS)
    if damage == "tokenizer":
        make_tokenizer(copy, merges=3)
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage in ("layers", "vocabulary"):
        values = json.loads((copy / "config.json").read_text())
        changes = {"num_hidden_layers": 4} if damage == "layers" else {"vocab_size": values["vocab_size"] + 64}
        (copy / "config.json").write_text(json.dumps({**values, **changes}))
    elif damage == "pickle":
        weights.rename(copy / "pytorch_model.bin")
    elif damage == "architecture":
        values = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**values, "architectures": ["BertModel"]}))
    elif damage == "config":
        (copy / "config.json").unlink()
    elif damage == "heads":
        devices["target"] = ["cpu:1", "cpu:2", "cpu:3"]
    elif damage == "shard":
        weights.unlink()
        make_checkpoint(copy, num_shards=3, tokenizer=True)
        (copy / "model-00002-of-00003.safetensors").unlink()
    file = config(devices, target={"model": str(copy)}, draft={"vocabulary": "same"})
    for command in (("plan",), ("check",), ("run", "--prompt", "x")):
        done = trtrun(*command, "--config", file)
        assert said in error_line(done)
        assert done.returncode == 2


@pytest.mark.parametrize("starter", ["trtrun", "mpirun"])
def test_nan_weights_found_while_ranks_load_end_the_job_with_one_line(
    pair: Path, config: Configs, trtrun: Run, tmp_path: Path, starter: str
) -> None:
    from safetensors.torch import load_file, save_file

    copy = copy_target(pair, tmp_path)
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    # The user's own mpirun runs the console script, without mpi4py's guard against ranks that hang.
    words = [*MPIRUN, "-n", "3", *forked_command_words()] if starter == "mpirun" else None
    done = trtrun("run", "--config", config(THREE_RANKS, target={"model": str(copy)}), "--prompt", "x", words=words)
    lines = [line for line in done.stderr.splitlines() if line.startswith("trtrun: ")]
    assert done.returncode == 2
    assert len(lines) == 1, done.stderr
    assert "'model.layers.1.mlp.down_proj.weight' holds NaN" in lines[0]
    assert "Traceback" not in done.stderr
    if starter == "trtrun":
        assert error_line(done) == lines[0]


def test_a_gpu_that_is_not_there(config: Configs, trtrun: Run) -> None:
    done = trtrun(
        "run", "--config", config({"target": ["cuda:97"], "draft": ["cuda:97"]}), "--prompt", "x",
        env={"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert "cuda:97 is not on this host" in error_line(done)


def test_a_text_prompt_without_a_tokenizer(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "bare")
    file = config(THREE_RANKS, target={"model": str(tmp_path / "bare")}, draft={"model": str(tmp_path / "bare")})
    assert "has no tokenizer" in error_line(trtrun("run", "--config", file, "--prompt", "x"))


def test_a_world_of_the_wrong_size_ends_with_the_right_command(config: Configs, run_ranks) -> None:  # type: ignore[no-untyped-def]
    file = config(THREE_RANKS)
    for size in (1, 2):
        done = run_ranks(size, *forked_command_words()[1:], "run", "--config", str(file), "--prompt", "x", timeout=30)
        lines = [line for line in done.stderr.splitlines() if "trtrun:" in line]
        assert done.returncode == 2
        assert len(lines) == 1
        assert "need 3 ranks (orchestrator rank 0 (host), draft rank 1 (cpu:0), target rank 2 (cpu:1))" in lines[0]
        assert f"but {size} were started" in lines[0]
        assert " -n 3 " in lines[0]
        assert f"launch.cli run --config {file} --prompt x" in lines[0]


def test_a_mistake_that_ranks_find_before_they_start_mpi_ends_a_users_own_mpirun(  # type: ignore[no-untyped-def]
    config: Configs, run_ranks, tmp_path: Path
) -> None:
    # Open MPI's mpirun crashes, or hangs, if one rank ends while another one connects to it.
    file = config(THREE_RANKS, target={"model": str(tmp_path / "nowhere")})
    for _ in range(4):
        done = run_ranks(2, *forked_command_words()[1:], "run", "--config", str(file), "--prompt", "x", timeout=30)
        lines = [line for line in done.stderr.splitlines() if "trtrun:" in line]
        assert done.returncode == 2, done.stderr
        assert len(lines) == 1
        assert "target.model: no such directory" in lines[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["run"],
        ["run", "--config", "nowhere.yaml", "--prompt", "x"],
        ["bench", "--row", "1"],
    ],
)
def test_quick_answers_do_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom launch.cli import main\nsys.argv = ['trtrun', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    assert not {'torch', 'mpi4py.MPI', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=command_environment(),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert "Traceback" not in done.stderr


def test_a_wrong_world_is_refused_before_torch_is_imported(config: Configs) -> None:
    code = (
        "import sys\nfrom launch.cli import main\nsys.argv = ['trtrun', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--config", str(config(THREE_RANKS)), "--prompt", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        env=command_environment({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}),
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "but 2 were started" in done.stderr


def test_an_output_that_is_full_is_one_line(config: Configs) -> None:
    words = [*command_words(), "plan", "--config", str(config(ONE_PROCESS))]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, env=command_environment(), cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["trtrun: cannot write the output: No space left on device"]
