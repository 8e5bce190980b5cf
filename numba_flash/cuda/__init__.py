"""The CUDA engines: the only place that imports `numba.cuda`.

======================  ==============================================================================
``flash1``, ``flash2``  the lessons: `why_not`, `forward`, `backward`, and the kernels themselves
``hopper``              the forward pass with the tensor cores of compute capability 9.0
``ptx``                 the instructions that Numba has no word for, typed, and fragments of registers
``backward_parts``      what the backward passes of flash1 and flash2 share: delta, dbias, dsinks
``tiles``               what happens in shared memory and registers: load a tile, multiply two tiles
``hooks``               the two hooks of `numba_flash.scores` as device functions
``memory``              16-byte shared memory loads and 16-bit floats, for the GPU and for the simulator
``config``              which tile shape for which head dim, and why
``compile``             from a kernel factory to machine code, cached, without or with a GPU
``launch``              from machine code to a running kernel
======================  ==============================================================================

The words, for somebody who knows NumPy:

*Kernel*: a function that a GPU runs many times at once; each run is a *thread*. Threads come in *blocks* of a few
hundred, and a launch starts a *grid* of blocks, in no particular order. The body of a kernel is written for one thread,
which asks for the number of its block and its own (`cuda.blockIdx`, `cuda.threadIdx`).

*Global memory* is where arrays lie: large, far away, the same for all. *Shared memory* is small, near, and one block's
own: what several threads of a block read, they copy there once. *Registers* are a thread's own variables, and nearer
still; a *local array* whose indices the compiler knows is a handful of registers, and one whose indices it doesn't know
*spills* into global memory.

A *barrier* (`cuda.syncthreads`) holds every thread of a block until all have come: before it they wrote what after it
others read. 32 threads are a *warp* and execute in step; when they read shared memory at once, addresses in the same
one of 32 *banks* wait for each other.
"""
