"""The shipped target's tokens, and grammars over them."""

from __future__ import annotations

import pytest
from guided_rows import EOS, VOCABULARY

from trtrun.configuration.model_paths import ASSETS
from trtrun.guiding.grammars import Grammars, Spelling
from trtrun.tokens.text import Tokenizer, read_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = read_tokenizer(ASSETS / "target")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(Spelling.of(tokenizer, VOCABULARY, (EOS,)).read())
