"""Engines hold the bits of the checkpoints that they were built from, for any family, format and number of ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_draft
from engines import build_engine
from paged import LockStepCommunicator, LockStepGroup, PagedModel
from pipelines import make_llm, prompt_of, tokens_of
from quantized_checkpoints import FORMATS, make_pair
from safetensors import safe_open
from tensorrt_llm_checkpoints import write_ranks

from launch.jobs.plan.start_ranks import inspect_files
from parallel.transports.solo import SoloCommunicator
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import make_config
from trtrun.configuration.engine_directory import read_engine
from trtrun.configuration.engine_sections import ModelSection
from trtrun.errors import CheckpointError
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.stored.layout import StoredLinear
from trtrun.loading import device_reading
from trtrun.loading.device_reading import DeviceReading
from trtrun.loading.engine_loader import EngineLoader, held_tensors
from trtrun.loading.engine_shards import order_of_loading, read_places, stored_name
from trtrun.loading.loading import check_embedding_and_head, load_embedding_and_head, load_model
from trtrun.models.config import read_model_config
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import Share
from trtrun.weights.weight_loader import CheckpointLoader

BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
SIZES = {"num_attention_heads": 4, "intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True, "num_shards": 2},
    "MistralForCausalLM": {"sliding_window": 3, "transformers_4": True, "vocab_size": 201},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True, "num_key_value_heads": None},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
}
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
CPU = torch.device("cpu")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_are_the_checkpoints(tmp_path: Path, architecture: str, tp_size: int) -> None:
    source = make_checkpoint(tmp_path / "source", architecture, tokenizer=True, **{**SIZES, **MODELS[architecture]})
    engine = build_engine(source, tmp_path / "engine", tp_size)
    model, expected = (PagedModel(path, tp_size=tp_size) for path in (engine, source))
    assert torch.equal(model.forward(BATCH), expected.forward(BATCH))
    assert [one.shard_bytes for one in model.reports] == [one.shard_bytes for one in expected.reports]
    found, known = read_model_config(engine), read_model_config(source)
    assert (found.rope, found.eos_token_ids, found.checkpoint_dtype) == (known.rope, known.eos_token_ids, "float32")
    assert (engine / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    said = read_engine(engine)
    assert said is not None and (said.tp_size, said.architecture, said.built_for) == (tp_size, architecture, "any")
    assert {file.name for file in engine.glob("rank*")} == {f"rank{rank}.safetensors" for rank in range(tp_size)}
    assert not (engine / "building").exists() and not list(engine.glob("*.new"))


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "fp8_weight_only", "fp8_with_head", "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_rounded_as_they_are_read_lie_rounded(tmp_path: Path, quantization: str, tied: bool) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=tied)
    engine = build_engine(source, tmp_path / "engine", 2, quantization)
    model, expected = (PagedModel(it, torch.bfloat16, 2, quantization=quantization) for it in (engine, source))
    assert torch.equal(model.forward(BATCH), expected.forward(BATCH))
    with safe_open(engine / "rank1.safetensors", "pt") as file:
        codes = file.get_tensor("model.layers.0.mlp.gate_proj+up_proj.codes")
        names = list(file.keys())
    assert codes.itemsize == 1 and codes.shape == (112, 64)
    head = "model.embed_tokens" if tied else "lm_head"
    assert (f"{head}.codes" in names) == (quantization in ("fp8_with_head", "int8"))
    assert "model.embed_tokens.weight" in names


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_checkpoints_give_the_same_logits(tmp_path: Path, name: str) -> None:
    stored, _ = make_pair(tmp_path, name)
    engine = build_engine(stored, tmp_path / "engine", 2)
    assert torch.equal(PagedModel(engine, tp_size=2).forward(BATCH), PagedModel(stored, tp_size=2).forward(BATCH))
    assert read_model_config(engine).quant_method == read_model_config(stored).quant_method is not None


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("compressed-tensors FP8 dynamic", {"codes", "scale"}),
        ("compressed-tensors W4A16 with zero points", {"words", "scales"}),
        ("gptq", {"words", "scales"}),
        ("modelopt FP8", {"codes", "scale"}),
        ("fp8 block", {"codes", "block_scale"}),
        ("compressed-tensors W8A8", {"weight"}),
    ],
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_for_gpus_weights_lie_as_their_kernels_take_them(
    tmp_path: Path, name: str, ends: set[str], tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built on a CPU, and read as a GPU would: what a checkpoint's start makes there, to the bit."""
    stored, _ = make_pair(tmp_path, name)
    path = build_engine(stored, tmp_path / "engine", tp_size, dtype="bfloat16", device="cuda")
    engine, config = read_engine(path), read_model_config(path)
    assert engine is not None and engine.built_for == ("any" if ends == {"weight"} else "cuda sm_90")
    # Where weights are made is not asked here, but what for.
    kept = StoredLinear.can_keep
    monkeypatch.setattr(StoredLinear, "can_keep", lambda self, dtype, device_type: kept(self, dtype, "cuda"))
    for bits in ("int4", "fp8"):
        monkeypatch.setattr(f"trtrun.linear.stored.layout.has_{bits}_products", lambda device_type: True)
    quantization_of = partial(config.quantization_of, default=QUANTIZATIONS.get("none"))
    held: set[str] = set()
    for rank in range(tp_size):
        share = Share(rank, tp_size)
        loader = EngineLoader(path, engine, config, share, CPU, torch.bfloat16, quantization_of, None)
        other = CheckpointLoader(
            open_checkpoint(stored), share, CPU, torch.bfloat16, quantization_of, 0, None, device_type="cuda"
        )
        for weight in order_of_loading(config):
            if weight.use == "plain":
                assert torch.equal(loader.tensor(weight), other.tensor(weight))
                continue
            found, expected = loader.load(weight), other.load(weight)
            assert found.keys() == expected.keys()
            held |= {*found} if weight.use == "linear" else set()
            assert all(torch.equal(as_bytes(found[key]), as_bytes(expected[key])) for key in expected)
        loader.close()
    assert ends <= held <= ends | {"weight"}
    monkeypatch.undo()
    if ends != {"weight"}:
        with pytest.raises(
            CheckpointError, match=r"was built for cuda sm_90 and does not hold 'model.*as weights are held here"
        ):
            PagedModel(path, torch.bfloat16, tp_size)


