"""Patterns match what Python's regular expressions match, and none takes long."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from adapters import edit_adapter, make_adapter
from checkpoints import make_checkpoint

from trtrun.errors import CheckpointError
from trtrun.lora.lora_config import read_lora_config
from trtrun.lora.lora_files import LoraFiles, adaptable_modules
from trtrun.models.config import read_model_config
from trtrun.module_patterns import Steps, TooManyStepsError, end_matcher, start_matcher, whole_matcher

ENDLESS = r"(\w+\.?)+!"
"""Python's `re` doubles its time with each letter of a name."""
NAMES = [
    *(f"model.layers.{n}.{end}" for n in (0, 1, 12) for end in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")),
    "", "model", "lay ers",
]  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        r".*layers\.\d\.self_attn\.q_proj",
        r"(?:.*?(?:text|layers).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.x)",
        r"^model\.layers\.(?!0\.)\d+\..*",
        r".*(?<=mlp)\.\w+$",
        r"[^.]+(\.[^.]+){4}",
        r"(\w+\.?)+",
        r"(?P<n>m)odel[\w\W]*",
        r".*[a-n\d_-]+_proj",
        r"(a|m|)*odel\B.*\b",
        r"\w\S{4}.{0,30}",
        "",
    ],
)
def test_patterns_match_what_re_matches(pattern: str) -> None:
    matches = whole_matcher(pattern)
    assert [matches(name) for name in NAMES] == [re.fullmatch(pattern, name) is not None for name in NAMES]
    starts = start_matcher(pattern)
    assert [starts(name) for name in NAMES] == [re.match(pattern, name) is not None for name in NAMES]


def make_pattern(chance: random.Random, depth: int) -> str:
    kind = chance.randrange(8) if depth else 0
    if kind < 3:
        return chance.choice(["a", "b", ".", "[ab]", r"\w", "[^a]"])
    inner = make_pattern(chance, depth - 1)
    if kind == 3:
        return f"(?:{inner}|{make_pattern(chance, depth - 1)})"
    if kind == 4:
        return f"(?:{inner}){chance.choice(['*', '+', '?', '{2}', '{1,3}', '*?'])}"
    if kind == 5:
        return f"{chance.choice(['(?=', '(?!'])}{inner})"
    return inner + make_pattern(chance, depth - 1)


def test_any_patterns_match_what_re_matches() -> None:
    chance = random.Random(3)
    for _ in range(800):
        pattern = make_pattern(chance, 4)
        matches = whole_matcher(pattern)
        for name in ("".join(chance.choices("ab.", k=length)) for length in range(6)):
            assert matches(name) == (re.fullmatch(pattern, name) is not None), (pattern, name)


def test_patterns_of_ends_are_whole_parts() -> None:
    name = "model.layers.1.mlp.up_proj"
    ends = (
        "up_proj",
        r"mlp\.up_proj",
        "mlp.up.proj$",
        "mlp.(up|down)_proj",
        "^model",
        "^model.layers.1.mlp",
        name,
        "^.*layers.1",
    )
    assert all(end_matcher(pattern)(name) for pattern in ends)
    assert not any(
        end_matcher(pattern)(name)
        for pattern in ("p_proj", "p.*_proj", "^layers", "mlp", "^.*layers.0", "^model$", r"up\.proj")
    )


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"(a)\1", "groupref is not supported"),
        ("(?i)x", "flags are not supported"),
        ("(?i:x)y", "flags are not supported"),
        ("a*+", "possessive_repeat is not supported"),
        ("(", "missing )"),
        (f"{'(' * 2000}{')' * 2000}", "nested too deeply"),
        ("a{99999999999999}", "repetition number is too large"),
    ],
)
def test_what_patterns_may_not_be(pattern: str, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        whole_matcher(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        ENDLESS, "(.|.)+!", "((.?){99}){99}!", r"((\w|\.){2,}){2,}!", "(.*)*" * 9 + "!",
        "(?=.*" * 12 + "zz" + ")" * 12 + ".*", "(?!.*" * 12 + "zz" + ")" * 12 + ".*zz", "(?:(?=.*x)(?!.*y)[^x])*",
    ],
)  # fmt: skip
def test_no_pattern_goes_back(pattern: str) -> None:
    """Each look-ahead is found once for all places of a name, whatever stands within it."""
    steps = Steps()
    assert not whole_matcher(pattern, steps)("model.layers.0.self_attn.q_proj")
    assert steps.most - steps.left < 4000


def test_patterns_that_take_too_many_steps_are_refused_together() -> None:
    nested = f"{'(?:' * 40}.{'{1,2})' * 40}!"
    with pytest.raises(TooManyStepsError, match="takes more than 5000 steps to match"):
        whole_matcher(nested, Steps(5000))(NAMES[0])
    steps = Steps(5000)
    matchers = [whole_matcher(".*a.*b.*x", steps), end_matcher("q_proj", steps)]
    with pytest.raises(TooManyStepsError):
        for number in range(5000):
            assert not any(matches(f"layers.{number}") for matches in matchers)
    assert number > 100


def test_hostile_patterns_of_adapters_are_answered(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", num_hidden_layers=1)
    path, model = make_adapter(tmp_path / "a", target, modules=["q_proj"]), read_model_config(target)
    with pytest.raises(CheckpointError, match="which target_modules does not name"):
        LoraFiles(edit_adapter(path, target_modules=ENDLESS), model, 16)
    edit_adapter(path, target_modules="(.|.)+q_proj", exclude_modules=ENDLESS, rank_pattern={ENDLESS: 9})
    assert list(LoraFiles(path, model, 16).modules) == ["model.layers.0.self_attn.q_proj"]
    usual = {"exclude_modules": None, "alpha_pattern": None, "rank_pattern": None, "target_modules": ["x"]}
    for key, value, line in (
        ("target_modules", f"{'(?:' * 40}.{'{1,2})' * 40}!", "target_modules: .* takes more than 1048576 steps"),
        ("alpha_pattern", {".*" * 4097: 1}, "alpha_pattern has regular expressions of 8194 characters"),
        ("target_modules", ".*" * 4097, "target_modules has regular expressions of 8194 characters"),
        ("rank_pattern", {f"x{n}": 1 for n in range(16385)}, "rank_pattern names 16385 modules; more than 16384"),
        ("exclude_modules", ["x"] * 16385, "exclude_modules names 16385 modules; more than 16384"),
    ):
        with pytest.raises(CheckpointError, match=line):
            LoraFiles(edit_adapter(path, **{**usual, key: value}), model, 16)


def test_a_pattern_for_each_module_takes_a_part_of_the_steps(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", num_hidden_layers=75)
    modules = adaptable_modules(read_model_config(target))
    path = make_adapter(tmp_path / "a", target, rank_pattern=dict.fromkeys(modules, 4), rank=9)
    config = read_lora_config(path)
    assert len(modules) == 525 and {config.rank_of(module) for module in modules} == {4}
