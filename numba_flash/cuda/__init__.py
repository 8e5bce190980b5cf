"""The CUDA engines: beside the lessons the only place that imports `numba.cuda`, and only to compile.

Host code, which runs at each call and imports neither Numba nor a kernel:

==================  ==================================================================================
``flash1, flash2``  the engines in plain `@cuda.jit`: `why_not`, `forward`, `backward`
``mma``             the engine with the tensor cores that every GPU since Ampere has, for all dtypes
``hopper``          that with those of compute capability 9.0
``tensor_cores``    what these two share, on the host and in kernels
``host``            what flash1 and flash2 share around their kernels: delta (each row's sum of do * o), dbias, dsinks
``config``          which tile shape for which head dim, and why
``launch``          from machine code to a running kernel
``cache``           machine code on disk, so that the next process need not compile
==================  ==================================================================================

Kernels and what makes them:

====================================  ===============================================================
``flash1_forward, flash1_backward``   FlashAttention, Algorithms 1 and 4
``flash2_forward, flash2_backward``   FlashAttention-2, Algorithms 1 and 2
``backward_parts``                    kernels that both backward passes need: delta, dbias
``tiles``                             what happens in shared memory and registers: load a tile, multiply two tiles
``hooks``                             the two hooks of `numba_flash.scores` as device functions
``memory``                            16-byte shared memory loads and 16-bit floats, for the GPU and for the simulator
``ptx``                               the instructions that Numba has no word for, typed, and fragments of registers
``compile``                           from a kernel factory to machine code, without or with a GPU
====================================  ===============================================================

The words, for somebody who knows NumPy:

*Kernel*: a function that a GPU runs many times at once; each run is a *thread*. Threads come in *blocks* of a few
hundred, and a launch starts a *grid* of blocks, in no particular order. The body of a kernel is written for one thread,
which asks for the number of its block and its own (`cuda.blockIdx`, `cuda.threadIdx`).

*Global memory* is where arrays lie: large, far away, the same for all. *Shared memory* is small, near, and one block's
own: what several threads of a block read, they copy there once. *Registers* are a thread's own variables, and nearer
still; a *local array* whose indices the compiler knows is a handful of registers, and one whose indices it doesn't know
*spills* into global memory.

A *barrier* (`cuda.syncthreads`) holds every thread of a block until all have come: before it they wrote what after it
others read. 32 threads are a *warp*, each a *lane* of it, and execute in step; when they read shared memory at once,
addresses in the same one of 32 *banks* wait for each other.
"""

import os

try:                                    # as Numba reads it, which must not be imported for this
    SIMULATOR = bool(int(os.environ.get("NUMBA_ENABLE_CUDASIM", "0")))
except ValueError:
    SIMULATOR = False
