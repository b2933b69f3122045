"""TensorRT-LLM's trtllm-build command lines, answered by `trtrun build`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.compat.tensorrt_llm.build import main

if __name__ == "__main__":
    main()
