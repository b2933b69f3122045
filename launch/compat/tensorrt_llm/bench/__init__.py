"""trtllm-bench's command line: datasets, load and report."""
