"""The Hopper engine's forward beside PyTorch's cuDNN attention and FlexAttention, and what a call costs besides.

==========  ===========================================================================
`speed`     TFLOP/s in both 16-bit dtypes, hidden size 2048, 16384 tokens
`gqa`       64 query heads on 8 key/value heads
`options`   ALiBi, softcap and a window, beside plain attention and FlexAttention
`matmul`    attention as a share of a matrix product of the same dtype
`error`     against float64
`host`      µs of the host's time for one call
`compile`   seconds of the first call in a process
`memory`    bytes beyond inputs, o and lse
==========  ===========================================================================

``--part NAME`` measures one of them; each is stored with its own circumstances as soon as it is there. Rivals take
turns in one process on the same inputs, TFLOP/s are of `flops` and the median of rounds. Ours is stopped if it is
wrong; a peer that is missing, fails or is wrong has no figure, and the row says why.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import cupy as cp
import numpy as np
from tqdm import tqdm

from numba_flash import attention, engines
from numba_flash.check import gpu_names
from numba_flash.problem import BFLOAT16, Problem
from reference.attention import standard_attention

from . import peers
from .first_call import DTYPES, compile_ahead
from .measure import batch_seconds, bytes_beyond_answer, flops, in_turn, table, wall_seconds, write_part

HIDDEN, TOKENS = 2048, 16384                    # heads * d, batch * n
HEAD_DIMS = (64, 128, 256)
MASKS = {"full": False, "causal": True}
# Relative Frobenius error: some three times what a right result has, and far less than one wrong tile makes of it.
LARGEST_ERROR = {"bfloat16": 6e-3, "float16": 1e-3}
CHECKED_ROWS = 128


@dataclass(frozen=True)
class Inputs:
    """Random q, k, v and room for o, as CuPy arrays; the same memory as PyTorch's tensors, or None without PyTorch.

    o is NaN at first, so that what a kernel leaves out is seen.
    """

    dtype: str
    arrays: list
    o: Any
    tensors: list | None
    o_tensor: Any

    @classmethod
    def of(cls, dtype, q_shape, k_shape=None, q_factor=1):
        shapes = [q_shape, *[k_shape or q_shape] * 2]
        if peers.why_not():
            rng = np.random.default_rng(0)
            arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
            arrays[0] *= q_factor
            *arrays, o = [cp.asarray(x.astype(DTYPES[dtype])) for x in (*arrays, np.full(q_shape, np.nan))]
            return cls(dtype, arrays, o, None, None)
        tensors = peers.normal(dtype, *shapes)
        tensors[0] *= q_factor
        o = peers.torch.full_like(tensors[0], np.nan)
        return cls(dtype, [peers.as_cupy(x) for x in tensors], peers.as_cupy(o), tensors, o)


# ---- nothing is timed before it is right -----------------------------------------------------------------------------

def in_float64(x):
    """A copy on the host."""
    return x.get().astype(np.float64)


def distance(x, right):
    """Relative Frobenius distance."""
    return float(np.linalg.norm(x - right) / np.linalg.norm(right))


def exact_last_rows(inputs, alibi_slopes=None, **options):
    """o of the last queries of the last head by the reference: they are a problem of their own, bottom right."""
    q, k, v = (in_float64(x[-1:, -1:]) for x in inputs.arrays)
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes[-1:]
    return standard_attention(q[:, :, -CHECKED_ROWS:], k, v, **options)


def not_measured(row, name, reason):
    """Say that a peer has no figure, on the spot and in the results."""
    reason = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
    tqdm.write(f"NOT MEASURED: {name}: {reason}", file=sys.stderr)
    row[f"{name} not measured"] = reason


def rivals(row, inputs, peer, make_peer, **options):
    """The call under test and its peer's, both found right.

    Parameters
    ----------
    row : dict
        Gets the reason if the peer can't be measured.
    inputs : Inputs
    peer : str
    make_peer : function
        ``make_peer(tensors, **options)`` returns the peer's call.
    **options
        Of `attention`; `alibi_slopes` as a NumPy array.

    Returns
    -------
    calls : dict
        Of "hopper" and, unless the row says why not, `peer`.
    """
    case = f"{inputs.dtype} {inputs.o.shape} {options}"
    given = {name: cp.asarray(x) if name == "alibi_slopes" else x for name, x in options.items()}

    def ours():
        attention(*inputs.arrays, out=inputs.o, kernel="hopper", **given)

    ours()
    limit, exact = LARGEST_ERROR[inputs.dtype], exact_last_rows(inputs, **options)
    off_by = distance(in_float64(inputs.o[-1:, -1:, -CHECKED_ROWS:]), exact)
    if not off_by <= limit:
        raise SystemExit(f"hopper is off by {off_by}, allowed {limit}, {case}: not timing a wrong result")
    calls = {"hopper": ours}
    if peers.why_not():
        row[f"{peer} not measured"] = peers.why_not()
        return calls
    try:
        call = make_peer(inputs.tensors, **options)
        theirs = call()
        off_by = distance(peers.last_rows(theirs, CHECKED_ROWS), exact)
        if not off_by <= limit:
            raise ValueError(f"it is off by {off_by}, allowed {limit}")
    except Exception as reason:                 # no kernel for this problem, no compiler for FlexAttention, no memory
        not_measured(row, peer, reason)
        return calls
    apart = peers.distance(inputs.o_tensor, theirs)
    if not apart <= limit:
        raise SystemExit(f"hopper and {peer} differ by {apart}, allowed {limit}, {case}: not timing a wrong result")
    return calls | {peer: call}


def add_speed(row, count, seconds):
    """Put TFLOP/s of the engine and its peers into a row, and the ratios."""
    row |= {f"{name} TFLOP/s": count / taken * 1e-12 for name, taken in seconds.items()}
    row |= {f"hopper / {peer}": taken / seconds["hopper"] for peer, taken in seconds.items() if peer != "hopper"}


# ---- the parts -------------------------------------------------------------------------------------------------------

def beside_cudnn(rounds, dtype, shape, kv_heads):
    """Rows of the engine and cuDNN at one shape, full and causal."""
    batch, heads, n, d = shape
    inputs = Inputs.of(dtype, shape, (batch, kv_heads, n, d))
    for mask, causal in MASKS.items():
        row = {"dtype": dtype, "batch": batch, "heads": heads, "kv_heads": kv_heads, "d": d, "n": n, "mask": mask}
        calls = rivals(row, inputs, "cudnn", peers.make_cudnn, causal=causal)
        add_speed(row, flops(batch, heads, n, n, d, causal=causal), in_turn(calls, batch_seconds, rounds))
        yield row


def speed_shapes():
    """(dtype, d, n): the usual head dims in both dtypes, and two between them."""
    return [*((dtype, d, n) for dtype in DTYPES for d in HEAD_DIMS for n in (1024, 4096, 16384)),
            *(("bfloat16", d, n) for d in (96, 192) for n in (4096, 16384))]


def geometric_means(rows):
    """Geometric mean of the ratios of each dtype over `HEAD_DIMS`, if all were measured."""
    means = {}
    for dtype in DTYPES:
        ratios = [row.get("hopper / cudnn") for row in rows if row["dtype"] == dtype and row["d"] in HEAD_DIMS]
        if ratios and None not in ratios:
            means[dtype] = geometric_mean(ratios)
    return means


def speed(rounds):
    """TFLOP/s at hidden size 2048 and 16384 tokens."""
    rows = [row for dtype, d, n in tqdm(speed_shapes(), desc="speed")
            for row in beside_cudnn(rounds, dtype, (TOKENS // n, HIDDEN // d, n, d), HIDDEN // d)]
    return {"rows": rows, "geometric mean": geometric_means(rows)}


def gqa(rounds):
    """TFLOP/s of 64 query heads on 8 key/value heads."""
    lengths = tqdm((2048, 4096, 8192, 16384, 32768), desc="gqa")
    return {"rows": [row for n in lengths
                     for row in beside_cudnn(rounds, "bfloat16", (1, 64, n, 128), kv_heads=8)]}


def option_groups(heads=16, width=1024):
    """{n: {name: options}}: plain attention first, then what is compared with it. A window shows `width` keys."""
    slopes = 2**(-8 * np.arange(1, heads + 1, dtype=np.float32) / heads)
    return {4096: {"plain": {}, "alibi": {"alibi_slopes": slopes}, "softcap": {"softcap": 20.0}},
            16384: {"causal": {"causal": True}, "window": {"causal": True, "window": (width - 1, 0)}}}


def options(rounds):
    """TFLOP/s on the pairs that an option leaves, beside plain attention and, compiled, FlexAttention."""
    rows, d = [], 128
    for n, group in tqdm(option_groups().items(), desc="options"):
        batch, heads = TOKENS // n, HIDDEN // d
        inputs = Inputs.of("bfloat16", (batch, heads, n, d))
        calls, of_group, plain = {}, {}, next(iter(group))
        for name, given in group.items():
            row = of_group[name] = {"option": name, "n": n, "mask": "causal" if "causal" in given else "full"}
            peer = ("cudnn", peers.make_cudnn) if name == plain else ("flex", peers.make_flex)
            calls |= {(name, rival): call for rival, call in rivals(row, inputs, *peer, **given).items()}
        seconds = in_turn(calls, batch_seconds, rounds)
        for name, row in of_group.items():
            left = group[name].get("window", (None,))[0]
            count = flops(batch, heads, n, n, d, causal=row["mask"] == "causal", left=left)
            add_speed(row, count, {rival: taken for (option, rival), taken in seconds.items() if option == name})
            row["of plain"] = row["hopper TFLOP/s"] / of_group[plain]["hopper TFLOP/s"]
        rows += of_group.values()
    return {"rows": rows}


def matmul(rounds, size=8192, n=16384):
    """TFLOP/s beside those of a bfloat16 matrix product, which is all tensor cores."""
    if peers.why_not():
        return None
    a, b = peers.normal("bfloat16", (size, size), (size, size))
    rows, calls, counts = [], {"matmul": lambda: a @ b}, {"matmul": 2 * size**3}
    for d in (128, 256):
        rows.append({"d": d, "n": n, "mask": "full"})
        shape = 1, HIDDEN // d, n, d
        calls[d] = rivals(rows[-1], Inputs.of("bfloat16", shape), "cudnn", peers.make_cudnn)["hopper"]
        counts[d] = flops(1, HIDDEN // d, n, n, d)
    seconds = in_turn(calls, batch_seconds, rounds)
    speeds = {name: counts[name] / taken * 1e-12 for name, taken in seconds.items()}
    for row in rows:
        ours = speeds[row["d"]]
        row |= {"hopper TFLOP/s": ours, "matmul TFLOP/s": speeds["matmul"], "share": ours / speeds["matmul"]}
    return {"rows": rows, "size": size}


def error(_):
    """Relative Frobenius error against float64 on normal inputs, and with scores six times as large."""
    rows = []
    cases = [(d, mask, factor) for d in HEAD_DIMS for mask in MASKS for factor in (1, 6)]
    for d, mask, factor in tqdm(cases, desc="error"):
        inputs, causal = Inputs.of("bfloat16", (1, 4, 1024, d), q_factor=factor), MASKS[mask]
        exact = standard_attention(*map(in_float64, inputs.arrays), causal=causal)
        row = {"dtype": "bfloat16", "d": d, "n": 1024, "mask": mask, "q factor": factor}
        calls = rivals(row, inputs, "cudnn", peers.make_cudnn, causal=causal)
        calls["hopper"]()
        row["hopper error"] = distance(in_float64(inputs.o), exact)
        if "cudnn" in calls:
            row["cudnn error"] = distance(in_float64(peers.as_cupy(calls["cudnn"]().contiguous())), exact)
            row["hopper / cudnn"] = row["hopper error"] / row["cudnn error"]
        rows.append(row)
    return {"rows": rows}


def host(rounds, batch=50):
    """Median µs of the host's time for one call at (1, 1, 128, 64), which returns before the device is done."""
    inputs = Inputs.of("float16", (1, 1, 128, 64))
    calls = {f"numba_flash {kernel}": (lambda kernel=kernel: attention(*inputs.arrays, kernel=kernel), nullcontext)
             for kernel in ("auto", "hopper")}
    missing = {}
    right = rivals(missing, inputs, "cudnn", peers.make_cudnn)
    if not peers.why_not():
        attend = peers.make_sdpa(inputs.tensors)
        calls["torch default"] = attend, nullcontext
        if "cudnn" in right:
            calls["torch cudnn"] = attend, peers.cudnn

    def make_batch(call, context):
        def run():
            with context():                     # once: entering it is no part of a call
                for _ in range(batch):
                    call()
        return run

    def seconds_of(run):
        cp.cuda.Device().synchronize()
        return wall_seconds(run) / batch

    seconds = in_turn({name: make_batch(*pair) for name, pair in calls.items()}, seconds_of, 3 * rounds)
    return {"rows": [{"call": name, "us": taken * 1e6} for name, taken in seconds.items()], **missing}


