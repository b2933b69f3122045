"""Chats: messages and tools in OpenAI's words, and the checkpoint's template that makes a prompt of them."""
