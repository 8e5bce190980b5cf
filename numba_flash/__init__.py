"""Exact attention, forward and backward, for NumPy and CuPy arrays, written in Python."""

from .attention import attention, attention_backward, attention_vjp
from .merge import merge_states

__all__ = ["attention", "attention_backward", "attention_vjp", "merge_states"]
