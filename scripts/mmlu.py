"""TensorRT-LLM's examples/mmlu.py command lines: MMLU from local files, with drafts and by transformers beside."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.compat.evaluation.mmlu import main

if __name__ == "__main__":
    main()
