"""What is made of models beside serving them: drafters, quantized and converted checkpoints, engine directories."""
