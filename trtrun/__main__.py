"""`python -m trtrun`: the command `trtrun`, for where that is not on PATH.

The command line stands above this package, which imports nothing of it, so it is run by its name.
"""

from __future__ import annotations

import runpy

runpy.run_module("launch.console", run_name="__main__", alter_sys=True)
