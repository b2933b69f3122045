"""The models at both ends: `preprocessing` makes tokens of texts, `postprocessing` texts of tokens.

With them clients go from text to text over the models of tokens themselves.
"""

from __future__ import annotations

import numpy as np

from launch.serve.api.kserve.models import PREPROCESSING
from launch.serve.api.kserve.requests import InferRequest, InferResponse, Row, write_word_lists
from launch.serve.api.kserve.row_requests import ModelFacts
from launch.serve.api.kserve.tensors import Array, Tensor, refuse_input, text_array
from trtrun.tokens.text import Tokenizer

_UNSUPPORTED = ("DECODER_QUERY", "IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES", "PROMPT_TABLE_EXTRA_ID")


def process(request: InferRequest, tokenizer: Tokenizer, facts: ModelFacts) -> InferResponse:
    """Answer a request for one of the two.

    Raises:
        Refusal: an input is wrong, or asks for what there is not.
    """
    is_before = request.model.name == PREPROCESSING
    tensors = _preprocess(request, tokenizer, facts) if is_before else _postprocess(request, tokenizer)
    wanted = request.outputs or tuple(tensor.name for tensor in tensors)
    found = {tensor.name: tensor for tensor in tensors}
    return InferResponse(request.model, request.request_id, [found[name] for name in wanted])


def _preprocess(request: InferRequest, tokenizer: Tokenizer, facts: ModelFacts) -> list[Tensor]:
    for name in _UNSUPPORTED:
        values = request.inputs.get(name)
        if values is not None and any(values.ravel().tolist()):
            raise refuse_input(name, "this is not supported here: leave the input out")
    rows = [Row(request.inputs, place) for place in range(request.batch_size)]
    tokens = [tokenizer.encode(row.text("QUERY")) for row in rows]
    end_ids = [row.number("END_ID", facts.end_id) for row in rows]
    pad_ids = [row.number("PAD_ID", facts.end_id) for row in rows]
    padded = np.full((len(rows), max(map(len, tokens))), max(facts.end_id, 0), np.int32)
    for place, ids in enumerate(tokens):
        padded[place, : len(ids)] = ids
    return [
        Tensor("INPUT_ID", "INT32", padded),
        _column("REQUEST_INPUT_LEN", list(map(len, tokens))),
        _column("DECODER_INPUT_ID", pad_ids),
        _column("REQUEST_DECODER_INPUT_LEN", [1] * len(rows)),
        Tensor("BAD_WORDS_IDS", "INT32", _words(rows, "BAD_WORDS_DICT", tokenizer)),
        Tensor("STOP_WORDS_IDS", "INT32", _words(rows, "STOP_WORDS_DICT", tokenizer)),
        Tensor("EMBEDDING_BIAS", "FP32", _biases(rows, tokenizer)),
        _column("REQUEST_OUTPUT_LEN", [row.number("REQUEST_OUTPUT_LEN", 0) for row in rows]),
        _column("OUT_END_ID", end_ids),
        _column("OUT_PAD_ID", pad_ids),
    ]


def _postprocess(request: InferRequest, tokenizer: Tokenizer) -> list[Tensor]:
    """A text for each sequence: of a row's, one behind the other, then those of the next row."""
    tokens, lengths = request.inputs["TOKENS_BATCH"], request.inputs["SEQUENCE_LENGTH"]
    if tokens.shape[1] != lengths.shape[1]:
        raise refuse_input("SEQUENCE_LENGTH", f"{lengths.shape[1]} lengths a row for {tokens.shape[1]} sequences")
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= tokens.shape[2]:
        raise refuse_input("SEQUENCE_LENGTH", f"must be between 0 and {tokens.shape[2]}, the tokens that are there")
    if tokens.size and tokens.min() < 0:
        raise refuse_input("TOKENS_BATCH", f"{tokens.min()} is no token id")
    flat = tokens.reshape(lengths.size, tokens.shape[2])
    texts = [
        tokenizer.decode(row[:length].tolist()) for row, length in zip(flat, lengths.ravel().tolist(), strict=True)
    ]
    return [Tensor("OUTPUT", "BYTES", text_array(texts, (len(texts),)))]


def _column(name: str, values: list[int]) -> Tensor:
    return Tensor(name, "INT32", np.array(values, np.int32).reshape(len(values), 1))


def _words(rows: list[Row], name: str, tokenizer: Tokenizer) -> Array:
    """[batch, 2, length]; without words the length is 0, which clients that look for stop words in it rely on."""
    if not rows[0].has(name):
        return np.zeros((len(rows), 2, 0), np.int32)
    return write_word_lists(
        [[tokenizer.encode(word, add_special_tokens=False) for word in row.words(name) if word] for row in rows]
    )


def _biases(rows: list[Row], tokenizer: Tokenizer) -> Array:
    """[batch, vocabulary] float32 numbers for logits; [batch, 0] without words."""
    if not any(row.words("EMBEDDING_BIAS_WORDS") for row in rows):
        return np.zeros((len(rows), 0), np.float32)
    biases = np.zeros((len(rows), tokenizer.vocab_size), np.float32)
    for place, row in enumerate(rows):
        words, weights = row.words("EMBEDDING_BIAS_WORDS"), row.numbers("EMBEDDING_BIAS_WEIGHTS")
        if len(words) != len(weights):
            raise refuse_input("EMBEDDING_BIAS_WEIGHTS", f"{len(weights)} weights for {len(words)} words")
        for word, weight in zip(words, weights, strict=True):
            for token in tokenizer.encode(word, add_special_tokens=False) if word else ():
                biases[place, token] += weight
    return biases
