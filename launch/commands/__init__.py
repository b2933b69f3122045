"""The subcommands of `trtrun`, one module for each group of them.

They parse command lines and import everything heavy inside the command, so that --help and a mistyped option answer at
once.
"""
