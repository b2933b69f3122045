"""Checkpoints from one layout of files to another: Hugging Face's and TensorRT-LLM's: `trtrun convert`.

It knows files and how ranks share tensors out. It does not know engines or the command line.
"""
