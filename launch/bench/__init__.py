"""`trtrun bench`: plain and speculative decoding side by side, and transformers beside both."""
