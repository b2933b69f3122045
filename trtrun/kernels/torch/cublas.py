"""How torch is told which kernels of cuBLAS it may take. It knows settings of torch, and not what is computed."""

from __future__ import annotations

import torch


def forbid_split_sums() -> bool:
    """Let products of half precision on CUDA add up over their inputs in one chain, in this process from now on.

    cuBLAS splits the sums of some products over programs where there are few rows, so that a row's bits depend on how
    many others there are. Only cuBLASLt can be asked not to.

    Returns:
        Whether torch can be told that.
    """
    matmul = torch.backends.cuda.matmul
    try:
        if torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:
            torch.backends.cuda.preferred_blas_library("cublaslt")  # says that it is experimental
        matmul.allow_bf16_reduced_precision_reduction = (False, False)  # reduced precision, split sums
        matmul.allow_fp16_reduced_precision_reduction = (False, False)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True
