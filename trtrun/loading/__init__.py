"""From a checkpoint or an engine directory to a model on a rank: weights are read, checked and placed."""
