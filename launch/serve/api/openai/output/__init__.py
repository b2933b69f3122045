"""What a model writes in a chat, as it comes: thoughts, text and calls of tools, each told apart by its family's marks;
and the grammars of what it must write."""
