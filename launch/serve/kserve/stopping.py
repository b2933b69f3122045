"""Requests that stop others: an input of the models of tokens, instead of a prompt to complete.

It knows inputs. It does not know which requests there are.
"""

from __future__ import annotations

from launch.serve.kserve.requests import InferRequest

STOP = "stop"
"""Input of the models of tokens that ends another request."""


def is_stopping(request: InferRequest) -> bool:
    """Whether a request ends another one."""
    return STOP in request.inputs and bool(request.inputs[STOP].any())
