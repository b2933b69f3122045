"""Long requests are parsed in processes of their own: a parser in C lets no other thread go on, and a thread cannot be
ended.

`worker_pool.py` has the processes as the frontend sees them, `parsers.py` two pools of them, `messages.py` what both
sides send. What the processes run is `launch.serve.application.parser_worker`.
"""
