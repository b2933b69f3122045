"""/v1/responses in the part that clients without state use: its requests become chats, and answers come as items."""
