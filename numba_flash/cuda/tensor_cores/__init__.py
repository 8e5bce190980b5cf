"""What the engines with tensor cores, `mma` and `hopper`, have in common.

==============  =========================================================================================
``spec``        what a kernel is compiled for, and the sizes that the hardware fixes
``schedule``    which block works on which query tile when, and on which K/V tiles
``softmax``     what happens to each score and to each row, as formulas
``steps``       these formulas on a tile of scores, and the end of the forward pass
``gradients``   these formulas on a transposed tile, for the backward pass
``host``        which problems the engines take, arrays as their copies can read them, what surrounds the kernels
==============  =========================================================================================
"""
