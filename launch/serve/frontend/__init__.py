"""A request's way whatever its protocol: through admission, to tokens, together with requests that came with it, to the
engine and back.
"""
