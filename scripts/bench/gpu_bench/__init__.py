"""The parts of scripts/bench/bench_gpu.py. They drive trtrun as its users do: YAML files and commands."""
