"""Which completions run in the next round, on which blocks, and what a round's result means for them. It does not know
tensors or ranks.
"""
