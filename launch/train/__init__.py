"""`trtrun train-drafter`: what is checked before, the ranks, and the run."""
