"""The methods of training: `table` has their names, and each has a module.

A method knows its own losses and the layout of its checkpoint; the loop (`trtrun.tools.training.loop`) knows neither.
"""
