"""Adapters in one process: texts are those of the checkpoints that they are merged into, in any company."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import edit_adapter, make_adapter, merge_adapter, rank_stabilized
from branching import branching_method
from checkpoints import ARCHITECTURES, make_checkpoint, make_draft
from native import PATHS, compute_as, leave_to_torch
from permuted import permuted_copy
from pipelines import Reference, make_llm, prompt_of, run_alone, tokens_of

from launch.jobs.placement.memory import JobMemory
from trtrun import LLM, SamplingParams
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.outputs import RequestOutput
from trtrun.errors import CheckpointError, ConfigError, InvalidRequestError
from trtrun.kernels.cpu import machine
from trtrun.start.job_spec import JobSpec

COUNT = 24
NAMES = (None, "all", "some", "one")
SPACE = {"max_rank": 8}
TIGHT: dict[str, Any] = {
    "scheduler": {"max_batch_size": 4, "max_num_tokens": 48},
    "kv_cache": {"max_tokens": 112},
}
"""Prompts in chunks, few blocks: rows are preempted."""
TREES: dict[str, Any] = {"scheduler": {"max_batch_size": 4, "max_num_tokens": 128}}


def make_adapters(folder: Path, target: Path) -> dict[str, str]:
    """Three, which differ in ranks, modules and scales."""
    found = {
        "all": make_adapter(folder / "all", target, rank=4, alpha=8, seed=1),
        "some": make_adapter(
            folder / "some", target, rank=3, alpha=6, seed=2, modules=["q_proj", "v_proj", "down_proj"], use_rslora=True
        ),
        "one": make_adapter(folder / "one", target, rank=8, alpha=32, seed=3, modules=["gate_proj"], layers=[1]),
    }  # fmt: skip
    return {name: str(path) for name, path in found.items()}


def merge_all(folder: Path, target: Path) -> dict[str | None, Path]:
    """The checkpoints of each name."""
    scales = {"all": 2.0, "some": rank_stabilized(3, 6), "one": 4.0}
    merged = {name: merge_adapter(folder / f"{name} merged", target, folder / name, by) for name, by in scales.items()}
    return {None: target, **merged}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in float32 and in bfloat16, a draft of its first layer, and adapters of it."""
    path = tmp_path_factory.mktemp("adapters")
    target = make_checkpoint(path / "target")
    make_checkpoint(path / "half", dtype=torch.bfloat16)
    for name in ("target", "half"):
        make_draft(path / f"{name} draft", path / name, 1)
    make_adapters(path, target)
    return path


def adapters_of(folder: Path) -> dict[str, Any]:
    return {"adapters": {name: str(folder / name) for name in ("all", "some", "one")}, "adapter_slots": SPACE}


KINDS: Sequence[dict[str, Any]] = (
    {"logprobs": 1},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"repetition_penalty": 1.2},
    {},
)


def rows(kinds: Sequence[dict[str, Any]] = ({},)) -> tuple[list[list[int]], list[SamplingParams]]:
    """Two prompts, of which one fills blocks, with every adapter each; they and the kinds of sampling take turns."""
    prompts, sampling = [], []
    for prompt in (prompt_of(37, seed=7), prompt_of(5, seed=8)):
        for name in NAMES:
            kind = kinds[len(prompts) % len(kinds)]
            sampling.append(
                SamplingParams(max_tokens=COUNT, seed=len(prompts), lora_name=name, ignore_eos=True, **kind)
            )
            prompts.append(prompt)
    return prompts, sampling


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_are_those_of_merged_checkpoints(tmp_path: Path, architecture: str) -> None:
    """By transformers, in float32; in one batch, and again where blocks are in use twice."""
    target = make_checkpoint(tmp_path / "target", architecture)
    adapters = make_adapters(tmp_path, target)
    merged = merge_all(tmp_path, target)
    prompts, sampling = rows()
    references = {name: Reference(path) for name, path in merged.items()}
    expected = [
        [references[one.lora_name].greedy(prompt, COUNT)] for prompt, one in zip(prompts, sampling, strict=True)
    ]
    assert len({text for texts in expected for text in texts}) == len(prompts), "each adapter writes another text"
    with make_llm(target, adapters=adapters, adapter_slots=SPACE) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == expected
        outputs = llm.generate(prompts, sampling)
        assert tokens_of(outputs) == expected
        cached = [output.completions[0].statistics.num_cached_prompt_tokens for output in outputs]
        assert cached[:4] == [32] * 4 and not any(cached[4:])
        llm.check_idle()


