"""The task that agents which write code are given: what they have to write, run and tell. Plain data."""

from __future__ import annotations

ASKED = "Create a file hello.py that prints a greeting, run it, and say what it printed."
PRINTED = "Hello from a file"
LINE = f"print('{PRINTED}')"
RUN = "python3 hello.py"
TOLD = f"It printed: {PRINTED}"
PATCH = f"*** Begin Patch\n*** Add File: hello.py\n+{LINE}\n*** End Patch\n"

CONTEXT = 65536
"""Tokens that agents' conversations have room for: what they tell of their tools takes tens of thousands."""
