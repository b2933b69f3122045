"""TensorRT-LLM's examples/quantization/quantize.py command lines, answered by `trtrun quantize`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.compat.tensorrt_llm.quantize import main

if __name__ == "__main__":
    main()
