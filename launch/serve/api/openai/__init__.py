"""The OpenAI API over the frontend: its fields and what they mean, chats and their templates, and its answers, whole
and as streams. It does not know other protocols, or where the engine runs.
"""
