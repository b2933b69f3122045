"""Parts of scripts/soak/simulate_cluster.py: requests of a public trace's shape, and servers without a model."""
