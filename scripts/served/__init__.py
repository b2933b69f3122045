"""What the scripts share that try `trtrun serve`: its process, questions with their exact answers, clients."""
