"""Gated delta nets on the CPU."""
