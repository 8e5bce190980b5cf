"""Hopper's instructions as typed functions that a Numba kernel calls.

==============  ==============================================================================================
``assembly``    how an instruction becomes a function: the decorator `instruction`, and register tuples
``barriers``    mbarriers, named barriers, fences, and moving registers from one warpgroup to another
``copies``      tensor maps, bulk tensor copies between global and shared memory, shared memory itself
``wgmma``       whole matrix products of a warpgroup, operands in shared memory or registers
``fragments``   a matrix spread over the registers of a warpgroup: apply a function to its elements or its rows
``arithmetic``  exp2, log2, fma, maximum
==============  ==============================================================================================

"ISA" is the PTX ISA document, https://docs.nvidia.com/cuda/parallel-thread-execution/, with the names of its sections.
"""
