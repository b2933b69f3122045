"""The trial of draft trees through `trtrun run`: a file of rows, and texts that are plain decoding's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_text_of_a_tree_is_plain_decodings() -> None:
    command = [sys.executable, "scripts/pair/tree_texts.py", "--rows", "4", "--max-tokens", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["greedy"], told["sampled"]) == ("2 of 2", "2 of 2") and told["accepted"] > 0
