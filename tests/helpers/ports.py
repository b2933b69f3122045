"""Whether somebody gets into a port."""

from __future__ import annotations

import socket
from contextlib import suppress

NEVER_SECONDS = 0.3
"""In which a connection is not there whose packets are dropped."""


def lets_in(port: int) -> bool:
    """Whether somebody of this host can connect; nobody does who waits for longer than a moment."""
    with suppress(TimeoutError, ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=NEVER_SECONDS).close()
        return True
    return False
