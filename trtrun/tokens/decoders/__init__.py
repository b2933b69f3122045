"""The decoders of the `tokenizers` library, token by token: what is certain of a text while its tokens come."""
