"""`trtrun quantize`: what is checked before, the run, and what the user sees of it."""
