"""Blocks of keys and values: who holds them, what is found again, the store itself and its size; which tokens of a
forward see which keys, in tiles of which width. It does not know what rows are for.
"""
