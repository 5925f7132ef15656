"""CPU memory: huge pages for weights and KV caches, and how much freed memory the C library keeps.

HugePages hands out tensors of one block of memory. The two functions below it tell the C library to
keep freed memory, or to give it back.
"""

import ctypes
import math
from contextlib import suppress

import torch


class HugePages:
    """One block of CPU memory for many tensors, in huge pages of 2 MiB where Linux allows it
    (madvise).

    The TLB of a processor caches the addresses of a few thousand pages. A decode step reads all
    weights: with the usual pages of 4 KiB, it misses the TLB for every row or two of a matrix,
    which costs up to a quarter of the time.
    """

    PAGE = 1 << 21  # bytes

    def __init__(self, nbytes: int):
        # The system provides a page of memory only when the page is first written to.
        memory = torch.empty(nbytes + 2 * self.PAGE, dtype=torch.uint8)
        self.used = -memory.data_ptr() % self.PAGE
        MADV_HUGEPAGE = 14
        with suppress(OSError, AttributeError):
            madvise = ctypes.CDLL(None).madvise
            madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            madvise(memory.data_ptr() + self.used, nbytes // self.PAGE * self.PAGE, MADV_HUGEPAGE)
        # Through numpy, each tensor gets a torch storage of its own. torch.compile copies inputs
        # that share a storage.
        self.memory = memory.numpy()

    def empty(self, shape, dtype):
        """An uninitialized tensor in this block, or outside it if the block is full."""
        start = -(-self.used // 64) * 64  # bytes, the width of a vector register
        end = start + math.prod(shape) * dtype.itemsize
        if end > self.memory.nbytes:
            return torch.empty(shape, dtype=dtype)
        self.used = end
        return torch.from_numpy(self.memory[start:end]).view(dtype).view(shape)

    def zeros(self, shape, dtype):
        return self.empty(shape, dtype).zero_()

    def copy(self, tensor):
        """A copy of a tensor."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def keep_freed_memory():
    """Have the C library keep up to 1 GB of freed memory for the next tensors.

    glibc returns large blocks to the system as soon as they are freed, and the system then clears
    new pages for every tensor. Clearing them took half the time of a prefill on CPU. Other C
    libraries do not have or need this call.
    """
    M_TRIM_THRESHOLD = -1
    M_MMAP_THRESHOLD = -3
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def release_freed_memory():
    """Have the C library return all freed memory to the system, even between blocks in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
