"""The one file that knows which of Gluon's names differ between Triton 3.6 and 3.9."""

from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

try:  # from Triton 3.8 on
    load_async, store_async = tma.async_load, tma.async_store
except AttributeError:
    load_async, store_async = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
stores_wait = tma.store_wait

__all__ = [
    "TensorDescriptor",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "load_async",
    "mbarrier",
    "store_async",
    "stores_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