@pytest.fixture(params=[*(pytest.param(kind, marks=needed) for kind, needed in PATHS.items()), "torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        leave_to_torch(monkeypatch)
    else:
        compute_as(request.param, monkeypatch)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", ["half", "target"])
def test_texts_do_not_depend_on_company(folder: Path, dtype: str) -> None:
    """To the bit of log probabilities, in bfloat16 and in float32: alone, in one batch of all adapters, in chunks,
    preempted."""
    if dtype == "target" and machine.processor_kind() is None:
        pytest.skip("float32 is exact by trtrun's own kernels")
    prompts, sampling = rows([{"temperature": 0.8, "logprobs": 2}])
    with make_llm(folder / dtype, **adapters_of(folder)) as llm:
        alone = [llm.generate([prompt], one)[0].completions[0] for prompt, one in zip(prompts, sampling, strict=True)]
        together = [output.completions[0] for output in llm.generate(prompts, sampling)]
    with make_llm(folder / dtype, **adapters_of(folder), **TIGHT) as llm:
        outputs = llm.generate(prompts, sampling)
        assert sum(output.completions[0].statistics.num_preemptions for output in outputs) > 0
    tight = [output.completions[0] for output in outputs]
    told = [[(one.token_ids, one.logprobs) for one in found] for found in (alone, together, tight)]
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("dtype", ["target", "half"])
@pytest.mark.parametrize("method", ["draft_target", "token_recycling"])
def test_speculative_texts_are_plain_ones(folder: Path, dtype: str, method: str) -> None:
    """Greedily and by seed, with adapters or none, preempted: drafts are the base model's, in chains, or in trees what
    the target's logits taught."""
    draft = folder / f"{dtype} draft" if method == "draft_target" else None
    prompts, sampling = rows(KINDS)
    with make_llm(folder / dtype, **adapters_of(folder)) as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
    speculation = {"draft_len": 3, "method": method}
    with make_llm(folder / dtype, draft, speculation=speculation, **adapters_of(folder), **TIGHT) as llm:
        for _ in range(2):  # blocks of the first time are in use again
            assert tokens_of(llm.generate(prompts, sampling)) == expected
        statistics = llm.statistics()
        assert 0 < statistics["num_accepted_draft_tokens"] < statistics["num_draft_tokens"]
        llm.check_idle()


def test_a_draft_may_have_adapters_of_its_own(folder: Path, tmp_path: Path) -> None:
    """It then drafts what rows with the target's say; texts are the same."""
    target = folder / "target"
    prompts, sampling = rows()
    settings: dict[str, Any] = {"speculation": {"draft_len": 3}, **adapters_of(folder)}

    def accepted(outputs: Sequence[RequestOutput]) -> list[int]:
        return [output.completions[0].statistics.num_accepted_draft_tokens for output in outputs]

    with make_llm(target, target, **settings) as llm:
        without = llm.generate(prompts, sampling)
    drafts = {"all": str(make_adapter(tmp_path / "draft", target, rank=4, alpha=8, seed=1))}
    with make_llm(target, target, draft_adapters=drafts, **settings) as llm:
        outputs = llm.generate(prompts, sampling)
        assert tokens_of(outputs) == tokens_of(without)
        for place, (before, now) in enumerate(zip(accepted(without), accepted(outputs), strict=True)):
            # The draft is the target, whose base drafts for itself.
            assert now == (accepted(without)[0] if sampling[place].lora_name == "all" else before)
        assert accepted(outputs)[1] > accepted(without)[1]
        llm.drop_adapter("all")
        llm.load_adapter("all", folder / "some")
        assert text_with(llm, prompts[0], "all") == tokens_of(outputs)[NAMES.index("some")][0]


def test_a_draft_with_other_token_ids_has_them_too(folder: Path, tmp_path: Path) -> None:
    """Shuffled ids change nothing, neither of rows with an adapter nor of those without, in blocks of each other."""
    target = make_checkpoint(tmp_path / "target", tokenizer=True)
    permuted_copy(tmp_path / "permuted", target)
    adapters = {name: str(make_adapter(tmp_path / name, target, rank=4, seed=len(name))) for name in ("a", "bb")}
    drafts = {"a": str(make_adapter(tmp_path / "draft", target, rank=4, seed=1))}
    prompts = [prompt_of(length, seed=length) for length in (40, 40, 9, 70, 40, 23)]
    names = (None, "a", "bb", "a", None, "bb")
    sampling = [SamplingParams(max_tokens=COUNT, lora_name=name) for name in names]
    settings: dict[str, Any] = {
        "speculation": {"draft_len": 3},
        "adapters": adapters,
        "adapter_slots": SPACE,
        "draft_adapters": drafts,
        **TIGHT,
    }

    def run(draft: Path) -> list[Any]:
        with make_llm(target, draft, **settings) as llm:
            outputs = [output for _ in range(2) for output in llm.generate(prompts, sampling)]
            counts = [output.completions[0].statistics.num_accepted_draft_tokens for output in outputs]
            return [tokens_of(outputs), counts]

    assert run(tmp_path / "permuted") == run(target)


@pytest.mark.parametrize(
    ("speculation", "heads"), [({"method": "eagle3", "draft_len": 4}, "eagle3"), ({"method": "lookahead"}, None)]
)
def test_texts_are_plain_ones_by_other_methods(tmp_path: Path, speculation: dict[str, Any], heads: str | None) -> None:
    """Heads that read the target's hidden states, the last ones of all tokens; and what is learned from logits."""
    target = ASSETS / "target"
    adapters = {name: str(make_adapter(tmp_path / name, target, seed=len(name), strength=0.1)) for name in ("a", "bb")}
    settings: dict[str, Any] = {"adapters": adapters, "adapter_slots": {"max_rank": 4}}
    prompts, names = ["def main(", "import os\n", "x"], (None, "a", "bb")
    sampling = [
        SamplingParams(max_tokens=32, seed=3, temperature=0.5 * len(name or ""), lora_name=name) for name in names
    ]
    with make_llm(target, **settings) as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
    with make_llm(target, heads=ASSETS / heads if heads else None, speculation=speculation, **settings) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 10


@pytest.mark.parametrize("dtype", ["target", "half"])
def test_paths_of_draft_trees_have_the_row_s_adapter(folder: Path, dtype: str) -> None:
    """Also those that begin in the row's first block, and so have another one in its place."""
    prompts, sampling = rows(KINDS)
    with make_llm(folder / dtype, **adapters_of(folder)) as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
    speculation = {"method": "branching", "draft_len": 4}
    with branching_method() as branching:
        branching.texts = [[*prompt, *text] for prompt, (text,) in zip(prompts, expected, strict=True)]
        with make_llm(folder / dtype, speculation=speculation, **adapters_of(folder), **TREES) as llm:
            assert tokens_of(llm.generate(prompts, sampling)) == expected
            statistics = llm.statistics()
            # Right tokens are accepted, which they are not where another adapter computes them.
            assert statistics["num_accepted_draft_tokens"] > 100
            llm.check_idle()


def test_rows_without_an_adapter_have_the_bits_of_a_run_without_adapters(folder: Path) -> None:
    prompts, sampling = rows([{"logprobs": 1}])
    chosen = [place for place, one in enumerate(sampling) if one.lora_name is None]
    with make_llm(folder / "half") as llm:
        expected = llm.generate([prompts[place] for place in chosen], [sampling[place] for place in chosen])
    with make_llm(folder / "half", **adapters_of(folder)) as llm:
        found = llm.generate(prompts, sampling)
    for place, output in zip(chosen, expected, strict=True):
        assert found[place].completions[0].logprobs == output.completions[0].logprobs


def test_keys_and_values_are_shared_within_an_adapter_alone(folder: Path) -> None:
    prompt = prompt_of(40, seed=3)
    with make_llm(folder / "target", **adapters_of(folder)) as llm:

        def reused(name: str | None) -> int:
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=2, lora_name=name))
            return output.completions[0].statistics.num_cached_prompt_tokens

        assert [reused(name) for name in (*NAMES, *NAMES)] == [0] * 4 + [32] * 4


