"""The OpenAI API over the frontend: its fields and what they mean, chats and their templates, and its answers, whole
and as streams.
"""
