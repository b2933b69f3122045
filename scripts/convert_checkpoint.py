"""TensorRT-LLM's convert_checkpoint.py command lines, answered by `trtrun convert`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.compat.tensorrt_llm.convert import main

if __name__ == "__main__":
    main()