@pytest.mark.parametrize("quantization", ["fp8", "fp8_weight_only"])
def test_beside_a_base_of_8_bits_rows_keep_their_bits(folder: Path, quantization: str) -> None:
    """The adapter's part is that of the plain base, as far as bfloat16 tells it."""
    settings = {"target_quantization": quantization, **adapters_of(folder)}
    prompts, sampling = rows(KINDS)
    with make_llm(folder / "half", **settings) as llm:
        together = llm.generate(prompts, sampling)
        texts = tokens_of(together)
        assert run_alone(llm, prompts, sampling) == texts
        assert len({text for (text,) in texts}) == len(prompts)
    with make_llm(folder / "half", folder / "half draft", speculation={"draft_len": 3}, **settings, **TIGHT) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == texts


def test_requests_for_adapters_that_there_are_not(folder: Path) -> None:
    with make_llm(folder / "target", **adapters_of(folder)) as llm:
        refused = llm.generate([[1, 2]], SamplingParams(lora_name="sme"))[0]
        assert refused.error == "lora_name: there is no adapter \"sme\" (did you mean 'some'?)"
        llm.check_idle()
    with LLM(folder / "target", adapters={"all": folder / "all"}, device="cpu:0") as llm:
        assert llm.generate([[1, 2]], SamplingParams(lora_name="all"))[0].error is None
    with make_llm(folder / "target") as llm:
        refused = llm.generate([[1, 2]], SamplingParams(lora_name="all"))[0]
        assert refused.error == 'lora_name: no adapters are loaded here, and so not "all": leave it out'
    with pytest.raises(InvalidRequestError, match="lora_name must be a name, not 3"):
        SamplingParams(lora_name=3)  # type: ignore[arg-type]


