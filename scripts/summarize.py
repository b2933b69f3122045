"""TensorRT-LLM's examples/summarize.py command lines: ROUGE and perplexity on local files, transformers beside."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.compat.evaluation.summarize import main

if __name__ == "__main__":
    main()
