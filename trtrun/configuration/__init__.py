"""The YAML file: how it is read, its sections, and what follows from them alone, such as who sits where. It does not
know models' files, tensors or ranks that run.
"""