def test_adapters_that_do_not_fit_end_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_slots\.max_loaded: is 1, but adapters names 3"):
        make_llm(folder / "target", **{**adapters_of(folder), "adapter_slots": {"max_loaded": 1}})
    with pytest.raises(ConfigError, match="draft_adapters: 'al' is none of adapters \\(did you mean 'all'"):
        make_llm(
            folder / "target", folder / "target", **adapters_of(folder), draft_adapters={"al": str(folder / "all")}
        )
    with pytest.raises(ConfigError, match=r"adapters\.x: no such directory"):
        make_llm(folder / "target", adapters={"x": str(tmp_path / "x")})
    with pytest.raises(ConfigError, match="LLM: adapters: must be a section of names, each with its value, not a list"):
        LLM(folder / "target", adapters=["x"])  # type: ignore[arg-type]

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        next(iter(tensors.values()))[0, 0] = torch.nan

    bad = edit_adapter(make_adapter(tmp_path / "bad", folder / "target"), damage)
    with pytest.raises(CheckpointError, match=r"adapters\.bad: .* holds NaN or infinite values in float32"):
        make_llm(folder / "target", adapters={"bad": str(bad)})


def test_adapters_come_and_go_while_requests_run(folder: Path) -> None:
    """A name that is dropped is refused, and its requests go on to their end; who has its slot later is another."""
    prompt, names = prompt_of(40, seed=3), ("all", "some")
    with make_llm(folder / "target", **adapters_of(folder)) as llm:
        expected = {name: text_with(llm, prompt, name) for name in (None, *names)}
    with make_llm(folder / "target", adapter_slots={"max_loaded": 2, "max_rank": 8}) as llm:
        llm.load_adapter("x", folder / "all")
        going_on = [llm.stream(prompt, SamplingParams(max_tokens=COUNT, lora_name="x", ignore_eos=True)) for _ in "ab"]
        begun = [list(next(stream).token_ids) for stream in going_on]
        llm.drop_adapter("x")
        llm.load_adapter("x", folder / "some")  # the other slot
        with pytest.raises(InvalidRequestError, match=r"no slot is free: adapter_slots\.max_loaded is 2"):
            llm.load_adapter("y", folder / "one")
        assert text_with(llm, prompt, "x") == expected["some"], "blocks are not those of the first x"
        for stream, first in zip(going_on, begun, strict=True):
            assert tuple(first + [token for delta in stream for token in delta.token_ids]) == expected["all"]
        with pytest.raises(InvalidRequestError, match='lora_name "x" is loaded: drop it first'):
            llm.load_adapter("x", folder / "one")
        llm.load_adapter("y", folder / "all")
        assert text_with(llm, prompt, "y") == expected["all"] and text_with(llm, prompt, None) == expected[None]
        llm.drop_adapter("y")
        with pytest.raises(InvalidRequestError, match='lora_name: there is no adapter "y"'):
            llm.drop_adapter("y")
        assert llm.generate([prompt], SamplingParams(lora_name="y"))[0].error is not None
        llm.check_idle()


