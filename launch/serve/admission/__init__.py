"""Who is let in, and with how much: limits, counts of prompts and words, refusals; and what is too long for the event
loop in one piece. It does not know protocols, frontends or engines.
"""
