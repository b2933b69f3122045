"""Texts in which a row's last tokens are looked for, and what their continuations have in common: what the drafting
method `suffix` knows. It knows rows by protocol. It does not know rounds, engines or ranks.
"""
