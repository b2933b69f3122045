"""scripts/install.sh says now and then that a long step goes on, where nobody sees pip's bars."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Its function alone, with a clock that is quick: what it runs waits for the test.
PROGRAM = """
eval "$(sed -n '/^patiently()/,/^}/p' "$1")"
sleep() { command sleep 0.02; }
patiently torch bash -c 'read -r status <"$0"; exit "$status"' "$2"
"""


def test_a_long_step_says_that_it_goes_on_and_keeps_its_status(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    words = ["bash", "-c", PROGRAM, "bash", str(ROOT / "scripts" / "install.sh"), str(gate)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        told = process.stderr.readline()
        assert told.startswith("install.sh: torch: ") and told.endswith(" s so far\n")
        gate.write_text("7\n", encoding="ascii")
        process.communicate(timeout=60)
        assert process.returncode == 7
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
