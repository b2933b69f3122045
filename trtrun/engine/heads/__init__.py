"""Draft heads as an engine runs them, with keys and values of their own or without."""
