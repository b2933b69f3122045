"""Starting ranks with mpirun, watching them until they work, and ending them so that nothing stays behind."""
