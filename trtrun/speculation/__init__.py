"""The round itself, and what decides in it: drafting methods, drafting ahead, acceptance, how much is drafted. It sees
engines by protocol, and does not know models or transports.
"""
