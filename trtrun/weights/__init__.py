"""Weights as files have them: checkpoints, their stored forms, and how a rank reads its part."""
