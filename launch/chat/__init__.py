"""`trtrun chat`: a conversation in a terminal, with a server of its own or one that runs. It knows HTTP and terminals.
It does not know models, engines or chat templates.
"""
