"""From logits to tokens in Triton for CUDA: rows with any parameters share a launch, nothing is sorted or read back."""
