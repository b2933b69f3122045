"""What makes the tokenizers library panic is an error of its request alone, wherever its texts become tokens or its
tokens text. A panic of pyo3 is no `Exception`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fronts import NoEngine, make_frontend
from pipelines import make_llm

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.application.request_parser import RequestParser
from launch.serve.parsing.messages import Facts, Refused, Task
from launch.serve.parsing.parsers import UnencodedRequest
from trtrun import SamplingParams
from trtrun.configuration.model_paths import ASSETS
from trtrun.errors import CheckpointError, ConfigError, LibraryPanicError, RustLibrary, wrap_errors
from trtrun.tokens.corpus import read_corpus
from trtrun.tokens.text import Tokenizer, read_tokenizer

HOSTILE = "a" * 40 + "!"
"""Which the expression below matches in 2 ** 40 ways before it does not."""
REPLACE = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
SAID = "the library tokenizers panicked: Onig: Regex search error: retry-limit-in-match over"


def write_tokenizer(source: Path, folder: Path, **changes: Any) -> Tokenizer:
    """A tokenizer.json with some entries changed."""
    values = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(values | changes), encoding="utf-8")
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """Panics over HOSTILE, as text or as tokens."""
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteLevel"} | dict.fromkeys(_SWITCHES, True), REPLACE]}
    folder = tmp_path_factory.mktemp("panics")
    yield write_tokenizer(ASSETS / "target", folder, normalizer=REPLACE, decoder=decoder)


_SWITCHES = ("add_prefix_space", "trim_offsets", "use_regex")


def test_nothing_but_panics_is_taken_up(tokenizer: Tokenizer) -> None:
    for ends in (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError):
        with pytest.raises(ends), RustLibrary("x"):
            raise ends
    with pytest.raises(LibraryPanicError, match=SAID):
        tokenizer.encode(HOSTILE)
    with pytest.raises(CheckpointError, match=f"a file cannot be used: {SAID}"), wrap_errors("a file", CheckpointError):
        tokenizer.bad_word_ids([HOSTILE])


def test_a_template_without_its_token_panics_over_each_text(tmp_path: Path) -> None:
    pieces = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {}}
    tokenizer = write_tokenizer(ASSETS / "target", tmp_path, post_processor=template)
    with pytest.raises(LibraryPanicError, match="the library tokenizers panicked: no entry found for key"):
        tokenizer.encode("a")
    assert tokenizer.encode("a", add_special_tokens=False)


def test_requests_that_came_with_one_are_let_in(tokenizer: Tokenizer) -> None:
    engine = NoEngine()
    frontend = make_frontend(tokenizer, engine)

    async def begin(prompts: list[str], **others: Any) -> None:
        (await frontend.begin(UnencodedRequest.of(prompts, SamplingParams(**others)), 0.0)).close()

    async def work() -> None:
        with pytest.raises(Refusal, match=f"the prompt cannot be tokenized: {SAID}") as caught:
            await begin([HOSTILE])
        assert caught.value.kind is Kind.INVALID
        together = asyncio.gather(begin([HOSTILE]), begin(["def"]), begin(["x", HOSTILE]), return_exceptions=True)
        first, second, third = await asyncio.wait_for(together, 60)
        assert isinstance(first, Refusal) and second is None and isinstance(third, Refusal)
        with pytest.raises(Refusal, match=f"bad_words cannot be tokenized: {SAID}"):
            await begin(["x"], bad_words=(HOSTILE,))

    asyncio.run(work())
    assert len(engine.requests) == 1 and frontend.admission.num_requests == 0


def test_a_reader_goes_on_behind_one(tokenizer: Tokenizer) -> None:
    facts = Facts(
        tokenizer=None, template="{{ messages[0].content }}", template_tokens={}, model_name="m", vocab_size=4096,
        eos_token_ids=(0,), draft_len=4, excludes_prompt=None, max_batch_size=8,
    )  # fmt: skip
    reader = RequestParser(facts, tokenizer)
    ids = read_tokenizer(ASSETS / "target").encode(HOSTILE)  # type: ignore[union-attr]

    def ask(kind: str, body: dict[str, Any], **others: Any) -> Any:
        raw = json.dumps(body).encode()
        return reader.read(Task(kind=kind, most_tokens=1000, seconds=10.0, json_length=len(raw), **others), raw)[0]

    chat = {"messages": [{"role": "user", "content": HOSTILE}]}
    query = {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": [HOSTILE]}
    length = {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    for refused in (
        ask("completion", {"prompt": HOSTILE}),
        ask("chat", chat),
        ask("message", chat | {"max_tokens": 1}),
        ask("tokenize", {"prompt": HOSTILE}),
        ask("detokenize", {"tokens": ids}),
        ask("infer", {"inputs": [query, length]}, model="preprocessing"),
    ):
        assert isinstance(refused, Refused) and (refused.kind, SAID in refused.reason) == ("INVALID", True)
    assert not isinstance(ask("tokenize", {"prompt": "def"}), Refused)


def test_a_text_that_cannot_be_made_ends_its_row_alone(tmp_path: Path) -> None:
    """The row's tokens are forced to spell what the decoder panics over; another row writes on beside it."""
    path = make_checkpoint(tmp_path / "target", seed=1, tokenizer=True, eos_token_id=0)
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteLevel"} | dict.fromkeys(_SWITCHES, True), REPLACE]}
    plain = read_tokenizer(path)
    assert plain is not None
    (letter,), (mark,), hostile = plain.encode("a"), plain.encode("!"), plain.encode(HOSTILE)
    write_tokenizer(path, path, normalizer=REPLACE, decoder=decoder)
    with make_llm(path) as llm:
        alone, with_stops, beside, refused, untokenized = llm.generate(
            [[letter] * 40, [letter] * 40, "b", hostile, HOSTILE],
            [
                SamplingParams(max_tokens=5, logit_bias={mark: 100.0}),
                SamplingParams(max_tokens=5, logit_bias={mark: 100.0}, stop=("zz",)),
                SamplingParams(max_tokens=30, ignore_eos=True),
                SamplingParams(max_tokens=3),
                SamplingParams(max_tokens=3),
            ],
        )
        assert beside.error is None and len(beside.completions[0].token_ids) == 30
        assert refused.error == f"the prompt's tokens cannot be made text: {SAID}"
        assert untokenized.error == f"the prompt cannot be tokenized: {SAID}"
        assert alone.error == with_stops.error == f"the tokens cannot be made text: {SAID}"
        assert llm.generate("b", SamplingParams(max_tokens=2))[0].error is None


def test_a_file_of_texts_with_one_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text(HOSTILE, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"texts.txt cannot be used: {SAID}"):
        read_corpus(file, tokenizer.path, 4096, 1000)
