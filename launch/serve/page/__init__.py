"""The page at /: its files (files/), and the routes that hand them out. It does not know the server that it shows."""
