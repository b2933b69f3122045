"""`trtrun plan`: where a job would sit and what it would take, without starting it."""
