"""Requests that are long are read in processes of their own: a parser in C lets no other thread go on, and a thread
cannot be ended.

`parsers.py` has the processes, in the frontend (`worker_pool.py`: one of them, and who waits for which). `messages.py`
is what both say to each other, and its bytes. It does not know what the processes run
(`launch.serve.application.parser_worker`), and no protocol.
"""
