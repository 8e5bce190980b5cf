"""Measurements: ``python -m bench NAME``, see `bench.__main__`.

What every measurement is made of:

==============  ==============================================================================================
`measure`       counts of operations, clocks, and timing in turn
`contest`       one problem and several ways to compute it: check, take turns, make a row
`parts`         run the parts of a benchmark, store each as soon as it is there
`results`       tables, JSON, and the circumstances of a run
`peers`         others' attention by its true name: PyTorch's backends, FlexAttention, JAX
`rungs`         the engines of the package from the first idea to the last, and memory-efficient attention
`ceilings`      what the machine does at most
`first_call`    compiling, beforehand or timed
==============  ==============================================================================================

What is compared: `forward` and `backward`, on the problems of `grid`; `ladder`, `memory`, `traffic`, `latency`,
`train`, `cpu`.

What is made of the results: `readme`, `course` and `words`, the figures of two pages; `charts`. The course's pictures,
which show no measurements: `pictures`, drawn on a `canvas`, and `pipeline`.
"""
