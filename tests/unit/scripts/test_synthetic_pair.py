"""scripts/pair/make_synthetic_pair.py: what other programs read is what it says, and the draft is often right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pipelines import make_llm
from transformers import AutoTokenizer, LlamaForCausalLM

from trtrun import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.pair.synthetic_tokenizer import make_tokenizer

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    words = [
        sys.executable,
        SCRIPTS / "pair" / "make_synthetic_pair.py",
        folder,
        "--preset",
        "tiny",
        "--dtype",
        "float32",
    ]
    told = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=120).stdout)
    assert told["parameters"]["target"] > 2 * told["parameters"]["draft"]
    return folder


def test_it_is_decoded_as_transformers_does_and_the_draft_is_often_right(pair: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    prompt = tokenizer("What is decoded here?", add_special_tokens=False)["input_ids"]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :]
    with make_llm(pair / "target", pair / "draft") as llm:  # times do not decide how much it drafts
        (output,) = llm.generate(["What is decoded here?"], SamplingParams(max_tokens=40))
    (completion,) = output.completions
    assert list(completion.token_ids) == expected.tolist()
    assert completion.text == tokenizer.decode(expected)
    assert completion.statistics.mean_acceptance_length > 2


def test_the_draft_has_the_first_layers_of_the_target_and_the_others_are_damped(pair: Path) -> None:
    target, draft = (LlamaForCausalLM.from_pretrained(pair / name, dtype=torch.float32) for name in ("target", "draft"))
    weights = target.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in draft.state_dict().items())
    deviations = [layer.mlp.down_proj.weight.std().item() for layer in target.model.layers]
    assert deviations == pytest.approx([0.08, 0.08, 0.001, 0.001, 0.001, 0.001], rel=0.05)


@pytest.mark.parametrize("vocab_size", [259, 1003, 16384, 32000, 36087])
def test_texts_come_back_and_each_token_has_its_own(vocab_size: int) -> None:
    tokenizer = make_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    for text in ("def f(x):\n    return the whole of it", "ein Märchen, 龍と", "\x00\x7f �"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    whole = [tokenizer.decode([number]) for number in range(259, vocab_size)]
    assert len(set(whole)) == len(whole) and all(whole)
    if vocab_size > 30_000:
        assert tokenizer.encode("in the house").tokens == ["in", "Ġthe", "Ġ", "h", "ou", "se"]


@pytest.mark.parametrize("vocab_size", [3, 258, 493064])
def test_vocabularies_that_it_cannot_have(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"259 to 493063 tokens, not {vocab_size}"):
        make_tokenizer(vocab_size)
