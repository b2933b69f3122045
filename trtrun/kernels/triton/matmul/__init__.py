"""Products with weights of each stored form."""
