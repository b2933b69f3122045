"""Tokenizers in the layouts that are published, with vocabularies that are trained here, in a moment each."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from trtrun.tokens.text import Tokenizer

TEXTS = [
    "def main(argument): return 'a b' # it is  three   spaces, isn't it? They're, we 've , do not ! ?",
    "naïve Übergrößenträger, déjà vu: où ça? Ça va. \n\n\t\tline\r\n",
    "日本語の文章は空白を使わない。東京都 三 二 一",
    "Привет, мир! Как дела? 👍🏽 🦙 👨\u200d👩\u200d👧 ¿qué?",
] * 3
"""What the vocabularies are trained with."""

SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True), AddedToken("<|tool|>", special=False)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's: bytes, and what they were merged to."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's and Mistral 0.1's: words begin with ▁, and characters without a token are bytes."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    letters = sorted({letter for letter in "".join(TEXTS) if ord(letter) < 0x250} | {"日", "本"})
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", *BYTES],
        initial_alphabet=[*letters, "▁"],
        limit_alphabet=len(letters) + 1,
        show_progress=False,
    )
    trained.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    file = json.loads(trained.to_str())
    file["model"]["byte_fallback"] = True
    file["added_tokens"] = []  # bytes are no special tokens there
    backend = tokenizers.Tokenizer.from_str(json.dumps(file))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """As BERT's, which tidies spaces before marks."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    )
    return backend


def unigram(**options: Any) -> tokenizers.Tokenizer:
    """What SentencePiece trains."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(**options)
    backend.decoder = decoders.Metaspace(**options)
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def unigram_of_bytes() -> tokenizers.Tokenizer:
    """Unigram with bytes for what it has no piece of, as Gemma's and Japanese models' tokenizers are."""
    file = json.loads(unigram(prepend_scheme="never").to_str())
    file["model"]["vocab"] += [[name, -20.0] for name in BYTES]
    file["model"]["byte_fallback"] = True
    backend = tokenizers.Tokenizer.from_str(json.dumps(file))
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()]
    )
    return backend


LAYOUTS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "WordPiece": word_piece,
    "Metaspace": unigram,
    "Unigram": unigram_of_bytes,
}


@cache
def layout(name: str) -> Tokenizer:
    """The tokenizer of a layout, with special tokens."""
    backend = LAYOUTS[name]()
    backend.add_special_tokens([token for token in SPECIAL if token.special])
    backend.add_tokens([token for token in SPECIAL if not token.special])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return Tokenizer(backend, Path(name))
