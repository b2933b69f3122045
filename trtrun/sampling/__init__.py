"""From logits to the next token: penalties, filters, random numbers, and the sampling parameters of a batch's rows."""
