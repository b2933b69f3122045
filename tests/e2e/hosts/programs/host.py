"""One host of the tests: the first process of its own namespaces, with an address, a name and an sshd.

    unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc python host.py NAME ADDRESS FOLDER

It says `waiting` on stdout, and once a line on stdin tells it that its network link is there, `ready`. It ends, and
everything on the host with it, when its stdin ends: so no host outlives its test, however the test ended.

FOLDER holds `hosts` (this host's /etc/hosts), `sshd_config` and `private`, which every host sees as a directory of its
own.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress

LINK = "eth0"


def call(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def take_name(name: str, folder: str) -> None:
    """Own host name, own /etc/hosts, own /run and shared memory, own private directory."""
    socket.sethostname(name)
    call("mount", "--bind", f"{folder}/hosts", "/etc/hosts")
    call("mount", "-t", "tmpfs", "none", "/run")
    os.mkdir("/run/sshd")
    call("mount", "-t", "tmpfs", "none", "/dev/shm")
    call("mount", "-t", "tmpfs", "none", f"{folder}/private")


def take_address(address: str) -> None:
    call("ip", "link", "set", "lo", "up")
    call("ip", "address", "add", f"{address}/24", "dev", LINK)
    call("ip", "link", "set", LINK, "up")


def start_sshd(address: str, folder: str) -> None:
    """Start sshd and wait until it answers."""
    with open(f"{folder}/sshd.log", "ab") as log:
        daemon = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", f"{folder}/sshd_config", "-o", f"ListenAddress={address}"],
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
    while daemon.poll() is None:
        with suppress(OSError), socket.create_connection((address, 22), timeout=5):
            return
        time.sleep(0.02)  # refused so far: ask again
    raise SystemExit(f"sshd ended with status {daemon.returncode}")


def main() -> None:
    name, address, folder = sys.argv[1:]
    take_name(name, folder)
    print("waiting", flush=True)
    sys.stdin.readline()
    take_address(address)
    start_sshd(address, folder)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(0, 1024):
            return
        with suppress(ChildProcessError):  # the first process of a host has to bury everybody's children
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
