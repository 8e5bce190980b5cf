"""A call of compiled kernels on a GPU that isn't there: see `interpreter`."""

from functools import lru_cache

import interpreter
import numpy as np

from numba_flash.cuda import compile


@lru_cache(maxsize=None)
def kernel(factory, args, threads, cc):
    """The kernel to interpret, and the Numba types of its parameters."""
    function, signature = compile.load_factory(factory)(*args)
    return interpreter.Kernel(compile.compile_kernel(function, signature, threads, cc)), signature


class Run:
    """One call on a GPU of some compute capability. Arrays are put into its memory by name."""

    block_type = interpreter.Block

    def __init__(self, cc, early, seed, **arrays):
        self.cc, self.early, self.seed = cc, early, seed
        self.memory, self.places = interpreter.Memory(1 << 23), {}
        for name, x in arrays.items():
            self.put(name, x)

    def put(self, name, x):
        """Put an array there, or NaN in its shape; returns what is there."""
        address, there = self.memory.put(x)
        # what Numba passes of an array: owner, parent, size, itemsize, address, shape, strides
        self.places[name] = tuple(map(np.int64, (0, 0, x.size, x.itemsize, address, *x.shape, *there.strides)))
        return there

    def empty(self, name, shape, dtype):
        return self.put(name, np.full(shape, -1, f"i{dtype.itemsize}").view(dtype))

    def launch(self, factory, args, layout, grid, names, more, **how):
        """Launch the kernel of a factory with arrays by name (None for those not there), and numbers."""
        self.start(factory, args, args[0].threads, layout(*args[:2]).total, grid, names, more, **how)

    def start(self, factory, args, threads, shared_bytes, grid, names, more=(), **how):
        """The same for a kernel without a tile shape."""
        program, signature = kernel(factory, args, threads, self.cc)
        flat = []
        for name in names:
            flat += self.places.get(name, (np.int64(0),))
        for number, type_ in zip(more, signature[len(names):], strict=True):
            x = getattr(np, str(type_))(number)
            flat.append(x.view(f"i{x.itemsize}"))
        interpreter.launch(program, flat, self.memory, threads, shared_bytes, grid, self.early, self.seed,
                           self.block_type, **how)
