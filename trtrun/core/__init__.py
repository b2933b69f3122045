"""The nouns that everything above hands around: requests, plans, drafts and verdicts, sampling parameters, outputs.
Plain, checked data. It does not know models, ranks, files or text.
"""