def test_what_cannot_be_loaded_changes_nothing(folder: Path, tmp_path: Path) -> None:
    prompt = prompt_of(20, seed=4)
    with make_llm(folder / "target", adapter_slots={"max_loaded": 1, "max_rank": 4}) as llm:
        expected = text_with(llm, prompt, None)
        with pytest.raises(CheckpointError, match=r"has rank 8, more than adapter_slots\.max_rank, which is 4"):
            llm.load_adapter("x", folder / "one")
        with pytest.raises(CheckpointError, match="does not exist"):
            llm.load_adapter("x", tmp_path / "nowhere")
        assert text_with(llm, prompt, None) == expected
        llm.load_adapter("x", folder / "all")
        assert text_with(llm, prompt, "x") != expected
    with make_llm(folder / "target") as llm, pytest.raises(InvalidRequestError, match="no slot is free"):
        llm.load_adapter("x", folder / "all")


def text_with(llm: LLM, prompt: list[int], name: str | None) -> tuple[int, ...]:
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=COUNT, lora_name=name, ignore_eos=True))
    return output.completions[0].token_ids


def used(llm: LLM) -> int:
    return sum(rank.shard_bytes for rank in llm.report.ranks)


def test_slots_count_as_weights(folder: Path) -> None:
    """At the start, and where it is planned."""
    with make_llm(folder / "target") as llm:
        without = used(llm)
    with make_llm(folder / "target", adapters={}, adapter_slots={"max_loaded": 3, "max_rank": 16}) as llm:
        # Of each layer: q, k, v; o; gate, up; down.
        inputs, outputs = 3 * 64 + 64 + 2 * 64 + 112, (64 + 32 + 32) + 64 + 2 * 112 + 64
        assert used(llm) - without == 2 * 3 * 16 * (inputs + outputs) * 4
        assert used(llm) == sum(JobMemory.read(JobSpec(llm.config)).shard_bytes(0))
