"""TensorRT-LLM's examples/run.py command lines for draft-target models, with engines or model directories."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.compat.tensorrt_llm.run import main

if __name__ == "__main__":
    main()
