"""The parts of Gluon that kernels for Hopper use, under one name in every version of triton."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, mma_v2, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as wgmma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wgmma_wait

__all__ = [
    "async_copy", "block_barrier", "copy_block", "copy_elements", "fence_async_shared", "mbarrier", "mma_v2", "seen_as",
    "store_block", "tma", "wgmma", "wgmma_wait",
]  # fmt: skip

# Later versions renamed these.
copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_memory = gl.shared_memory_descriptor
seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret
