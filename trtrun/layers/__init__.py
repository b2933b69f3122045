"""What a layer of a model is made of beside attention and linear layers: embedding, feed-forward, norm, rotation."""
