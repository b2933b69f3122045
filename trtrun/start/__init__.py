"""From a configuration to a job that runs: how ranks find each other, what each holds and in how many bytes, which loop
it runs. It does not know requests, or what happens in a round.
"""
