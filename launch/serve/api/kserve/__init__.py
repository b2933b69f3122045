"""KServe's inference protocol, version 2, over HTTP and gRPC, and the models of tensorrtllm_backend.

`http_api.py` and `grpc_servicer.py` speak the protocol; both read requests into `InferRequest`s (`requests.py`, of
`tensors.py`) and have `service.py` answer them. What the models take and give is a table (`models.py`);
`row_requests.py` reads inputs into prompts and sampling parameters, `runs.py` has them completed through the same
`Frontend` as any other protocol, and `processing.py` is the tokenizer at both ends.
"""

import os

# The engine is started by exec alone, which needs none of gRPC's preparations for forks.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# What is wrong with a call is in its status and in the frontend's log; gRPC has nothing to say on the terminal.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
