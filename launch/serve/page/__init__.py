"""The page at /: its files (files/), and the routes that hand them out."""
