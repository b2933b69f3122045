"""What can be wrong before weights are read: the files, the hosts, and whether the ranks fit together."""
