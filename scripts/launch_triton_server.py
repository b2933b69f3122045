"""tensorrtllm_backend's launch_triton_server.py command lines, answered by `trtrun serve`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.compat.tensorrt_llm.model_repository import main

if __name__ == "__main__":
    main()
