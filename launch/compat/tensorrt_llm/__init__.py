"""The command lines of TensorRT-LLM's examples."""
