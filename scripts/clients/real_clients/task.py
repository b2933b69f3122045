"""Tasks that agents which write code are given: what they have to do, and what they tell of it. Plain data."""

from __future__ import annotations

ASKED = "Create a file hello.py that prints a greeting, run it, and say what it printed."
PRINTED = "Hello from a file"
LINE = f"print('{PRINTED}')"
RUN = "python3 hello.py"
TOLD = f"It printed: {PRINTED}"
PATCH = f"*** Begin Patch\n*** Add File: hello.py\n+{LINE}\n*** End Patch\n"

PICTURE = "blue-square.png"
SEARCHED = f"Look at {PICTURE}, search the web for what it shows, and say what you found."
NOT_RUN = "is not run here"
FOUND = "I can see no pictures, and search no web."

CONTEXT = 65536
"""Tokens that agents' conversations have room for: what they tell of their tools takes tens of thousands."""
