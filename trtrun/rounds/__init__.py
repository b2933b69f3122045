"""A rank's part of each round: the orchestrator's heartbeat and its hands, the loops of draft and target ranks, and
what the loss of a rank means. It does not know models, or how a rank got its engines (`trtrun.start`).
"""
