"""The engine as a server has it: in processes of its own that are started again, or in this one; what both sides say to
each other, and the requests that outlive it.
"""
