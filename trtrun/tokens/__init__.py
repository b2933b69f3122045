"""Between text and token ids: the tokenizer, texts that grow token by token, strings that are looked for in them."""
