"""`trtrun serve`: a front that speaks HTTP, and an engine in processes of its own that the front starts again."""
