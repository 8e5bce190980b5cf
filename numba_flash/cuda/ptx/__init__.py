"""Instructions that Numba has no word for, as typed functions that a kernel calls.

==============  ==============================================================================================
``assembly``    how an instruction becomes a function: the decorator `instruction`, and register tuples
``barriers``    mbarriers, named barriers, fences, and moving registers from one warpgroup to another
``copies``      asynchronous copies into shared memory, by threads (Ampere) or by tensor maps (Hopper); shared memory
``mma``         whole matrix products of a warp (Ampere), operands in shared memory or registers
``wgmma``       those of a warpgroup (Hopper), which run while its threads go on
``formats``     a fragment outside of products: 16-bit numbers in pairs, longer ones one by one
``exchange``    fragments in memory as threads hold them: added up, or left for another warp
``fragments``   a matrix spread over the registers of a warp or warpgroup: a function applied to its elements or rows
``arithmetic``  exp2, log2, fma, maximum
==============  ==============================================================================================

"ISA" is the PTX ISA document, https://docs.nvidia.com/cuda/parallel-thread-execution/, with the names of its sections.
"""
