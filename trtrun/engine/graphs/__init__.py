"""Graphs of forwards: their shapes, how they are captured, and where they are kept."""
