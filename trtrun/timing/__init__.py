"""What rounds did and how long it took: totals, clocks of their phases, spans for a trace. It does not know what it
times.
"""
