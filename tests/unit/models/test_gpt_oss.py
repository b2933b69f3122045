"""gpt-oss beyond what all families are tried in: experts in MXFP4, defaults, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_engine
from family_checkpoints import write_family
from paged import PagedModel
from pipelines import make_llm, prompt_of, tokens_of
from quantized_checkpoints import edit_config, edit_tensors
from safetensors.torch import load_file, save_file

from trtrun import SamplingParams
from trtrun.errors import CheckpointError, ConfigError
from trtrun.kernels.arguments import SWIGLU_SLOPE
from trtrun.layers.rope import RopeConfig
from trtrun.linear.quantization import QUANTIZATIONS, quantizations
from trtrun.loading.stored_report import describe_stored
from trtrun.loading.weight_check import check_split, choose_default
from trtrun.models.config import read_model_config
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import Share
from trtrun.weights.weight_loader import CheckpointLoader

PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""As the released models have it."""
SIZES = {"intermediate_size": 96}
"""Three blocks of 32 columns: of four ranks some share one."""
BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]


def write_pair(path: Path, **values: Any) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4, and one of the same numbers in bfloat16, as transformers widens them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = write_family(path / "plain", "gpt_oss", dtype=torch.bfloat16, **SIZES, **values)
    stored = write_family(path / "stored", "gpt_oss", dtype=torch.bfloat16, **SIZES, **values)
    generator = torch.Generator().manual_seed(0)
    tensors, widened = load_file(stored / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, features = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, features, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        widened[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    save_file(load_file(plain / "model.safetensors") | widened, plain / "model.safetensors", {"format": "pt"})
    edit_config(stored, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": PLAIN})
    return stored, plain


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_experts_in_mxfp4_are_those_that_transformers_widens(tmp_path: Path, tp_size: int) -> None:
    """With as much memory of weights, of a file a quarter as large; and so is an engine that is built of it."""
    stored, plain = write_pair(tmp_path)
    found, expected = (PagedModel(path, torch.bfloat16, tp_size) for path in (stored, plain))
    logits = expected.forward(BATCH)
    assert torch.equal(found.forward(BATCH), logits)
    for one, other in zip(found.reports, expected.reports, strict=True):
        assert one.shard_bytes == other.shard_bytes and one.bytes_read < 0.7 * other.bytes_read
    config, share = read_model_config(stored), Share(0, tp_size)
    on_cpus, on_gpus = (describe_stored(config, share, torch.bfloat16, kind) for kind in ("cpu", "cuda"))
    assert on_cpus is not None and on_cpus.startswith("mxfp4 weights become bfloat16 as they are read")
    assert on_gpus is not None and on_gpus.startswith("mxfp4 weights stay as they are")
    assert ("become bfloat16" in on_gpus) == (tp_size > 1), "ranks share blocks"
    assert describe_stored(read_model_config(plain), share, torch.bfloat16, "cuda") is None
    if tp_size > 1:  # whole experts are whole blocks
        found, expected = (PagedModel(path, torch.bfloat16, tp_size, by_experts=True) for path in (stored, plain))
        assert torch.equal(found.forward(BATCH), expected.forward(BATCH))
        on_gpus = describe_stored(config.cut_by_experts(), share, torch.bfloat16, "cuda")
        assert on_gpus is not None and "become" not in on_gpus
    engine = PagedModel(build_engine(stored, tmp_path / "engine", tp_size), torch.bfloat16, tp_size)
    assert torch.equal(engine.forward(BATCH), logits)


def test_norms_round_once(tmp_path: Path) -> None:
    """As transformers' do, whose other families' round before they multiply by the weight."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

    model = PagedModel(write_family(tmp_path, "gpt_oss", dtype=torch.bfloat16), torch.bfloat16).models[0]
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, layer = load_file(tmp_path / "model.safetensors"), model._layers[1]
    for norm, name in (
        (layer.input_norm, "layers.1.input_layernorm"),
        (layer.post_attention_norm, "layers.1.post_attention_layernorm"),
        (model._final_norm, "norm"),
    ):
        expected = GptOssRMSNorm(64, eps=model.config.rms_norm_eps)
        expected.weight.data = weights[f"model.{name}.weight"]
        assert torch.equal(norm(x), expected(x)), name


def test_every_number_of_mxfp4_is_one_of_bfloat16() -> None:
    """But for those beyond its largest one, and those of the exponent which stands for none."""
    from trtrun.linear.quantization.base import TensorSlice
    from trtrun.linear.stored.expert_layouts import Mxfp4Experts

    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes.flip(0) << 4).expand(1, 256, 1, 16)
    part = TensorSlice("experts.0.down_proj.weight", (256, 32), (range(256), range(32)))
    exponents = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    numbers = Mxfp4Experts(1).form(part, {"blocks": blocks, "scales": exponents}).dequantize()
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    powers = 2.0 ** (torch.arange(256, dtype=torch.float64).view(-1, 1) - 127)
    expected = torch.stack((table, table.flip(0)), dim=1).flatten() * powers
    assert torch.equal(numbers[:253].double(), expected[:253])
    assert torch.equal(numbers[:253].bfloat16().double(), expected[:253])
    assert not numbers[255].isfinite().all()


def test_drafted_texts_of_experts_in_mxfp4_are_plain_ones(tmp_path: Path) -> None:
    stored, plain = write_pair(tmp_path)
    prompts = [prompt_of(length, seed=length) * 2 for length in (4, 19)]
    sampling = [SamplingParams(max_tokens=30, ignore_eos=True)] * 2
    with make_llm(plain, speculation={"method": "none"}, dtype="bfloat16") as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
    with make_llm(stored, stored, dtype="bfloat16") as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 30


def test_layers_whose_experts_are_listed_as_plain_are_read_so(tmp_path: Path) -> None:
    stored, plain = write_pair(tmp_path)
    tensors, others = load_file(stored / "model.safetensors"), load_file(plain / "model.safetensors")
    of_layer = "model.layers.1.mlp.experts."
    kept = {name: value for name, value in tensors.items() if not name.startswith(of_layer)}
    kept |= {name: value for name, value in others.items() if name.startswith(of_layer)}
    save_file(kept, stored / "model.safetensors", {"format": "pt"})
    listed = [*PLAIN, "model.layers.1.mlp.experts"]
    edit_config(stored, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": listed})
    found, expected = (PagedModel(path, torch.bfloat16).forward(BATCH) for path in (stored, plain))
    assert torch.equal(found, expected)


def test_keys_left_out_get_the_defaults_of_transformers(tmp_path: Path) -> None:
    """As the released models write them, for transformers 4: yarn by rope_scaling, or nothing of it at all."""
    from transformers import AutoConfig

    file = write_family(tmp_path, "gpt_oss") / "config.json"
    kept = ("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    values = {key: value for key, value in json.loads(file.read_text("utf-8")).items() if key in kept}
    file.write_text(json.dumps({**values, "num_attention_heads": 8, "dtype": "bfloat16"}), "utf-8")
    config, reference = read_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert config.windows == tuple(128 if "sliding" in kind else None for kind in reference.layer_types)
    assert (config.head_dim, config.num_kv_heads) == (reference.head_dim, reference.num_key_value_heads)
    assert config.max_position_embeddings == reference.max_position_embeddings
    expected = RopeConfig("yarn", 150_000.0, 32.0, 4096, truncate=False, attention_factor=config.rope.attention_factor)
    assert config.rope == expected and abs(config.rope.attention_factor - 1.3465735) < 1e-6
    edit_config(tmp_path, rope_parameters=None, rope_scaling=None)
    assert read_model_config(tmp_path).rope == expected
    mlp = config.layers[0].mlp  # type: ignore[attr-defined]
    assert (mlp.num_experts, mlp.num_chosen, mlp.limit) == (128, 4, reference.swiglu_limit)
    assert reference.swiglu_alpha == SWIGLU_SLOPE
    scaling = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    scaling["original_max_position_embeddings"] = 4096
    edit_config(tmp_path, rope_scaling=scaling, rope_theta=150000)
    rope = read_model_config(tmp_path).rope
    assert (rope.factor, rope.theta, rope.truncate) == (8.0, 150_000.0, False)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5 is not supported; known: 1.702"),
        ({"swiglu_limit": 0}, "'swiglu_limit' must be a positive number, not 0"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, more than there are experts: 6"),
        ({"layer_types": ["chunked_attention"] * 5}, "unknown layer type 'chunked_attention'"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "layers.0.mlp.experts: experts in one tensor that are quantized as 'fp8' are not supported; known: mxfp4",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_what_config_json_may_not_say(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    edit_config(write_family(tmp_path, "gpt_oss"), **values)
    with pytest.raises(CheckpointError, match=said):
        read_model_config(tmp_path)


def test_what_files_in_mxfp4_may_not_hold(tmp_path: Path) -> None:
    """Told in a line: a scale that stands for no number, blocks that are not there, columns that fill no block."""
    stored, _ = write_pair(tmp_path)
    name = "model.layers.2.mlp.experts.down_proj_scales"
    scales = load_file(stored / "model.safetensors")[name]
    scales[3, 5, 1] = 255
    edit_tensors(stored, {name: scales})
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.3\.down_proj\.weight' holds NaN or infinite"):
        PagedModel(stored, torch.bfloat16)
    edit_tensors(stored, {name: None})
    with pytest.raises(CheckpointError, match=f"has no tensor '{name}'"):
        PagedModel(stored, torch.bfloat16)
    edit_config(stored, intermediate_size=80)
    with pytest.raises(CheckpointError, match="80 input features are not a multiple of 32, as mxfp4 has them"):
        PagedModel(stored, torch.bfloat16)


def test_matrices_of_others_in_mxfp4_are_refused(tmp_path: Path) -> None:
    path = write_family(tmp_path, "mixtral")
    edit_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": PLAIN})
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight is not among modules_to_not_convert, and mxfp4"):
        PagedModel(path)


def test_experts_in_one_tensor_are_rounded_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like those of their own, and held so on GPUs; what is quantized already is not."""
    stored, plain = write_pair(tmp_path)
    for path in (stored, plain):
        config = read_model_config(path)
        assert check_split(config, Share(0, 2), "bfloat16", "cuda", QUANTIZATIONS.get("none"))
    default, config = choose_default(read_model_config(plain), "fp8", for_target=True), read_model_config(plain)
    held = dict(check_split(config, Share(0, 2), "bfloat16", "cuda", default))
    assert {it.fits_experts for weight, it in held.items() if weight.use == "expert"} == {True}
    dense, rounded = (
        CheckpointLoader(
            open_checkpoint(plain), Share(0, 2), torch.device("cpu"), torch.bfloat16,
            lambda weight, own=own: config.quantization_of(weight, own), 1, None,
        )
        for own in (QUANTIZATIONS.get("none"), default)
    )  # fmt: skip
    for weight in (weight for weight in config.weights if weight.use == "expert"):
        codes, expected = rounded.load(weight), dense.load(weight)["weight"].float()
        assert 0 < (codes["codes"].float() * codes["scale"].unsqueeze(1) - expected).norm() < 0.04 * expected.norm()
    assert PagedModel(plain, torch.bfloat16, 2, quantization="fp8").forward(BATCH).isfinite().all()
    with pytest.raises(ConfigError, match=r"those of this model are quantized already \(mxfp4\)"):
        choose_default(read_model_config(stored), "fp8", for_target=True)
    monkeypatch.setattr(quantizations, "has_fp8_products", lambda device_type: False)
    with pytest.raises(ConfigError, match="experts are not held so on these GPUs, whose matrix units do not multiply"):
        check_split(config, Share(0, 1), "bfloat16", "cuda", default)
    assert check_split(config, Share(0, 1), "bfloat16", "cuda", QUANTIZATIONS.get("int8"))
