"""Options and settings of vLLM and TensorRT-LLM, read as keys of the YAML file here."""
