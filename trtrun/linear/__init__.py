"""Linear layers: the layer itself, and the quantizations that say what its weight is held in and multiplied by."""
