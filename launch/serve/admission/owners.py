"""Whose a request is: by owners admitted places, rows of the engine and processes that read are shared first,
and then by request.

Where the server has keys it is the key, else the client's address, as nothing else tells strangers apart: of IPv6 the
network of 64 bits, of which one client has all addresses. Whoever looks at a request's key says whose it is, and all
that is done for the request finds it in the context. It knows names, and no requests.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""Of the request that is worked for; empty where nobody has said."""

WANTING_SECONDS = 30.0
"""How long somebody counts as one who wants places, behind a request that had one or was refused."""


def owner_of_address(address: str) -> str:
    """The owner of requests from an address, such as "127.0.0.1", or gRPC's "ipv6:%5B::1%5D:1234"."""
    scheme, _, rest = unquote(address).partition(":")
    if scheme in ("ipv4", "ipv6"):
        address = rest.rpartition(":")[0].strip("[]")
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return f"address {address}"
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return f"address {found.ipv4_mapped}"
        return f"network {IPv6Address(int(found) >> 64 << 64)}"
    return f"address {found}"


@dataclass(eq=False)
class Owner:
    """What one has of the places of admission.

    Attributes:
        num_completions, num_requests: in work.
        wanted: when a request came last, in seconds of `time.monotonic`.
    """

    num_completions: int = 0
    num_requests: int = 0
    wanted: float = 0.0


@dataclass
class Owners:
    """Those who want places now, or did not long ago."""

    _known: OrderedDict[str, Owner] = field(default_factory=OrderedDict)

    def ask(self, name: str) -> Owner:
        """Somebody wants places."""
        now = time.monotonic()
        while self._known and next(iter(self._known.values())).wanted < now - WANTING_SECONDS:
            oldest, owner = self._known.popitem(last=False)
            if owner.num_requests:
                owner.wanted = now
                self._known[oldest] = owner
        owner = self._known.setdefault(name, Owner())
        owner.wanted = now
        self._known.move_to_end(name)
        return owner

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self._known)
