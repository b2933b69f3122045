"""Keys and values of 8 bits: what codes stand for, whose scales they have, and whole texts with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, save_weights
from engines import build_engine
from native import leave_to_torch
from paged import PagedModel
from pipelines import Reference, configuration, make_llm, noisy_copy, prompt_of, tokens_of
from safetensors.torch import load_file
from tensorrt_llm_checkpoints import write_ranks

from trtrun import SamplingParams
from trtrun.errors import CheckpointError, ConfigError
from trtrun.kvcache.byte_codes import CodeKind, as_scales, from_codes, scales_of, to_codes
from trtrun.kvcache.formats import ByteKV, KVScheme, choose_format
from trtrun.kvcache.specs import like_layers
from trtrun.kvcache.store import KVStore
from trtrun.memory.memory_requirements import kv_bytes_per_block, reads_in_place
from trtrun.models.config import read_model_config
from trtrun.tools.conversion.source import open_source
from trtrun.tools.conversion.writers import write_hugging_face
from trtrun.tools.conversion.writers import write_ranks as write_rank_files
from trtrun.weights.quantization_config import load_kv_scales
from trtrun.weights.rank_files import open_checkpoint

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", ["fp8", "int8"])


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_stand_for_numbers_near_the_rows_own(kind: CodeKind, dtype: torch.dtype) -> None:
    """By each row alone, whatever its size; rows of zeros stay zeros, and what is far too large is cut."""
    torch.manual_seed(1)
    rows = (torch.randn(50, 64) * 10.0 ** torch.linspace(-3, 3, 50).unsqueeze(1)).to(dtype)
    rows[7] = 0
    scale = scales_of(rows, kind)
    found = from_codes(to_codes(rows, scale, kind), scale, kind, dtype)
    step = 2.0**-4 if kind == "fp8" else 0.5 / 127
    error, largest = (found.float() - rows.float()).abs(), rows.float().abs().amax(1, keepdim=True)
    bound = rows.float().abs() * step if kind == "fp8" else largest * step
    assert (error <= bound * 1.02 + largest * 2.0**-8).all() and not found[7].any()
    alone = torch.cat([from_codes(to_codes(row, own, kind), own, kind, dtype)
                       for row, own in zip(rows.split(1), scale.split(1), strict=True)])  # fmt: skip
    assert torch.equal(alone, found)
    huge = torch.full((1, 4), 3e38)
    assert from_codes(to_codes(huge, scales_of(huge, kind), kind), scales_of(huge, kind), kind, dtype).min() > 16000


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_is_its_number_times_the_scale(kind: CodeKind, dtype: torch.dtype) -> None:
    """Rounded once, the smallest and the largest among them."""
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[(codes & 127) != 127] if kind == "fp8" else codes[codes != 128]  # which stand for nothing
    scale = torch.tensor([2.0**-100, 0.0037, 1.0, 3.14, 127.5]).to(torch.bfloat16).float()
    numbers = codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8).double()
    exact = (numbers * scale.double().unsqueeze(1)).to(dtype)
    assert torch.equal(from_codes(codes.expand(5, -1).contiguous(), scale, kind, dtype), exact)


@pytest.mark.parametrize("kv_format", [ByteKV("fp8"), ByteKV("int8"), ByteKV("fp8", True)], ids=str)
def test_tokens_and_blocks_move_with_their_scales(kv_format: ByteKV) -> None:
    from trtrun.attention.backend import GatherAttention
    from trtrun.kernels.torch.operations import TorchOperations

    store = KVStore(like_layers(2, 2, 8), 6, 5, torch.float32, CPU, kv_format)
    scales = as_scales(torch.ones(2, 2), kv_format.kind) if kv_format.has_layer_scales else None
    places = torch.arange(2 * 6 * 2 * 5)
    for index in range(2):
        kv_format.write(store.layer(index), places, torch.randn(len(places), 8), scales)

    def numbers() -> torch.Tensor:
        read = [kv_format.read(store.layer(index), torch.arange(24), 8, torch.float32, scales) for index in range(2)]
        return torch.stack(read).view(2, 2, 6, 2, 5, 8)

    before = numbers()
    expected, (source, target, offset) = before.clone(), torch.tensor([[1, 3, 4], [2, 4, 2], [0, 4, 2]])
    expected[:, :, target, :, offset] = before[:, :, source, :, offset]
    ((data,),) = store.parts()
    GatherAttention(kv_format).copy_tokens(data, source, target, offset)
    assert torch.equal(numbers(), expected) and not torch.equal(before, expected)
    TorchOperations().copy_blocks(data, torch.tensor([2, 5]), torch.tensor([1, 3]))
    expected[:, :, [1, 3]] = expected[:, :, [2, 5]]
    assert torch.equal(numbers(), expected)
    store.clear([2])
    assert not numbers()[:, :, 2].any()


def with_kv_scales(
    path: Path, source: Path, scheme: dict[str, Any] | str, names: str = "{}_scale", heads: int = 0
) -> Path:
    """A copy of a plain checkpoint that has scales for keys and values, of 0.02 and 0.03 a layer further."""
    weights, values = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    for index in range(values["num_hidden_layers"]):
        for at, kind in enumerate("kv"):
            scale = torch.tensor([0.02 + 0.01 * at + 0.001 * index])
            if heads:
                scale = (scale * (1 + torch.arange(heads))).view(heads, 1, 1)
            weights[f"model.layers.{index}.self_attn.{names.format(kind)}"] = scale
    path.mkdir(parents=True)
    save_weights(path, weights)
    for file in source.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (path / "config.json").write_text(json.dumps({**values, "quantization_config": section}))
    return path


FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
INT8_SCHEME = {**FP8_SCHEME, "type": "int"}


def test_whose_scales_a_store_has(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    heads = read_model_config(source).num_kv_heads
    assert choose_format("auto") is choose_format("plain") and read_model_config(source).kv_scheme is None
    fp8 = read_model_config(with_kv_scales(tmp_path / "fp8", source, FP8_SCHEME))
    int8 = read_model_config(with_kv_scales(tmp_path / "int8", source, INT8_SCHEME, "{0}_proj.{0}_scale", heads))
    assert fp8.kv_scheme == KVScheme("fp8", True) and int8.kv_scheme == KVScheme("int8", True)
    assert choose_format("auto", fp8.kv_scheme) == choose_format("fp8", fp8.kv_scheme) == ByteKV("fp8", True)
    assert choose_format("int8", fp8.kv_scheme) == ByteKV("int8") and choose_format("plain", fp8.kv_scheme).kernels
    assert choose_format("auto", KVScheme("fp8", False)) == ByteKV("fp8")
    other = with_kv_scales(tmp_path / "other", source, {**FP8_SCHEME, "num_bits": 4})
    assert read_model_config(other).kv_scheme is None
    weights = load_file(tmp_path / "fp8" / "model.safetensors")
    del weights["model.layers.1.self_attn.v_scale"]
    save_weights(tmp_path / "fp8", weights)
    assert read_model_config(tmp_path / "fp8").kv_scheme == KVScheme("fp8", False)
    with pytest.raises(ConfigError, match=r"unknown kv_cache\.dtype 'fp9' \(did you mean 'fp8'\?\)"):
        configuration_bytes(tmp_path, source, "fp9")


def configuration_bytes(folder: Path, model: Path, name: str) -> int:
    config = configuration(model, None, dtype="bfloat16", kv_cache={"dtype": name, "block_size": 16})
    return kv_bytes_per_block(config, read_model_config(model), 1, torch.bfloat16)


def test_on_gpus_they_are_for_half_precision_alone(tmp_path: Path) -> None:
    path = with_kv_scales(tmp_path / "scaled", make_checkpoint(tmp_path / "source"), FP8_SCHEME)
    model = read_model_config(path)
    for name, kind in (("auto", "fp8"), ("int8", "int8")):
        config = configuration(path, None, kv_cache={"dtype": name})
        assert all(reads_in_place(config, model, "cuda", dtype) for dtype in (torch.bfloat16, torch.float16))
        assert not reads_in_place(config, model, "cpu", torch.float32)
        with pytest.raises(ConfigError, match=f"on GPUs keys and values are kept in {kind} .* not in float32: write"):
            reads_in_place(config, model, "cuda", torch.float32)
    assert reads_in_place(configuration(path, None, kv_cache={"dtype": "plain"}), model, "cuda", torch.float16)


def test_on_cpus_they_are_refused_in_float32_where_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other last bits of a float32 make other codes of it, and other tokens."""
    path = make_checkpoint(tmp_path / "model")
    model, config = read_model_config(path), configuration(path, None, kv_cache={"dtype": "int8"})
    leave_to_torch(monkeypatch)
    assert not reads_in_place(config, model, "cpu", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"kv_cache.dtype: int8 .* float32 needs trtrun's own kernels .*: write kv"):
        reads_in_place(config, model, "cpu", torch.float32)
    assert reads_in_place(configuration(path, None, kv_cache={"dtype": "plain"}), model, "cpu", torch.float32)


