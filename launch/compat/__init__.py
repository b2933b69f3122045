"""Command lines of other programs that trtrun takes."""
