"""The Python API and the engine core below it: prompts in, outputs and deltas out, for calls, threads and event
loops."""
