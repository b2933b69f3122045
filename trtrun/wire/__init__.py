"""Byte layouts of what ranks tell each other every round."""
