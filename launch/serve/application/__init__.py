"""What puts a server together and runs it: its parts from the configuration, its applications and ports, its process.

It knows every room of `launch.serve` and none of what they do inside.
"""
