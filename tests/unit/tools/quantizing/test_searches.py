"""AWQ and SmoothQuant: folding changes nothing, searches find what rounding to nearest does not, and on the shipped
target perplexity says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, save_weights
from family_checkpoints import write_family
from quantizing_runs import ON_CPU, quantize, tensors_of, texts_of

from trtrun.configuration.model_paths import ASSETS
from trtrun.models.config import read_model_config
from trtrun.tokens.text import read_tokenizer
from trtrun.tools.quantizing.awq import Awq, Pair, cut_ranges, fold, linear_pairs, norm_pairs, smooth
from trtrun.tools.quantizing.checkpoint_quantizer import CheckpointQuantizer
from trtrun.tools.quantizing.formats import nearest_int4, round_int8_tokens
from trtrun.tools.quantizing.layer_quantizer import LayerQuantizer
from trtrun.tools.quantizing.settings import QuantizingSettings
from trtrun.tools.quantizing.texts import read_texts


def with_outliers(path: Path) -> Path:
    """A model with some channels behind its norms, and between its products, that are much larger than others."""
    make_checkpoint(path, attention_bias=True)
    tensors = tensors_of(path)
    for name, value in tensors.items():
        if "layernorm" in name:
            value[::9] *= 30
        if "up_proj" in name or "v_proj.weight" in name:
            value[::7] *= 8
    save_weights(path, tensors)
    return path


def pairs_of(plan: Any) -> list[Pair]:
    return [*norm_pairs(plan), *linear_pairs(plan)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", range(4))
def test_a_scale_that_is_folded_in_changes_no_result(tmp_path: Path, place: int, dtype: torch.dtype) -> None:
    """Heads of values that several queries share, biases, and norms that are rounded to bfloat16 included."""
    path = with_outliers(tmp_path / "model")
    config, tensors = read_model_config(path), tensors_of(path)
    quantizer = LayerQuantizer(config, QuantizingSettings("fp8"), ON_CPU, torch.float32, 16)
    plan, pair = config.layers[0], pairs_of(config.layers[0])[place]
    inputs = torch.randn(2, 16, config.hidden_size, generator=torch.Generator().manual_seed(0))
    size = tensors[f"{pair.consumers[0]}.weight"].shape[1]
    scale = pair.shared(torch.rand(size, generator=torch.Generator().manual_seed(1)) * 5 + 0.1)
    folded = fold(tensors, pair, scale, dtype)
    found, expected = (quantizer.plain(plan, it)[0].forward(inputs) for it in (folded, tensors))  # type: ignore[arg-type]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert not torch.equal(folded[f"{pair.consumers[0]}.weight"], tensors[f"{pair.consumers[0]}.weight"])


def test_a_scale_that_is_folded_into_experts_changes_no_choice(tmp_path: Path) -> None:
    """Routers read what a norm makes, too; each expert has a pair of its own, and so has the one of all tokens."""
    path = write_family(tmp_path, "qwen2_moe")
    config, tensors = read_model_config(path), tensors_of(path)
    (layer,) = LayerQuantizer(config, QuantizingSettings("fp8"), ON_CPU, torch.float32, 16).plain(
        config.layers[1],  # type: ignore[arg-type]
        tensors,
    )
    inputs = torch.randn(2, 16, config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected, pairs = layer.forward(inputs), pairs_of(config.layers[1])
    assert [pair.site for pair in pairs[3:]] == [*(f"down.{expert}" for expert in range(7)), "down.shared"]
    for pair in pairs[1:]:
        size = tensors[f"{pair.consumers[0]}.weight"].shape[1]
        scale = pair.shared(torch.rand(size, generator=torch.Generator().manual_seed(1)) * 5 + 0.1)
        found = layer.with_weights(fold(tensors, pair, scale, torch.float32)).forward(inputs)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), pair.site


def test_the_search_beats_rounding_to_nearest_where_channels_stand_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, texts = with_outliers(tmp_path / "model"), texts_of(samples=12)
    found = quantize(source, tmp_path / "searched", texts)[1:-1]
    for line in found:
        assert max(line["ratios"].values()) > 0
    monkeypatch.setattr(Awq, "_cut_ranges", lambda self, weights, scales: weights)
    scaled = quantize(source, tmp_path / "scaled", texts)[1:-1]
    monkeypatch.setattr(Awq, "run", lambda self: (self.masters[0], {}))
    nearest = quantize(source, tmp_path / "nearest", texts)[1:-1]
    for one, two, three in zip(found, scaled, nearest, strict=True):
        assert one["error"] < two["error"] < 0.8 * three["error"]


def test_ranges_are_cut_where_the_inputs_say_so() -> None:
    """A number that no input meets does not widen the range of its group."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 64, generator=generator)
    weight[:, 5] = 6
    inputs = torch.randn(200, 64, generator=generator)
    inputs[:, 5] *= 0.01
    products = torch.stack([part.T @ part for part in inputs.split(32, dim=1)]) / 200
    cut = cut_ranges(weight, products, 32, torch.float32, is_symmetric=False)
    errors = [float((inputs @ (nearest_int4(it, 32, torch.float32, False) - weight).T).norm()) for it in (cut, weight)]
    assert errors[0] < 0.8 * errors[1]
    assert cut[:, 5].max() < 6


