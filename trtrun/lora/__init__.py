"""Adapters (LoRA) as PEFT saves them: their files, checked against the base model, and a rank's share of it."""
