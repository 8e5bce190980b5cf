"""The problems on which both directions are measured in 16 bits, with or without options."""

from statistics import geometric_mean

import numpy as np
from tqdm import tqdm

from .ceilings import products
from .contest import Inputs, measured, prepare, shape, take_turns
from .measure import flops

HIDDEN, TOKENS = 2048, 16384                    # heads * d, batch * n
HEAD_DIMS = 64, 128, 256
LENGTHS = 1024, 4096, 16384
MASKS = {"full": False, "causal": True}


def speed_shapes(between=LENGTHS[1:]):
    """(dtype, d, n): the usual head dims in both dtypes, and two between them, at lengths `between`."""
    return [*((dtype, d, n) for dtype in ("bfloat16", "float16") for d in HEAD_DIMS for n in LENGTHS),
            *(("bfloat16", d, n) for d in (96, 192) for n in between)]


def both_masks(inputs, rivals, rounds, ceilings, backward=False):
    """Rows at one shape, full and causal."""
    sizes = shape(inputs)
    for mask, causal in MASKS.items():
        count = flops(sizes["batch"], sizes["heads"], sizes["n"], sizes["n"], sizes["d"], causal=causal,
                      backward=backward)
        yield measured({**sizes, "mask": mask}, inputs, rivals, count, rounds, ceilings, backward=backward,
                       causal=causal)


def geometric_means(rows):
    """Geometric mean of the ratios to cuDNN of each dtype over the usual head dims, if all were measured."""
    means = {}
    for dtype in ("bfloat16", "float16"):
        ratios = [row.ratios().get("hopper / cudnn") for row in rows
                  if row.case["dtype"] == dtype and row.case["d"] in HEAD_DIMS]
        if ratios and None not in ratios:
            means[dtype] = geometric_mean(ratios)
    return means


def speed(rounds, shapes, rivals, backward=False):
    """Rows at hidden size 2048 and 16384 tokens."""
    ceilings = products(dtype for dtype, _, _ in shapes)
    rows = [row for dtype, d, n in tqdm(shapes, desc="speed")
            for row in both_masks(Inputs.of(dtype, (TOKENS // n, HIDDEN // d, n, d)), rivals, rounds, ceilings,
                                  backward)]
    return {"rows": rows, "ceiling": ceilings, "geometric mean": geometric_means(rows)}


def gqa(rounds, lengths, rivals, backward=False):
    """Rows of 64 query heads on 8 key/value heads, d 128, bfloat16."""
    ceilings = products(["bfloat16"])
    rows = [row for n in tqdm(lengths, desc="gqa")
            for row in both_masks(Inputs.of("bfloat16", (1, 64, n, 128), (1, 8, n, 128)), rivals, rounds, ceilings,
                                  backward)]
    return {"rows": rows, "ceiling": ceilings}


def option_groups(heads=16, width=1024):
    """{n: {name: options}}: plain attention first, then what is compared with it. A window shows `width` keys."""
    slopes = 2**(-8 * np.arange(1, heads + 1, dtype=np.float32) / heads)
    return {4096: {"plain": {}, "alibi": {"alibi_slopes": slopes}, "softcap": {"softcap": 20.0}},
            16384: {"causal": {"causal": True}, "window": {"causal": True, "window": (width - 1, 0)}}}


def options(rounds, plain_rivals, rivals, backward=False):
    """Rows on the pairs that an option leaves, in turn with plain attention, bfloat16, d 128, 16 heads."""
    ceilings, rows, d = products(["bfloat16"]), [], 128
    for n, group in tqdm(option_groups().items(), desc="options"):
        batch, heads = TOKENS // n, HIDDEN // d
        inputs, together = Inputs.of("bfloat16", (batch, heads, n, d)), []
        for name, given in group.items():
            mask, left = "causal" if "causal" in given else "full", given.get("window", (None,))[0]
            count = flops(batch, heads, n, n, d, causal=mask == "causal", left=left, backward=backward)
            together.append(prepare({"option": name, "n": n, "mask": mask}, inputs,
                                    rivals if together else plain_rivals, count, backward=backward, **given))
        take_turns(together, rounds, ceilings)
        plain = together[0].figures["hopper"].get("TFLOP/s")
        for row in together:
            ours = row.figures["hopper"].get("TFLOP/s")
            if ours and plain:
                row.case["of plain"] = ours / plain
        rows += together
    return {"rows": rows, "ceiling": ceilings}
