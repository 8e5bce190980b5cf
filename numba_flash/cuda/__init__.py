"""The CUDA engines: the only place that imports `numba.cuda`.

======================  ==============================================================================
``flash1``, ``flash2``  the engines: `why_not`, `forward`, `backward`, and the kernels themselves
``backward_parts``      what the backward passes of both engines share: delta, dbias, dsinks
``tiles``               what happens in shared memory and registers: load a tile, multiply two tiles
``hooks``               the two hooks of `numba_flash.scores` as device functions
``memory``              16-byte shared memory loads and 16-bit floats, for the GPU and for the simulator
``config``              which tile shape for which head dim, and why
``compile``             from a kernel factory to a compiled kernel, cached, without or with a GPU
``launch``              from a compiled kernel to a running one
======================  ==============================================================================
"""
