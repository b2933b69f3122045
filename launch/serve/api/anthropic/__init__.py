"""Anthropic's Messages API, as Claude Code asks it: its requests become chats, and answers come as blocks."""
