"""The engine ``hopper``: attention and its gradients on the tensor cores of compute capability 9.0, for 16-bit inputs.

====================  ======================================================================
``engine``            `why_not`, `forward` and `backward`, the host's side
``config``            which tile shape for which head dims, and what lies where in shared memory
``tensor_map``        the host's part of TMA: encode where an array's boxes lie
``forward``           the kernel of the forward pass
``alibi``             its part for ALiBi
``backward``          that of the backward pass for head dims up to 128
``backward_wide``     that for larger ones
``backward_parts``    what the two have in common: the producer, dQ in global memory
====================  ======================================================================

Arrays that TMA can't address (a base or a stride that is no multiple of 16 bytes, elements of a row that are not
neighbours, strides that are zero or negative) are copied first. A view of (batch, n, heads, d) data is not.

Tensor cores multiply the value row of a hidden key by zero. Where it holds a NaN or Inf, and its tile is loaded since
some of 128 (d up to 64: 192) queries see keys of it, the NaN comes through to all of them. Keys that no query sees are
never loaded.
"""
