"""Drafting methods, and the options of each."""
