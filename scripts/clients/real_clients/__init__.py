"""Clients that nobody here wrote, against a served pair. It is no part of trtrun; scripts/clients.sh starts it."""
