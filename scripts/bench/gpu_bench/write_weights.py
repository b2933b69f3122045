"""Writes dummy weights into model directories whose names are shapes: `write_weights.py DIRECTORY…`.

They are those of `load_format: dummy` (trtrun/loading/dummy_weights.py): the same for the same name. Where a shape
repeats, layers add nothing to the residual stream, and the output head is the embedding: what follows a token is that
token. Of a draft with a mask token the first layer looks at all tokens alike and adds what they are, so that a mask
token, which is nothing itself, becomes the token that stands most often before it. A program of its own, so that what
it takes of a GPU is free again afterwards.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from safetensors.torch import save_file

from scripts.bench.gpu_bench.models import SHAPES, Shape
from trtrun.loading.dummy_weights import DummyWeights
from trtrun.models.config import read_model_config

LAYERS_A_FILE = 8


def write_weights(path: Path, shape: Shape, device: torch.device) -> int:
    """Write the dummy weights of a shape as safetensors into its directory, some layers a file.

    Returns:
        Bytes written; 0 where the files are there.
    """
    index_file = path / "model.safetensors.index.json"
    if index_file.exists():
        return 0
    source = DummyWeights(path, getattr(torch, shape.dtype), device, read_model_config(path))
    places: dict[str, str] = {}
    names = list(shape.tensors().items())
    ends, layers = names[:3], names[3:]
    step = LAYERS_A_FILE * len(layers) // shape.layers
    parts = [ends, *(layers[start : start + step] for start in range(0, len(layers), step))]
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        make = _make_repeating if shape.repeats else _make
        tensors = {name: make(source, name, size) for name, size in part}
        save_file(tensors, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": source.bytes_read}, "weight_map": places}
    index_file.write_text(json.dumps(index), encoding="utf-8")
    return source.bytes_read


def _make(source: DummyWeights, name: str, size: tuple[int, ...]) -> torch.Tensor:
    """A whole tensor on the host."""
    source.check(name, size)
    pieces = [piece.cpu() for _, piece in source.pieces(name, tuple(range(length) for length in size))]
    return torch.cat(pieces)


def _make_repeating(source: DummyWeights, name: str, size: tuple[int, ...]) -> torch.Tensor:
    """A whole tensor of a model that repeats."""
    shape, embedding = SHAPES[source.path.name], "model.embed_tokens.weight"
    if name in (embedding, "lm_head.weight"):
        tensor = _make(source, embedding, size)
        if name == embedding and shape.drafts_in_parallel:
            tensor[-1].zero_()  # the mask token's
        return tensor
    is_first = shape.drafts_in_parallel and ".layers.0." in name
    if is_first and "q_proj" in name:
        return torch.zeros_like(_make(source, name, size))  # all tokens count alike
    if is_first and "o_proj" in name:
        # The values of a KV head come back through the first of its query heads as they went in.
        values = _make(source, name.replace("o_proj", "v_proj"), (shape.kv_heads * shape.head_dim, shape.hidden))
        heads = values.new_zeros((shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim, shape.hidden))
        heads[:, 0] = values.view(shape.kv_heads, shape.head_dim, shape.hidden)
        return heads.flatten(0, 2).t().contiguous()
    if "o_proj" in name or "down_proj" in name:
        return torch.zeros_like(_make(source, name, size))
    return _make(source, name, size)


def main() -> None:
    """Entry of the program."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paths = [Path(word) for word in sys.argv[1:]]
    print(json.dumps({path.name: write_weights(path, SHAPES[path.name], device) for path in paths}))


if __name__ == "__main__":
    main()
