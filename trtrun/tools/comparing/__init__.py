"""Comparing a model's layers with those of another runtime."""
