"""How drafts, verdicts and hidden states travel between the ranks of a round."""
