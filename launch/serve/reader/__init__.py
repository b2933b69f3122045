"""What a process runs that reads long requests for a front (see `launch.serve.reading`): from bytes to tokens and
checked parameters, whatever the protocol. It does not know fronts or engines, and needs no torch.
"""