def test_a_tensorrt_llm_checkpoint_of_any_ranks_becomes_an_engine(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    for kind in ("plain", "fp8", "awq"):
        write_ranks(source, tmp_path / kind, 2, kind)
        engine = build_engine(tmp_path / kind, tmp_path / f"engine-{kind}")
        model, expected = (PagedModel(path) for path in (engine, tmp_path / kind))
        assert torch.equal(model.forward(BATCH), expected.forward(BATCH))


@pytest.mark.parametrize("name", ["plain", "rounded", "compressed-tensors W4A16", "compressed-tensors FP8"])
def test_texts_are_the_checkpoints_with_drafts_and_without(tmp_path: Path, name: str) -> None:
    quantization = "fp8" if name == "rounded" else "none"
    if name in FORMATS:
        target, _ = make_pair(tmp_path, name)
    else:
        target = make_checkpoint(tmp_path / "target", num_hidden_layers=3)
    draft = make_draft(tmp_path / "draft", target, 1) if name not in FORMATS else target
    dtype = "bfloat16" if quantization == "fp8" else "auto"
    engine = build_engine(target, tmp_path / "engine", 1, quantization, dtype, max_batch_size=3, max_draft_len=2)
    draft_engine = build_engine(draft, tmp_path / "draft-engine", dtype=dtype)
    prompts = [prompt_of(length) for length in (3, 20)]
    with make_llm(target, target_quantization=quantization) as llm:
        expected = tokens_of(llm.generate(prompts, GREEDY))
    with make_llm(engine, draft_engine, speculation={}) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 0
    with LLM(engine, draft_engine, draft_len=2, device="cpu:0") as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) == expected


def test_what_an_engine_says_takes_the_place_of_defaults(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.float32)
    limits = {"max_batch_size": 5, "max_seq_len": 100, "max_draft_len": 3}
    engine = build_engine(source, tmp_path / "engine", 1, "fp8", "bfloat16", **limits)
    values: dict[str, Any] = {
        "target": {"model": str(engine), "devices": ["cpu:0"]},
        "draft": {"model": str(source), "devices": ["cpu:0"]},
    }
    config = make_config(values)
    assert (config.target.dtype, config.target.quantization) == ("bfloat16", "fp8")
    assert (config.scheduler.max_batch_size, config.scheduler.max_seq_len, config.draft_len) == (5, 100, 3)
    given = {"speculation": {"draft_len": 2}, "scheduler": {"max_batch_size": 2, "max_num_tokens": 64}}
    config = make_config(values | given)
    assert (config.scheduler.max_batch_size, config.max_num_tokens, config.draft_len) == (2, 64, 2)
    rows = build_engine(source, tmp_path / "rows", max_batch_size=4000)
    config = make_config(
        {
            **values,
            "target": {"model": str(rows), "devices": ["cpu:0"]},
            "speculation": {"draft_len": 1, "method": "none"},
        }
    )
    assert config.scheduler.max_batch_size == config.max_num_tokens == 4000
    tree = {"method": "lookahead", "lookahead_config": [7, 7, 7]}
    config = make_config({"target": {"model": str(rows), "devices": ["cpu:0"]}, "speculation": tree})
    assert config.max_num_tokens == 4000 * 84


