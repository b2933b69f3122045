"""What cannot be loaded takes no slot, and changes nothing that others see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from checkpoints import make_checkpoint
from pipelines import make_llm, prompt_of

from trtrun import LLM, SamplingParams
from trtrun.errors import CheckpointError, InvalidRequestError
from trtrun.linear.layer import AdaptedLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and an adapter of it."""
    path = tmp_path_factory.mktemp("slots")
    target = make_checkpoint(path / "target")
    return target, make_adapter(path / "a", target, rank=4, seed=1)


def text_with(llm: LLM, prompt: list[int], name: str | None) -> tuple[int, ...]:
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=24, lora_name=name, ignore_eos=True))
    return output.completions[0].token_ids


@pytest.mark.parametrize("name", ["", None, 3, "a\nb", " x "])
def test_what_is_no_name_takes_no_slot(folder: tuple[Path, Path], name: Any) -> None:
    target, path = folder
    with make_llm(target, adapter_slots={"max_loaded": 1, "max_rank": 4}) as llm:
        with pytest.raises(InvalidRequestError, match="lora_name must be a name of one line, not"):
            llm.load_adapter(name, path)
        llm.load_adapter("x/y.z", path)
        assert text_with(llm, [1, 2], "x/y.z")


def test_a_slot_that_cannot_be_filled_is_free(folder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory for it: the process goes on, and so do rows."""
    target, path = folder
    prompt, prepare = prompt_of(20, seed=4), AdaptedLinear.prepare
    with make_llm(target, adapter_slots={"max_loaded": 1, "max_rank": 8}) as llm:
        expected = text_with(llm, prompt, None)
        llm.load_adapter("x", path)
        adapted = text_with(llm, prompt, "x")
        llm.drop_adapter("x")
        made: list[Any] = []

        def fail(*_: Any) -> None:
            raise RuntimeError("can't allocate memory")

        def prepare_four(layer: AdaptedLinear, factors: Any) -> Any:
            if len(made) > 3:
                fail()
            made.append(prepare(layer, factors))
            return made[-1]

        ways = {"cannot be used: RuntimeError": prepare_four, "could not be put into its slot": lambda *_: fail}
        for line, way in ways.items():
            with monkeypatch.context() as patched:
                patched.setattr(AdaptedLinear, "prepare", way)
                with pytest.raises(CheckpointError, match=f"a {line}: can't allocate memory"):
                    llm.load_adapter("y", path)
        assert text_with(llm, prompt, None) == expected
        llm.load_adapter("x", path)
        assert text_with(llm, prompt, "x") == adapted != expected
