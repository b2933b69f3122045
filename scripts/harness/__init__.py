"""What scripts share that start commands and servers of this checkout: child processes, servers, how a trial ends."""