def test_a_plan_counts_the_bytes_of_each_shard(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.bfloat16, vocab_size=201)
    engine = build_engine(source, tmp_path / "engine", 2, "fp8")
    config = make_config(
        {"target": {"model": str(engine), "devices": ["cpu:0", "cpu:1"]}, "speculation": {"method": "none"}}
    )
    model = read_model_config(engine)
    files = inspect_files(config.target, model, for_target=True)
    quantized = [held_tensors(weight, Share(0, 2), model.quantization_of(weight, QUANTIZATIONS.get("fp8")),
                              torch.bfloat16, "cpu") for weight in model.weights]  # fmt: skip
    expected = sum(spec.num_bytes for specs in quantized for spec in specs.values())
    assert files.are_here and files.read_bytes[0] == expected and len(files.read_bytes) == 2
    assert files.file_bytes == sum(file.stat().st_size for file in engine.glob("rank*"))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_pieces_of_a_file_reach_their_tensors(
    tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, with tensors on the host: smaller than a piece, larger, and in any order."""
    monkeypatch.setattr(device_reading, "PIECE_BYTES", 5000)
    source = make_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    path = build_engine(source, tmp_path / "engine", 2, "fp8")
    engine, model = read_engine(path), read_model_config(path)
    assert engine is not None
    places, specs = read_places(path, engine, 1), {}
    for weight in order_of_loading(model):
        held = model.quantization_of(weight, QUANTIZATIONS.get("fp8"))
        specs |= held_tensors(weight, Share(1, 2), held, torch.bfloat16, "cpu")
    wanted = {name: (places[name].start, specs[name]) for name in places}
    reader = DeviceReading(path / "rank1.safetensors", CPU, wanted, num_threads)
    with safe_open(path / "rank1.safetensors", "pt") as file:
        for name in reversed(list(wanted)):
            found = reader.take(name)
            assert found is not None and torch.equal(as_bytes(found), as_bytes(file.get_tensor(name)))
            assert reader.take(name) is None
    reader.close()
    (path / "rank1.safetensors").write_bytes(b"short")
    reader = DeviceReading(path / "rank1.safetensors", CPU, wanted, num_threads)
    with pytest.raises(OSError, match="it ends at byte"):
        reader.take(stored_name(model.head))
    reader.close()


@pytest.mark.parametrize("tied", [False, True])
def test_heads_apart_read_the_ends_of_any_layout(tmp_path: Path, tied: bool) -> None:
    """A vocabulary that is no multiple of the ranks."""
    source = make_checkpoint(tmp_path / "source", vocab_size=201, tie_word_embeddings=tied)
    write_ranks(source, tmp_path / "ranks", 2)
    paths = [source, tmp_path / "ranks", *(build_engine(source, tmp_path / f"tp{size}", size) for size in (1, 2))]
    tokens, hidden = (
        torch.tensor([0, 7, 100, 101, 200]),
        torch.randn((3, 64), generator=torch.Generator().manual_seed(1)),
    )
    found = []
    for path in paths:
        config = read_model_config(path)
        section = ModelSection(model=path, devices=["cpu:0"])  # type: ignore[arg-type]
        ends = [config.embedding, config.head]
        check_embedding_and_head(section, config, ends)
        loaded = load_embedding_and_head(section, config, ends, SoloCommunicator(), CPU, torch.float32)
        found.append((loaded.embed(tokens), loaded.logits(hidden)))
    for embedded, logits in found[1:]:
        assert torch.equal(embedded, found[0][0]) and torch.equal(logits, found[0][1]) and logits.shape == (3, 201)
    if tied:
        return
    rounded = build_engine(source, tmp_path / "int8", 2, "int8", "bfloat16")
    section = ModelSection(model=rounded, devices=["cpu:0"])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"does not hold 'lm_head\.weight' as heads with a device of their own"):
        config = read_model_config(rounded)
        check_embedding_and_head(section, config, [config.head])


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_on_their_way_while_layers_are_built(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs; here a tied head and the embedding are two, so that one tensor is asked for a second time."""
    source = make_checkpoint(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=tied)
    engine = build_engine(source, tmp_path / "engine", 2, "fp8")
    monkeypatch.setattr(EngineLoader, "_streams", True)
    monkeypatch.setattr(device_reading, "_WAIT_SECONDS", 1e-6)
    model, expected = (PagedModel(it, torch.bfloat16, 2, quantization="fp8") for it in (engine, source))
    assert torch.equal(model.forward(BATCH), expected.forward(BATCH))
    said: list[tuple[int, int]] = []
    model_config, told = read_model_config(engine), lambda *it: said.append(it)
    first = LockStepCommunicator(LockStepGroup(2), 0)
    load_model(engine, model_config, first, CPU, torch.bfloat16, told, quantization="fp8")
    assert [*said] == sorted(said) and said[-1][0] == said[-1][1] > 0

    def fail(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(device_reading, "read_piece", fail)
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors cannot be read: Input/output error"):
        load_model(
            engine,
            read_model_config(engine),
            LockStepCommunicator(LockStepGroup(2), 0),
            CPU,
            torch.bfloat16,
            quantization="fp8",
        )


def test_an_engine_is_no_checkpoint(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    engine = build_engine(source, tmp_path / "engine")
    with pytest.raises(CheckpointError, match="is an engine: name the checkpoint that it was built from"):
        build_engine(engine, tmp_path / "another")
    values = json.loads((engine / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"]
