"""A request's way in no protocol's words: through admission, to tokens, together with those that came with it, to the
engine and back. It does not know protocols or HTTP, nor where the engine runs.
"""
