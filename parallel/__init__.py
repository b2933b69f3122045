"""Ranks and bytes: who sits where, how tensors are cut, and how they travel between ranks.

This package knows no request and no model, and imports nothing of trtrun. `topology` and `sharding` are pure;
`communicator` is the protocol that `transports` implement; `control` carries plans and reports, `link` carries draft
tokens and verdicts between the two engines.
"""
