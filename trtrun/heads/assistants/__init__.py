"""Assistants of Gemma 4: small decoders that draft from the target's own keys and values."""
