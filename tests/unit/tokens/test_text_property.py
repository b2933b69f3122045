"""The text of any completion is what the tokenizer makes of prompt and completion, behind what it makes of the prompt.

Random tokens, special and unknown ones, halves of characters and bytes among them, through five layouts of tokenizers
as they are published, whose vocabularies are trained here, and through decoders put together at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizer_layouts import BYTES, LAYOUTS, SPECIAL, TEXTS, layout
from tokenizers import Regex, decoders, models, pre_tokenizers

from launch.serve.api.openai.answer_parts import TokenTexts
from trtrun.tokens.decoders import chain as chains
from trtrun.tokens.decoders.elements import REPLACEMENT, Step
from trtrun.tokens.detokenizer import AhoCorasick, CompletionText, IncrementalDetokenizer, TokenText
from trtrun.tokens.text import Tokenizer

UNSEEN = ["😀🤖", "አማርኛ", " é", "\ufffd", "𝔘", "ab", "  ", "▁", "##", "it 's", "</w>", "<0x41>"]
"""What they have no tokens for."""


class Cases:
    """Random prompts and outputs of one tokenizer: any tokens, texts, and texts torn anywhere."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self._size = tokenizer.vocab_size + 2  # a model's padding is no token
        names = tokenizer.vocabulary()
        self._bytes = [names[name] for name in BYTES if name in names] or list(range(self._size))

    def tokens(self, longest: int) -> list[int]:
        found: list[int] = []
        while len(found) < longest and self.random.random() < 0.85:
            kind = self.random.randrange(4)
            if kind == 0:
                found += [self.random.randrange(self._size) for _ in range(self.random.randrange(6))]
            elif kind == 1:
                found += [self.random.choice(self._bytes) for _ in range(self.random.randrange(8))]
            else:
                text = "".join(self.random.choices([*UNSEEN, *TEXTS[0].split(" "), TEXTS[1][:9]], k=3))
                torn = self.tokenizer.encode(text, add_special_tokens=self.random.random() < 0.2)
                begin = self.random.randrange(len(torn) + 1) if kind == 2 else 0
                found += torn[begin : begin + self.random.randrange(12)]
        return found[:longest]

    def pieces(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """Tokens as rounds bring them."""
        cuts = sorted(self.random.choices(range(len(tokens) + 1), k=self.random.randrange(6)))
        return [tokens[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def expected_text(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skips: bool = True) -> str:
    """By its definition: behind the prompt's text, or where the two part."""
    of_prompt, of_all = tokenizer.decode(prompt, skips), tokenizer.decode([*prompt, *output], skips)
    if of_all.startswith(of_prompt):
        return of_all[len(of_prompt) :]
    common = takewhile(lambda pair: pair[0] == pair[1], zip(of_prompt, of_all, strict=False))
    return of_all[len(list(common)) :]


def check_case(cases: Cases) -> bool:
    """Whether a random case's text begins where the prompt's ends; all ways of making it are compared."""
    tokenizer, skips = cases.tokenizer, cases.random.random() < 0.7
    prompt, output = cases.tokens(30), cases.tokens(25)
    expected = expected_text(tokenizer, prompt, output, skips)
    first = IncrementalDetokenizer(tokenizer, prompt, skips)
    single, stream, whole, placed = (first.copied() for _ in range(4))
    told = [single.append(token) for token in output]
    assert "".join(told) + single.flush() == expected, (prompt, output, skips)
    shown = ""
    for piece in cases.pieces(output):
        shown += stream.extend(piece)
        assert expected.startswith(shown)
    assert shown + stream.flush() == expected == whole.extend(output) + whole.flush()
    parts = [placed.append_placed(token) for token in output]
    assert [part.text for part in parts] == told and placed.flush() == expected[len("".join(told)) :]
    check_places(cases, parts, output, expected, skips)
    return tokenizer.decode([*prompt, *output], skips).startswith(tokenizer.decode(prompt, skips))


def check_places(cases: Cases, parts: Sequence[TokenText], output: Sequence[int], expected: str, skips: bool) -> None:
    """A token that is whole characters stands where its place says."""
    begins = [part.begin for part in parts]
    assert begins == sorted(begins) and (not begins or begins[-1] <= len(expected))
    own_texts = cases.tokenizer.decoding(skips).own_texts
    for begin, token in zip(begins, output, strict=True):
        if begin and own_texts[token] and REPLACEMENT not in own_texts[token]:
            assert expected[begin:].startswith(own_texts[token])


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_tokens_of_a_layout(name: str) -> None:
    cases = Cases(layout(name), seed=len(name))
    num_behind = sum(check_case(cases) for _ in range(3000))
    assert 2000 < num_behind <= 3000
    assert (num_behind == 3000) == (name in ("WordPiece", "Metaspace"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_stop_strings_end_that_text(name: str) -> None:
    """Strings of the text itself, and others; the first that is whole counts, also where only the end makes it so."""
    cases = Cases(layout(name), seed=7)
    num_stopped = 0
    for _ in range(400):
        prompt, output = cases.tokens(20), cases.tokens(25)
        expected = expected_text(cases.tokenizer, prompt, output)
        begins = [cases.random.randrange(len(expected) + 1) for _ in range(cases.random.randrange(4))]
        stops = [expected[begin : begin + cases.random.randrange(1, 6)] for begin in begins] + ["nowhere", "a\ufffd"]
        ends = [(expected.find(stop) + len(stop), -len(stop)) for stop in stops if stop and stop in expected]
        cut = expected[: sum(min(ends))] if ends else expected
        num_stopped += bool(ends)
        for pieces in ([output], [[token] for token in output], cases.pieces(output)):
            text = CompletionText(IncrementalDetokenizer(cases.tokenizer, prompt), AhoCorasick(stops))
            shown, is_cut = "", False
            for token in (token for piece in pieces for token in piece):
                text.append(token)
                is_cut = text.cut_at_stop()
                shown += text.take() if cases.random.random() < 0.5 else ""
                assert cut.startswith(shown)
                if is_cut:
                    break
            if not is_cut:
                text.end_tokens()
                is_cut = text.cut_at_stop()
            assert shown + text.finish() == cut and is_cut == bool(ends)
    assert num_stopped > 100


@pytest.mark.parametrize("name", LAYOUTS)
def test_token_texts_add_up_in_whole_answers_and_in_streams(name: str) -> None:
    cases = Cases(layout(name), seed=3)
    for _ in range(200):
        prompt, output = cases.tokens(20), cases.tokens(25)
        whole = TokenTexts(cases.tokenizer, [[0], prompt], 2).take(3, output, is_end=True)
        assert "".join([part.text for part in whole]) == (
            expected_text(cases.tokenizer, prompt, output) if output else ""
        )
        pieces = [piece for piece in cases.pieces(output) if piece]
        streamed = TokenTexts(cases.tokenizer, [[0], prompt], 2)
        assert whole == [part for piece in pieces for part in streamed.take(3, piece, is_end=piece is pieces[-1])]


def random_decoder(choices: random.Random) -> Any:
    kinds: list[Callable[[], Any]] = [
        decoders.ByteLevel,
        decoders.ByteFallback,
        decoders.Fuse,
        lambda: decoders.BPEDecoder(suffix=choices.choice(["</w>", "a"])),
        lambda: decoders.WordPiece(prefix="##", cleanup=choices.random() < 0.6),
        lambda: decoders.Metaspace(prepend_scheme=choices.choice(["always", "never", "first"])),
        lambda: decoders.CTC(cleanup=choices.random() < 0.5),
        lambda: decoders.Replace(choices.choice(["▁", "a", "ab", "aab", " ."]), choices.choice([" ", "", "xa"])),
        lambda: decoders.Replace(Regex(choices.choice(["a+", "^ ", "[ab]b?$"])), choices.choice(["", "c"])),
        lambda: decoders.Strip(choices.choice(" a"), choices.randrange(3), 0),
    ]
    made = [choices.choice(kinds)() for _ in range(choices.randint(1, 5))]
    return decoders.Sequence(made) if len(made) > 1 else made[0]


@pytest.mark.parametrize("seed", range(4))
def test_decoders_of_any_kinds_in_any_order(seed: int) -> None:
    choices = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = "a b ▁ ▁a ##a ##b a</w> </w> . n't 's do not ▁▁ | <pad> a|b 日 é e. ▁. x▁y <0x4 0x41> aa ab ba <0x+A> <0xé>"
    bytes_ = [*choices.sample(BYTES, 6), "<0xE6>", "<0x97>", "<0xA5>", "<0x61>", "<0x20>"]
    for _ in range(60):
        spelled = ["".join(choices.choices(alphabet, k=choices.randint(1, 3))) for _ in range(20)]
        words = dict.fromkeys([*names.split(), " ", " a", "", *bytes_, *spelled])
        model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="a")
        backend = tokenizers.Tokenizer(model)
        backend.add_special_tokens(SPECIAL[:2])
        backend.decoder = None if choices.random() < 0.05 else random_decoder(choices)
        cases = Cases(Tokenizer(backend, Path("x")), choices.randrange(1 << 30))
        for _ in range(12):
            prompt, output = cases.tokens(20), cases.tokens(15)
            expected = expected_text(cases.tokenizer, prompt, output)
            first = IncrementalDetokenizer(cases.tokenizer, prompt)
            single, placed = first.copied(), first.copied()
            assert "".join([single.append(token) for token in output]) + single.flush() == expected
            assert first.extend(output) + first.flush() == expected
            parts = [placed.append_placed(token) for token in output]
            assert "".join([part.text for part in parts]) + placed.flush() == expected
            # Characters that bytes make so far are told; CTC leaves one of many where they make none in the end.
            ends = "CTC" in repr(backend.decoder) or max([part.begin for part in parts], default=0) <= len(expected)
            assert ends and all(part.begin >= 0 for part in parts)


# What it takes.


class Work:
    """Counts the strings that go into steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.amount = 0

        def count(kind: type[Step]) -> None:
            feed = kind.feed

            def counted(step: Step, elements: list[str]) -> list[str]:
                self.amount += 1 + len(elements)
                return feed(step, elements)

            monkeypatch.setattr(kind, "feed", counted)

        for kind in Step.__subclasses__():
            count(kind)
        monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("decoded as a whole"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_long_prompt_costs_as_much_as_a_short_one_and_a_token_the_same_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokenizer = layout(name)
    text = tokenizer.encode(" ".join(TEXTS))
    for token in range(tokenizer.vocab_size):  # tables are made once a tokenizer
        IncrementalDetokenizer(tokenizer, [token]).extend([token])
    work = Work(monkeypatch)
    of_prompts, of_outputs = [], []
    for size in (1, 100):
        work.amount = 0
        detokenizer = IncrementalDetokenizer(tokenizer, text * size)
        of_prompts.append(work.amount)
        work.amount = 0
        for token in text * size:
            detokenizer.append(token)
        of_outputs.append(work.amount)
    assert of_prompts[1] <= of_prompts[0] < 120
    assert of_outputs[1] <= 110 * of_outputs[0] + 400 and of_outputs[1] < 12 * 100 * len(text)


@pytest.mark.parametrize("byte", [0x80, 0x41, 0xE6])
def test_bytes_without_an_end_cost_the_same_each(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    tokenizer = layout("byte-fallback")
    token = tokenizer.vocabulary()[f"<0x{byte:02X}>"]
    work = Work(monkeypatch)
    detokenizer = IncrementalDetokenizer(tokenizer, [token] * 5000)
    assert work.amount < 40_000
    for one in (detokenizer.copied().append, detokenizer.copied().append_placed):
        work.amount = 0
        for _ in range(5000):
            one(token)
        assert work.amount < 400_000


def test_a_decoder_that_nobody_knows_is_asked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is shown before, and nothing is wrong."""
    monkeypatch.setattr(chains, "_element_step", lambda *_: None)
    tokenizer = Tokenizer(layout("byte-fallback")._backend, Path("x"))
    cases = Cases(tokenizer, 5)
    for _ in range(100):
        prompt, output = cases.tokens(20), cases.tokens(20)
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        assert not any([detokenizer.append(token) for token in output])
        assert detokenizer.flush() == expected_text(tokenizer, prompt, output)
