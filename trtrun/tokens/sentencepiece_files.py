"""Tokenizers of SentencePiece (`tokenizer.model`) where no tokenizer.json lies beside them: converted by transformers,
as it does itself, and in memory alone.

It knows that library. It does not know texts, and nothing else imports it: transformers takes seconds to load.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import tokenizers

from trtrun.errors import CheckpointError, RustLibrary, one_line

FILE = "tokenizer.model"
_LIBRARIES = ("transformers", "sentencepiece", "google.protobuf")


def read_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model directory, with the special tokens that tokenizer_config.json tells.

    Raises:
        CheckpointError: a library is missing, or the file cannot be converted.
    """
    missing = [name for name in _LIBRARIES if not _is_there(name)]
    if missing:
        raise CheckpointError(
            f"{path} has {FILE} but no tokenizer.json, and reading it needs the extra 'sentencepiece', of which "
            f"{', '.join(missing)} is missing: pip install 'trtrun[sentencepiece]', or scripts/install.sh sentencepiece"
        )
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with RustLibrary("tokenizers"):
            made = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = made.backend_tokenizer
    except Exception as error:  # whatever the libraries raise for a file that is none
        raise CheckpointError(
            f"{path / FILE} is no tokenizer that transformers can convert ({one_line(error)}): copy it again, or save "
            "it once with transformers (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    return backend


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False
