"""Writes made-up weights into model directories whose names are shapes: `write_weights.py DIRECTORY…`.

A program of its own, so that what it takes of a GPU is free again afterwards.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from gpu_bench.models import SHAPES, write_weights


def main() -> None:
    """Entry of the program."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paths = [Path(word) for word in sys.argv[1:]]
    print(json.dumps({path.name: write_weights(path, SHAPES[path.name], device) for path in paths}))


if __name__ == "__main__":
    main()