def test_a_block_takes_half_the_bytes(tmp_path: Path) -> None:
    """To the byte where layers have scales; else with four more for each head of a token."""
    source = make_checkpoint(tmp_path / "source")
    scaled = with_kv_scales(tmp_path / "scaled", source, FP8_SCHEME)
    plain, shape = configuration_bytes(tmp_path, source, "auto"), read_model_config(source)
    assert 2 * configuration_bytes(tmp_path, scaled, "auto") == plain
    tokens = shape.num_layers * 2 * shape.num_kv_heads * 16
    for name in ("fp8", "int8"):
        assert configuration_bytes(tmp_path, source, name) == plain // 2 + 4 * tokens


BATCH = [[(0, 0, prompt_of(20))]]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("heads", [0, 2], ids=["layer", "heads"])
def test_scales_of_the_checkpoint_are_those_of_its_layers(tmp_path: Path, heads: int, tp_size: int) -> None:
    """Codes are keys and values divided by them: a store without them differs, one of two ranks has its own heads'."""
    source = make_checkpoint(tmp_path / "source")
    assert heads in (0, read_model_config(source).num_kv_heads)
    scaled = with_kv_scales(tmp_path / "scaled", source, INT8_SCHEME, heads=heads)
    plain, model = PagedModel(source, tp_size=tp_size), PagedModel(scaled, tp_size=tp_size)
    logits = [it.forward(BATCH) for it in (plain, model, PagedModel(scaled, tp_size=tp_size, kv_format="plain"))]
    assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])
    for rank, (exact, store) in enumerate(zip(plain.stores, model.stores, strict=True)):
        kv_heads = store.layer(0).shape[2]
        assert store.layer(0).shape[-1] == model.models[rank].config.head_dim
        numbers, codes = exact.layer(0).float(), store.layer(0).view(torch.int8).float()
        scale = torch.tensor([0.02, 0.03]).view(2, 1, 1, 1, 1).expand(2, 1, kv_heads, 1, 1)
        if heads:
            scale = scale * (1 + rank * kv_heads + torch.arange(kv_heads)).view(1, 1, -1, 1, 1)
        scale = scale.to(torch.bfloat16).float()
        assert ((codes - (numbers / scale).clamp(-127, 127)).abs() <= 0.5 + 1e-3).all() and codes.any()


