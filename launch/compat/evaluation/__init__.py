"""TensorRT-LLM's evaluations, examples/mmlu.py and examples/summarize.py, on local data."""
