"""TensorRT-LLM's trtllm-bench command lines: throughput, latency and prepare-dataset, answered by trtrun."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.compat.tensorrt_llm.bench.command_line import main

if __name__ == "__main__":
    main()
