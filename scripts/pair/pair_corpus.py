"""The corpus of the shipped pair: the standard library's source, split, tokenised and cached.

Used by train_pair.py and drafter_material.py. It knows files and tokens and nothing of models.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sysconfig
from pathlib import Path

import numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCABULARY, POSITIONS = 4096, 1024
EXCLUDED_PARTS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
EXCLUDED_PARTS |= {"encodings", "pydoc_data"}


def corpus_files(root: Path) -> tuple[list[str], list[str]]:
    """Split the library's source files, by hash of the relative path, into train and held-out."""
    train: list[str] = []
    heldout: list[str] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_PARTS & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        bucket = int(hashlib.sha256(relative.as_posix().encode()).hexdigest()[:8], 16) % 100
        (heldout if bucket < 5 else train).append(relative.as_posix())
    return train, heldout


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on the training files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save the tokenizer under the class name that every version of transformers knows."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    kept = ("bos_token", "eos_token", "clean_up_tokenization_spaces", "model_max_length")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **{key: settings[key] for key in kept}}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def heldout_prompts(root: Path, files: list[str], seed: int, count: int = 40) -> list[dict[str, str]]:
    """Cut snippets of 100 to 400 characters that start at a definition and end inside code."""
    generator = numpy.random.default_rng(seed)
    per_file: list[list[dict[str, str]]] = []
    for name in files:
        lines = (root / name).read_text(encoding="utf-8", errors="replace").splitlines()
        snippets = []
        for start in [i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "class "))]:
            goal = int(generator.integers(120, 360))
            stop = start + 1
            while stop < len(lines) and len("\n".join(lines[start:stop])) < goal:
                stop += 1
            text = "\n".join(lines[start:stop])
            last = lines[stop - 1].strip()
            inside_code = last and not last.startswith(("#", '"', "'", "class ", "@")) and last[-3:] != '"""'
            closed = text.count('"""') % 2 == 0 and text.count("'''") % 2 == 0
            if closed and inside_code and 100 <= len(text) <= 400 and lines[stop - 1].startswith("    "):
                snippets.append({"source": name, "text": text})
        generator.shuffle(snippets)
        per_file.append(snippets)
    rounds = max(map(len, per_file), default=0)
    spread = [snippets[i] for i in range(rounds) for snippets in per_file if i < len(snippets)]
    return spread[:count]


def prepare_data(work: Path, seed: int) -> None:
    """Split the corpus, train the tokenizer and cache both splits as token arrays."""
    if (work / "heldout.json").exists():
        return
    root = Path(sysconfig.get_paths()["stdlib"])
    train, heldout = corpus_files(root)
    read = functools.partial(Path.read_text, encoding="utf-8", errors="replace")
    tokenizer = train_tokenizer([read(root / name) for name in train])
    save_tokenizer(tokenizer, work / "tokenizer")
    for split, names in (("train", train), ("heldout", heldout)):
        identifiers: list[int] = []
        for name in names:
            identifiers += [tokenizer.eos_token_id, *tokenizer(read(root / name))["input_ids"]]
        numpy.save(work / f"{split}.npy", numpy.array(identifiers, dtype=numpy.uint16))
        print(f"{split}: {len(names)} files, {len(identifiers)} tokens", flush=True)
    record = {"files": heldout, "prompts": heldout_prompts(root, heldout, seed)}
    (work / "heldout.json").write_text(json.dumps(record, indent=1) + "\n")
