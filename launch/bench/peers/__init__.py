"""Programs that interpreters with another runtime run by path. Each imports that runtime and nothing of trtrun."""
