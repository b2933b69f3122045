"""Attention of prompts for GPUs of compute capability 9.0, in Triton's Gluon: tiles, copies, softmax, kernel."""
