"""A layer of a decoder and what it is made of: embedding, attention, feed-forward, norm, rotation."""
