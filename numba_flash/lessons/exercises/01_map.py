"""Lesson 1: y = a x + b, a thread for each element.

x, y: (n,) float32; a, b: numbers. Blocks of 8 threads, as many as cover n.
"""

from numba import cuda


@cuda.jit
def linear(y, x, a, b):
    # Your code: which element is this thread's, is there one, and what is y there?
    ...
