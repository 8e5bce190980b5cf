"""Exact attention in NumPy and float64: the algorithms of the papers, short enough to read.

`standard_attention` and `standard_attention_backward` are the oracles that every kernel is held
against.  The other functions compute the same in the order of the kernels, stage by stage, under
the same labels and names.  `reference.traffic` counts the bytes that each of them moves.
"""

from . import traffic
from .attention import (
    flash_attention_1,
    flash_attention_2,
    memory_efficient_attention,
    one_pass_attention,
    standard_attention,
    tiled_attention,
    two_pass_attention,
)
from .backward import (
    flash_attention_1_backward,
    flash_attention_2_backward,
    standard_attention_backward,
)
from .softmax import naive_softmax, online_softmax, safe_softmax

__all__ = [
    "naive_softmax", "safe_softmax", "online_softmax",
    "standard_attention", "memory_efficient_attention", "two_pass_attention", "one_pass_attention",
    "tiled_attention", "flash_attention_1", "flash_attention_2",
    "standard_attention_backward", "flash_attention_1_backward", "flash_attention_2_backward",
    "traffic",
]
