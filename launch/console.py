"""The console script `trtrun`, and `python -m trtrun`: it imports the command line, which takes a while, and runs it.

Ctrl-C meanwhile ends the process without a traceback of Python's imports. It knows no commands.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Import the command line, and be it."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background ignores it
    if is_usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from launch.cli import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
