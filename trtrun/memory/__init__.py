"""What a rank keeps and works in, in bytes: reckoned before anything is loaded, and by the start itself."""