def test_scales_of_other_layouts(tmp_path: Path) -> None:
    """TensorRT-LLM's one scale for keys and values, cut for two ranks; ModelOpt's file beside config.json, which says
    nothing of weights; AutoFP8's word for it."""
    source = make_checkpoint(tmp_path / "source")
    write_ranks(source, tmp_path / "ranks", 2)
    assert read_model_config(tmp_path / "ranks").kv_scheme == KVScheme("fp8", True)
    scales = load_kv_scales(open_checkpoint(tmp_path / "ranks"), "model.layers.1.self_attn", 2, range(1, 2))
    assert scales.tolist() == [[1.5], [1.5]]
    modelopt = with_kv_scales(tmp_path / "modelopt", source, INT8_SCHEME, "{0}_proj.{0}_scale")
    (modelopt / "config.json").write_bytes((source / "config.json").read_bytes())
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "INT8"}}
    (modelopt / "hf_quant_config.json").write_text(json.dumps(told))
    assert read_model_config(modelopt).kv_scheme == KVScheme("int8", True)
    weights = with_kv_scales(tmp_path / "static", source, "static", "{0}_proj.output_scale")
    assert read_model_config(weights).kv_scheme == KVScheme("fp8", True)
    logits = [PagedModel(path).forward(BATCH) for path in (modelopt, tmp_path / "ranks", source)]
    assert not torch.equal(logits[0], logits[2]) and not torch.equal(logits[1], logits[2])


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (torch.tensor([-1.0]), "is not a number above 0"),
        (torch.tensor([torch.inf]), "is not a number above 0"),
        (torch.ones(3), "must be 1 scale, or one for each"),
        (torch.ones(0), "must be 1 scale, or one for each"),
        (torch.ones(1, dtype=torch.float64), "has dtype F64, which is not supported"),
    ],
)
def test_scales_that_are_none_are_refused(tmp_path: Path, scale: torch.Tensor, reason: str) -> None:
    """By whoever reads them: engines, and what cuts a checkpoint for TensorRT-LLM."""
    path = with_kv_scales(tmp_path / "scaled", make_checkpoint(tmp_path / "source"), FP8_SCHEME)
    weights = load_file(path / "model.safetensors")
    save_weights(path, {**weights, "model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(CheckpointError, match=rf"layers\.1\.self_attn\.k_scale.* {reason}"):
        PagedModel(path)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.self_attn\.k_scale.* {reason}"):
        write_rank_files(open_source(path, None), tmp_path, 1, lambda done, total: None)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_plain_weights_keep_their_scales_when_they_are_converted(tmp_path: Path, kind: str) -> None:
    """To ranks and back, and to a directory of the same layout."""
    scheme = FP8_SCHEME if kind == "fp8" else INT8_SCHEME
    scaled = with_kv_scales(tmp_path / "scaled", make_checkpoint(tmp_path / "source"), scheme)
    for name in ("ranks", "back", "copy"):
        (tmp_path / name).mkdir()
    write_rank_files(open_source(scaled, None), tmp_path / "ranks", 2, lambda done, total: None)
    for start, end in (("ranks", "back"), ("scaled", "copy")):
        write_hugging_face(open_source(tmp_path / start, None), tmp_path / end, lambda done, total: None)
    for name in ("ranks", "back", "copy"):
        assert read_model_config(tmp_path / name).kv_scheme == read_model_config(scaled).kv_scheme, name
    found, expected = (PagedModel(tmp_path / name).forward(BATCH) for name in ("back", "ranks"))
    copied, original = (PagedModel(tmp_path / name).forward(BATCH) for name in ("copy", "scaled"))
    assert torch.equal(found, expected) and torch.equal(copied, original)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_engine_has_the_scales_of_its_checkpoint(tmp_path: Path, tp_size: int) -> None:
    source = make_checkpoint(tmp_path / "source")
    scaled = with_kv_scales(tmp_path / "scaled", source, INT8_SCHEME, heads=2)
    engine = build_engine(scaled, tmp_path / "engine", tp_size)
    assert read_model_config(engine).kv_scheme == KVScheme("int8", True)
    found, expected = (PagedModel(path, tp_size=tp_size).forward(BATCH) for path in (engine, scaled))
    assert torch.equal(found, expected) and not torch.equal(found, PagedModel(source, tp_size=tp_size).forward(BATCH))
    values = json.loads((engine / "engine.json").read_text())
    for damage in ([[0.02, 0.04]], [[0.02], [0.03]], [[0.02, -1], [0.03, 0.06]]):
        values["kv_scales"]["model.layers.1.self_attn"] = damage
        (engine / "engine.json").write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=r"engine\.json"):
            PagedModel(engine, tp_size=tp_size)


@pytest.mark.parametrize("name", ["fp8", "int8", "auto"])
def test_speculative_texts_are_plain_ones(tmp_path: Path, name: str) -> None:
    """One row alone, 8 and 64 of them: chunks of prompts, prefixes in use twice, preempted rows; chains by a draft
    model, and trees. With a scale for each token fewer runs tell as much."""
    target = make_checkpoint(tmp_path / "target", seed=1, dtype=torch.bfloat16)
    draft = noisy_copy(tmp_path / "draft", target, 0.02)
    if name == "auto":
        target = with_kv_scales(tmp_path / "scaled", target, FP8_SCHEME)
    shared = prompt_of(40, seed=9)
    prompts = [(shared if index % 3 == 0 else []) + prompt_of(3 + 5 * (index % 8), index) for index in range(64)]
    sampling = [
        SamplingParams(max_tokens=16, ignore_eos=True, seed=index, temperature=0.8 * (index % 2)) for index in range(64)
    ]
    counts = {1: 8, 8: 24, 64: 64}  # of prompts, by rows
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "draft_len": 3, "max_paths": 3}
    texts, preempted, accepted = [], 0, 0
    for rows, model, speculation in (
        (64, None, {}),
        (8, draft, {"draft_len": 4}),
        (8, None, ngram),
        *([(1, None, {}), (64, draft, {})] if name == "auto" else []),
    ):
        scheduler = {"max_batch_size": rows, "max_num_tokens": 40 + 5 * rows}
        cache = {"max_tokens": max(112, 20 * rows), "block_size": 8, "dtype": name}
        count = counts[rows]
        with make_llm(target, model, speculation=speculation, scheduler=scheduler, kv_cache=cache) as llm:
            outputs = llm.generate(prompts[:count], sampling[:count])
            texts.append(tokens_of(outputs))
            assert texts[-1] == texts[0][:count], rows
            preempted += sum(output.completions[0].statistics.num_preemptions for output in outputs)
            accepted += llm.statistics()["num_accepted_draft_tokens"]
            llm.check_idle()
    assert preempted and accepted > 100


@KINDS
def test_logits_are_transformers_with_the_same_rounding(tmp_path: Path, kind: CodeKind) -> None:
    """In float32, with a cache that rounds keys and values as they come: as near as without any rounding, but for codes
    that another last bit of a float32 makes others."""
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *others: Any, **named: Any) -> Any:
            rounded = []
            for numbers in (key, value):
                rows = numbers.flatten(0, -2)
                scale = scales_of(rows, kind)
                rounded.append(from_codes(to_codes(rows, scale, kind), scale, kind, torch.float32).view(numbers.shape))
            return super().update(*rounded, layer, *others, **named)

    path = make_checkpoint(tmp_path / "model", seed=3)
    tokens = prompt_of(60)
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        model = Reference(path).model
        expected, plain = (
            model(ids, past_key_values=made(), use_cache=True).logits[0] for made in (RoundingCache, DynamicCache)
        )
    paged = PagedModel(path, kv_format=kind)
    found = torch.cat([paged.forward([[(0, at, tokens[at : at + 20])]]) for at in (0, 20, 40)])
    assert (expected - plain).norm() > 1e-2 * plain.norm()
    assert (found - expected).norm() < 0.05 * (expected - plain).norm()
