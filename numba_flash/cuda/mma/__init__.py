"""The engine ``mma``: attention on the tensor cores of any GPU since Ampere, for inputs of any dtype.

===============  ==========================================================================
``engine``       `why_not`, `forward` and `backward`, the host's side
``config``       which tile shape for which head dims, and what lies where in shared memory
``forward``      the kernel of the forward pass
``backward``     that for dK and dV, which adds dQ up in memory
``backward_dq``  that for dQ where its bits must repeat
===============  ==========================================================================

Arrays whose rows can't be copied by 16 bytes (a base or a stride that is no multiple of 16 bytes, elements of a row
that are not neighbours, strides that are zero or negative) are copied first. A view of (batch, n, heads, d) data is
not.

The kernels are the same for all dtypes; what differs is how products are made of instructions (`ptx.mma`), what a
fragment is in memory (`ptx.formats`), and tile shapes. A product of float32 numbers is three on the tensor cores, which
know numbers of 11 bits, and as exact as float32 arithmetic; or one, with ``precision="tf32"``. Taking numbers apart
makes NaN of infinities: a row that sees one is NaN, where the formula may say infinity, or 0.

A product of float64 numbers is one, of 64 bits throughout; `engine.FASTER_IN_FLOAT64` says on which GPUs that is fast.
Tiles take so much shared memory that a GPU with 99 KB for a block leaves the gradients of wide heads to other engines.

Tensor cores multiply the value row of a hidden key by zero. Where it holds a NaN or Inf, and its tile is loaded since
some of the 64 or 128 queries of a block see keys of it, the NaN comes through to all of them. Keys that no query sees
are never loaded.
"""
