"""Files with Medusa's heads: what each layout proposes is what the paper says, and what fits no target is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from medusa_heads import LAYOUTS, SHARED, Heads, Proposals, make_heads, medusa, write_heads
from pipelines import make_llm, prompt_of
from safetensors.torch import load_file, save_file

from trtrun import SamplingParams
from trtrun.configuration.drafting.draft_trees import ChoiceTree, read_choices

TREE = [[0], [1], [0, 0], [2], [2, 0], [0, 1], [2, 0, 1], [0, 0, 0]]
PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33, 8)]
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 200}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("medusa") / "target", seed=1)


@pytest.mark.parametrize(
    ("layout", "num_blocks", "biases", "choices"),
    [
        *((layout, 1, True, None) for layout in LAYOUTS),
        ("fasterdecoding", 3, True, TREE),
        ("vllm", 2, False, TREE),
        ("version 2", 2, True, None),
        ("modelopt", 0, True, None),
        ("fasterdecoding", 1, False, "mc_sim_7b_63"),
    ],
)
def test_drafts_are_the_papers_token_for_token(
    tmp_path: Path,
    target: Path,
    layout: str,
    num_blocks: int,
    biases: bool,
    choices: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy rows, and sampled ones with the target's random numbers; config.json lies about the heads."""
    own = make_heads(target, 4, num_blocks, biases=biases, shared=layout in SHARED)
    lies = {"medusa_num_heads": 2, "medusa_num_layers": 9, "num_heads": 1, "hidden_size": 5}
    path = write_heads(tmp_path / "heads", own, layout, target, **lies)
    seen = Proposals(monkeypatch)
    speculation = medusa() if choices is None else medusa(medusa_choices=choices)
    sampling = [SamplingParams(max_tokens=10, seed=index, temperature=1.1 * (index % 2)) for index in range(4)]
    with make_llm(target, heads=path, speculation=speculation, scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS, sampling)
    tree = ChoiceTree.chain(4) if choices is None else ChoiceTree.of(read_choices(choices))
    assert seen.check(target, own, tree) > 20


