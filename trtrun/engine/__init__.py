"""One engine rank: where rows stand on its device, plans as tensors, forwards and their graphs, the memory that they
take. It does not know which token to choose.
"""
