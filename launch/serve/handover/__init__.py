"""Servers that follow each other under one name: a file that says where the newest of them listens, and requests that
go on in it.
"""
