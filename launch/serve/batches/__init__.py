"""Files and batches of the OpenAI API: rows that are answered behind all other requests, and kept on a directory.

`store.py` keeps, `runner.py` runs, `api.py` answers; `rows.py` has the format, which `trtrun run` reads, too.
"""