def test_smoothing_makes_activations_easier_to_round(tmp_path: Path) -> None:
    source, texts = with_outliers(tmp_path / "model"), texts_of()
    errors = {}
    for smoothing in (0.5, 0.0):
        lines = quantize(source, tmp_path / str(smoothing), texts, format="int8_sq", smoothing=smoothing)
        errors[smoothing] = lines[1]["error_with_rounded_activations"]
    assert errors[0.5] < 0.8 * errors[0.0]


def test_a_smoothing_scale_is_the_papers() -> None:
    pair = Pair("mlp", "norm", ("a", "b"))
    weights = {"a.weight": torch.tensor([[1.0, -4.0, 0.0]]), "b.weight": torch.tensor([[-2.0, 1.0, 0.0]])}
    scale = smooth(weights, pair, torch.tensor([8.0, 1.0, 3.0]), 0.5)
    assert scale.tolist() == [2.0, 0.5, 1.0]
    rounded = round_int8_tokens(torch.tensor([[127.0, 0.4, 0.6]]))
    assert rounded.tolist() == [[127.0, 0.0, 1.0]]


def test_perplexity_of_the_shipped_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 bits cost at most a twentieth of perplexity, and less than rounding to nearest does."""
    snippets = json.loads((ASSETS / "heldout.json").read_text(encoding="utf-8"))["prompts"]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"text": it["text"]}) + "\n" for it in snippets), encoding="utf-8")
    calibration = tmp_path / "calibration.txt"
    calibration.write_text(Path(json.__file__).read_text(encoding="utf-8"), encoding="utf-8")  # no held-out file
    settings = QuantizingSettings("int4_awq", samples=2, max_length=128, held_out_samples=12)
    target = ASSETS / "target"
    texts = read_texts(calibration, held_out, read_tokenizer(target), settings, 4096)
    assert (len(texts.samples), len(texts.held_out)) == (2, 12)

    def run(name: str) -> dict[str, Any]:
        quantizer = CheckpointQuantizer(target, tmp_path / name, settings, texts, ON_CPU.slots)
        quantizer.begin(is_forced=False)
        return dict(quantizer.run(lambda done, total: None, lambda: False) or {})

    found = run("searched")
    monkeypatch.setattr(Awq, "run", lambda self: (self.masters[0], {}))
    nearest = run("nearest")
    assert found["perplexity_before"] == nearest["perplexity_before"] == pytest.approx(15.23, abs=0.02)
    assert found["perplexity_after"] < nearest["perplexity_after"]
    assert found["perplexity_after"] <= 1.05 * found["perplexity_before"]
    assert found["bytes_after"] < 0.37 * found["bytes_before"]
