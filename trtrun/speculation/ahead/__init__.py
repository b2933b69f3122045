"""Drafting ahead: draft ranks of their own draft for the likely verdicts of a round while the target verifies it."""