def first_calls(_):
    """Seconds of the first call beyond a later one's, in fresh processes: with an empty cache folder, then filled."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for d, cache in tqdm([(d, cache) for d in HEAD_DIMS for cache in ("empty", "filled")], desc="compile"):
            done = subprocess.run(
                [sys.executable, "-c", f"from bench.first_call import print_seconds; print_seconds('bfloat16', {d})"],
                env={**os.environ, "NUMBA_FLASH_CACHE": folder}, stdout=subprocess.PIPE, text=True, check=True)
            taken = json.loads(done.stdout.splitlines()[-1])
            rows.append({"d": d, "cache": cache, "import s": taken["import s"],
                         "first call s": taken["first s"] - taken["later s"]})
    return {"rows": rows}


def memory(_):
    """Bytes beyond inputs, o and lse that a call takes from a pool of its own."""
    rows = []
    for d in HEAD_DIMS:
        q, k, v = Inputs.of("bfloat16", (1, HIDDEN // d, 16384, d)).arrays
        for mask, causal in MASKS.items():
            beyond = bytes_beyond_answer(lambda: attention(q, k, v, causal=causal, return_lse=True, kernel="hopper"))
            rows.append({"d": d, "n": 16384, "mask": mask, "bytes": beyond})
    return {"rows": rows}


PARTS = {"speed": speed, "gqa": gqa, "options": options, "matmul": matmul, "error": error, "host": host,
         "compile": first_calls, "memory": memory}
PLAIN = [("bfloat16", d) for d in HEAD_DIMS]
KERNELS = {"speed": [*((dtype, d) for dtype in DTYPES for d in HEAD_DIMS), ("bfloat16", 96), ("bfloat16", 192)],
           "gqa": [("bfloat16", 128)], "options": [("bfloat16", 128), ("bfloat16", 128, 20.0),
                                                   ("bfloat16", 128, None, True)],
           "matmul": PLAIN[1:], "error": PLAIN, "host": [("float16", 64)], "compile": [], "memory": PLAIN}


def show(rows, **more):
    """Print a part; why a peer was not measured was said when it was not."""
    table(rows, [column for column in dict.fromkeys(column for row in rows for column in row)
                 if not column.endswith("not measured")])
    for name, value in more.items():
        print(f"{name}: {value}")


def main(path, quick=False, parts=tuple(PARTS)):
    """Measure, print, store, part by part."""
    if not set(parts) <= set(PARTS):
        raise SystemExit(f"the parts are {', '.join(PARTS)}; got {', '.join(parts)}")
    reason = engines.load("hopper").why_not(Problem(1, 1, 1, 64, 64, 64, 64, BFLOAT16, 0.125, 0, 128, 128))
    if reason:
        raise SystemExit(f"bench hopper can't run here: {reason}")
    if peers.why_not():
        print(f"{peers.why_not()}: ours alone is measured", file=sys.stderr)
    circumstances = {"gpu": next(gpu_names()), "cuda_driver": cp.cuda.runtime.driverGetVersion(), **peers.versions()}
    compile_ahead(sorted({kernel for part in parts for kernel in KERNELS[part]}, key=str))
    with peers.on_stream():
        for name in (part for part in PARTS if part in parts):
            print(f"\n{name}: {PARTS[name].__doc__}", flush=True)
            result = PARTS[name](2 if quick else 5)
            if result is None:
                print(f"NOT MEASURED: {name}: {peers.why_not()}", file=sys.stderr)
                continue
            show(**result)
            write_part(path, name, **circumstances, **result)
