"""Admission: who is let in, and with how much (limits, counts of prompts and words, refusals); and how long the event
loop may work in one piece.
"""