def test_a_truncated_vocabulary_proposes_the_targets_ids(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sampled rows, too, with the random numbers of the target's ids."""
    whole = make_heads(target)
    token_map = torch.randperm(199, generator=torch.Generator().manual_seed(2))[:60]
    own = Heads(whole.blocks, [matrix[:60] for matrix in whole.matrices], token_map)
    path = write_heads(tmp_path / "heads", own, "vllm")
    seen = Proposals(monkeypatch)
    sampling = [SamplingParams(max_tokens=10, seed=index, temperature=1.1 * (index % 2)) for index in range(4)]
    with make_llm(target, heads=path, speculation=medusa(medusa_choices=TREE), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS, sampling)
    assert seen.check(target, own, ChoiceTree.of(read_choices(TREE))) > 20
    proposed = {token for *_, tokens, draft_len in seen.seen if draft_len > 0 for token in tokens}
    assert proposed <= set(token_map.tolist()) and max(proposed) > 60


def test_vllms_one_matrix_for_all_is_the_targets(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_heads(target, shared=True)
    path = write_heads(tmp_path / "heads", own, "vllm", original_lm_head=True)
    tensors = load_file(path / "model.safetensors")
    without(*(f"lm_heads.{head}.weight" for head in range(1, 4)))(tensors)
    save_file(tensors, path / "model.safetensors")
    seen = Proposals(monkeypatch)
    with make_llm(target, heads=path, speculation=medusa(), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=6))
    assert seen.check(target, own, ChoiceTree.chain(4)) > 4


Change = Callable[[dict[str, torch.Tensor]], Any]


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("2.1.weight"), "has 4 Medusa heads, but head 2 lacks the matrix: the files are incomplete"),
        (without("3.1.weight"), "has 4 Medusa heads, but head 3 lacks the matrix"),
        (without("1.0.linear.weight", "1.0.linear.bias"), r"1\.1\.weight stands behind 1 blocks, but head 1 has 0"),
        (without("1.0.linear.weight", "1.1.weight"), r"1\.0\.linear\.bias is there, but no weight beside it"),
        (without("1.0.linear.bias"), "has biases of block 0 for some of its 4 Medusa heads alone"),
        (without("2.1.weight", "2.0.linear.weight", "2.0.linear.bias"), "has 4 Medusa heads, but head 2 lacks block 0"),
        (
            lambda found: found.update({"1.0.linear.weight": torch.zeros(64, 32)}),
            r"'1\.0\.linear\.weight' has shape \[64, 32\], not \[64, 64\]: the target's hidden size is 64",
        ),
        (
            lambda found: found.update({"3.1.weight": torch.zeros(200, 64)}),
            r"'3\.1\.weight' has shape \[200, 64\], not \[199, 64\]: it is for 199 tokens of the target's 199",
        ),
        (
            lambda found: found.update({"0.0.linear.weight_scale": torch.ones(1)}),
            "'0.0.linear.weight_scale' is none that Medusa heads have",
        ),
        (
            lambda found: found.update({"0.0.linear.weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn)}),
            "has dtype F8_E4M3, which is not supported",
        ),
        (lambda found: found.update({"99.0.linear.weight": torch.zeros(64, 64)}), "at most 64 heads and blocks"),
        (lambda found: found.update({"token_map": torch.arange(7)}), "it is for 7 tokens of token_map"),
        (lambda found: found.update({"token_map": torch.zeros(199)}), "must hold whole numbers"),
        (lambda found: found.update({"token_map": torch.arange(199) + 1}), "ids from 1 to 199, but the target has 199"),
        (lambda found: found.update({"token_map": torch.arange(199).clamp(max=9)}), "holds an id twice"),
        (lambda found: found.update({"2.1.weight": torch.full((199, 64), torch.nan)}), "NaN or infinite"),
        (lambda found: [found.clear(), found.update({"model.norm.weight": torch.ones(64)})], "has no Medusa heads"),
    ],
)
def test_files_that_are_no_heads_for_the_target_are_refused(
    tmp_path: Path, target: Path, change: Change, message: str
) -> None:
    path = write_heads(tmp_path / "heads", make_heads(target))
    file = path / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(Exception, match=message) as caught:
        make_llm(target, heads=path, speculation=medusa())
    assert "\n" not in str(caught.value) and "heads" in str(caught.value)


def test_pickles_are_refused_and_so_are_more_tokens_than_heads(tmp_path: Path, target: Path) -> None:
    path = write_heads(tmp_path / "heads", make_heads(target, 3))
    with pytest.raises(
        Exception, match=r"has 3 Medusa heads, and each drafts one token: set speculation\.draft_len to 3"
    ):
        make_llm(target, heads=path, speculation=medusa())
    with make_llm(target, heads=path, speculation=medusa(medusa_choices="mc_sim_7b_63", draft_len=3)) as llm:
        assert llm.config.draft_nodes == (0, 10, 38, 61)
    (path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(Exception, match=r"has no weights: neither medusa_lm_head.safetensors, model.safetensors nor"):
        make_llm(target, heads=path, speculation=medusa())
    (path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(Exception, match=r"only as pickle \(medusa_lm_head\.pt\).*save the heads as safetensors"):
        make_llm(target, heads=path, speculation=medusa())


def test_heads_are_counted_with_the_targets_weights(tmp_path: Path, target: Path) -> None:
    folder = write_heads(tmp_path / "heads", make_heads(target))
    with make_llm(target) as llm:
        before = llm.report.ranks[0]
    with make_llm(target, heads=folder, speculation=medusa(draft_len=2)) as llm:
        after = llm.report.ranks[0]
    numbers = 2 * (64 * 64 + 64 + 199 * 64)
    assert after.shard_bytes - before.shard_bytes == after.bytes_read - before.bytes_read == 4 * numbers
    assert before.files_hash != after.files_hash
