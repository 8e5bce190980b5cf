"""One problem and several ways to compute it: each is checked, then they take turns, and a `Row` says how they did.

Every benchmark of speed is this, for problems and rivals of its own::

    inputs = Inputs.of("bfloat16", (4, 16, 4096, 128))
    row = prepare({"n": 4096}, inputs, {"hopper": engine("hopper"), "cudnn": sdpa("cudnn")}, flops(...))
    take_turns([row], rounds=5)

A rival is a function ``make(inputs, backward, **options)`` that returns a `Call`. The first of a row is ours. One that
is missing, refuses the problem, fails or is wrong has no figures, and the row says why; the others go on.
"""

import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from numba_flash import arrays, attention, attention_backward
from numba_flash.problem import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

from .measure import awake_seconds, batch_seconds, in_turn, wall_seconds

DTYPES = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32, "float64": FLOAT64}
# Relative Frobenius error: some three times what a right result has, and far less than one wrong tile makes of it.
LARGEST_ERROR = {"bfloat16": 8e-3, "float16": 1.5e-3, "float32": 1e-4, "float64": 1e-12}
CHECKED_ROWS = 1024             # of queries at a time, when the right answer is computed


@dataclass(frozen=True)
class Inputs:
    """Random do, q, k, v as CuPy or NumPy arrays of one dtype, which has a name."""

    dtype: str
    arrays: list

    @classmethod
    def of(cls, dtype, q_shape, k_shape=None, gpu=True, q_factor=1):
        """Normal numbers, the same in every run; q is `q_factor` times as large."""
        shapes = q_shape, q_shape, k_shape or q_shape, k_shape or q_shape
        if gpu:
            import cupy as xp
        else:
            xp = np
        rng = xp.random.default_rng(0)
        do, q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
        q *= q_factor
        return cls(dtype, [x.astype(DTYPES[dtype]) for x in (do, q, k, v)])

    @property
    def xp(self):
        return arrays.namespace(self.arrays[0])

    @property
    def on_gpu(self):
        return self.xp is not np

    def put(self, options):
        """Options of `attention`, with arrays where the inputs are."""
        return {name: self.xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


@dataclass(frozen=True)
class Call:
    """One way to compute the problem, ready to run.

    Attributes
    ----------
    run : function
        Returns (o,) or (dq, dk, dv), in whatever form.
    context : function
        Returns the context to run in; entering it is no part of a call.
    as_arrays : function
        Makes NumPy or CuPy arrays, (batch, heads, n, d), of what `run` returned.
    clock : function, optional
        How to time it, if not as the others.
    right : float, optional
        The largest relative error of a right result, if it isn't that of the dtype.
    """

    run: Callable
    context: Callable = nullcontext
    as_arrays: Callable = list
    clock: Callable | None = None
    right: float | None = None


@dataclass
class Row:
    """What came of one problem.

    Attributes
    ----------
    case : dict
        What the problem is, for people.
    count : float
        Operations, or bytes, of the problem.
    unit : str
        "TFLOP/s", "GFLOP/s" or "GB/s"; or "us" for the time alone.
    calls : dict
        Name to `Call`, of the rivals that were right.
    figures : dict
        Name to what is known of a rival: {"ms": ..., "TFLOP/s": ..., "of ceiling": ..., "error": ...,
        "first call s": ...} or {"not measured": "reason"}.
    dtype : str
    on_gpu : bool
    seconds : dict
        Name to the median, of those that were timed.
    """

    case: dict
    count: float
    unit: str
    dtype: str
    on_gpu: bool
    calls: dict = field(default_factory=dict)
    figures: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=dict)

    def refuse(self, name, reason):
        """Say that a rival has no figures, on the spot and in the results."""
        reason = next(iter(str(reason).strip().splitlines()), "") or type(reason).__name__
        reason = re.sub(r"^kernel='\w+' can't do this problem: (.*); kernel='auto' picks one that can$", r"\1", reason)
        tqdm.write(f"NOT MEASURED: {name}, {_words(self.case)}: {reason}", file=sys.stderr)
        self.figures[name] = {"not measured": reason}
        self.calls.pop(name, None)

    def enter(self, name, seconds, ceiling=None):
        """Put down how long a rival took; `ceiling` is the most that the machine does of the unit."""
        self.seconds[name] = seconds
        if self.unit == "us":
            self.figures[name]["us"] = seconds * 1e6
            return
        speed = self.count / seconds * {"TFLOP/s": 1e-12, "GFLOP/s": 1e-9, "GB/s": 1e-9}[self.unit]
        self.figures[name] |= {"ms": seconds * 1e3, self.unit: speed}
        if ceiling:
            self.figures[name]["of ceiling"] = speed / ceiling

    def ratios(self):
        """"ours / peer" to how many times as fast ours is."""
        ours = self.ours()
        return {f"{ours} / {name}": taken / self.seconds[ours] for name, taken in self.seconds.items() if name != ours}

    def ours(self):
        """The first rival that was measured."""
        return next((name for name in self.figures if name in self.seconds), None)

    def stored(self):
        """The row for JSON: flat."""
        flat = {f"{name} {what}": x for name, figures in self.figures.items() for what, x in figures.items()}
        return {**self.case, **flat, **self.ratios()}

    def lines(self):
        """The row for a table: a line for each rival."""
        ratios, ours = self.ratios(), self.ours()
        for name, figures in self.figures.items():
            known = {what: x for what, x in figures.items() if what not in ("of ceiling", "not measured")}
            if "of ceiling" in figures:
                known["% of ceiling"] = 100 * figures["of ceiling"]
            if f"{ours} / {name}" in ratios:
                known[f"{ours} / it"] = ratios[f"{ours} / {name}"]
            yield {**self.case, "by": name, **known, "not measured": figures.get("not measured", "")}


def _words(case):
    return ", ".join(f"{name} {x}" for name, x in case.items())


# ---- ours ------------------------------------------------------------------------------------------------------------

def engine(kernel, deterministic=False, right=None, **given):
    """A rival: the engine of that name, with options of its own."""
    def make(inputs, backward, **options):
        do, q, k, v = inputs.arrays
        options = {**inputs.put(options), **given, "kernel": kernel}
        if not backward:
            return Call(lambda: (attention(q, k, v, **options),), right=right)
        o, lse = attention(q, k, v, return_lse=True, **options)
        return Call(lambda: attention_backward(do, q, k, v, o, lse, deterministic=deterministic, **options),
                    right=right)

    return make


# ---- nothing is timed before it is right -----------------------------------------------------------------------------

def exact(inputs, backward, alibi_slopes=None, **options):
    """What is right for the last key/value head and its query heads, in float64.

    The oracle's formula, as the engine `standard` has it, which also runs on a GPU (`tests/bench/test_contest.py`
    holds the two together); some queries at a time, with the keys up to theirs if causal, which keeps the alignment.

    Returns
    -------
    answer : list of array
        o, or dq, dk and dv, of shape (1, heads, n, d).
    """
    xp, group = inputs.xp, inputs.arrays[1].shape[1] // inputs.arrays[2].shape[1]
    do, q, k, v = (last_head(x, group if i < 2 else 1) for i, x in enumerate(inputs.arrays))
    n_q, n_k = q.shape[2], k.shape[2]
    o, dq, dk, dv = (xp.zeros_like(x) for x in (q, q, k, v))
    for first in range(0, n_q, CHECKED_ROWS):
        rows = slice(first, min(first + CHECKED_ROWS, n_q))
        keys = slice(0, max(0, rows.stop + n_k - n_q) if options.get("causal") else n_k)
        if alibi_slopes is not None:
            distance = abs(xp.arange(rows.start, rows.stop)[:, None] + n_k - n_q - xp.arange(keys.stop))
            options["bias"] = -xp.asarray(alibi_slopes[-group:], np.float64)[:, None, None] * distance
        part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        o[:, :, rows], lse = attention(*part, return_lse=True, kernel="standard", **options)
        if backward:
            dq[:, :, rows], dk_part, dv_part = attention_backward(do[:, :, rows], *part, o[:, :, rows], lse,
                                                                  kernel="standard", **options)
            dk[:, :, keys] += dk_part
            dv[:, :, keys] += dv_part
    return [dq, dk, dv] if backward else [o]


def last_head(x, heads):
    """The last heads of the last batch, in float64."""
    return exactly(x[-1:, -heads:]).astype(np.float64)


def exactly(x):
    """Numbers of 16 bits in float32, from which CuPy converts; others as they are."""
    return x if x.dtype.itemsize > 2 else x.astype(np.float32)


def distance(x, right):
    """Relative Frobenius distance."""
    x, right = x.astype(right.dtype), right.ravel()
    norm = arrays.namespace(right).linalg.norm
    return float(norm(x.ravel() - right) / norm(right))


def apart(answer, others):
    """The largest `distance` of two answers, everywhere."""
    return worst(distance(x, exactly(other)) for x, other in zip(answer, others))


def worst(distances):
    """The largest; NaN if one is, which `max` would pass over."""
    return float(np.max(list(distances)))


def leave_nan(inputs):
    """Leave NaN in the memory that is handed out next, so that what a kernel forgets to write is seen."""
    for x in inputs.arrays:
        inputs.xp.empty_like(x).view(f"u{x.itemsize}")[...] = 2**(8 * x.itemsize) - 1      # a NaN in every dtype


def prepare(case, inputs, rivals, count, unit="TFLOP/s", backward=False, **options):
    """The row of a problem, with the calls of all rivals that get it right.

    Parameters
    ----------
    case : dict
    inputs : Inputs
    rivals : dict
        Name to function; see the module.
    count, unit
        See `Row`.
    backward : bool
        Whether gradients are asked for.
    **options
        Of `attention`; `alibi_slopes` as a NumPy array.

    Returns
    -------
    row : Row
    """
    give_memory_back(inputs.on_gpu)
    row, limit = Row(case, count, unit, inputs.dtype, inputs.on_gpu), LARGEST_ERROR[inputs.dtype]
    row.figures = {name: {} for name in rivals}         # in this order, whoever fails
    first = first_answer = None
    try:
        right = exact(inputs, backward, **options)
    except Exception as reason:
        right = reason
    for name, make in rivals.items():
        try:
            if isinstance(right, Exception):
                raise RuntimeError(f"the right answer could not be computed: {right}")
            answer, error, seconds, call = _try(make, inputs, backward, right, options)
            right_to = call.right or limit
            if not error <= right_to:
                raise ArithmeticError(f"it is off by {error:.2g}, allowed {right_to}: not timing a wrong result")
            if first is None:
                first, first_answer = name, answer
            elif not apart(answer, first_answer) <= right_to:
                reason = f"{name} and {first} differ by {apart(answer, first_answer):.2g}, allowed {right_to}"
                row.refuse(first, reason)
                raise ArithmeticError(reason)
        except Exception as reason:             # no kernel for this problem, no compiler, no memory
            row.refuse(name, reason)
            continue
        row.calls[name] = call
        row.figures[name] = {"error": error, "first call s": seconds}
    return row


def _try(make, inputs, backward, right, options):
    """A rival's first answer, its relative error, the seconds that it took, and its call."""
    leave_nan(inputs)
    start = time.perf_counter()
    call = make(inputs, backward, **options)
    with call.context():
        answer = call.as_arrays(call.run())
    wait(inputs.on_gpu)
    seconds = time.perf_counter() - start
    error = worst(distance(last_head(x, y.shape[1]), y) for x, y in zip(answer, right))
    return answer, error, seconds, call


def give_memory_back(on_gpu):
    """Free what CuPy's and PyTorch's pools keep: of the next problem everything has another size."""
    if on_gpu:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


def wait(on_gpu):
    """Until the device is done."""
    if on_gpu:
        import cupy

        cupy.cuda.Device().synchronize()


# ---- time ------------------------------------------------------------------------------------------------------------

def take_turns(rows, rounds, ceilings=None, clock=None):
    """Time all calls of some rows in turn, and put the medians into the rows.

    Parameters
    ----------
    rows : list of Row
    rounds : int
    ceilings : dict, optional
        Most that the machine does of the unit, by dtype.
    clock : function, optional
        Seconds of a call; by default a fitting one of `measure`.
    """
    def seconds_of(place, clock=clock):
        i, name = place
        call = rows[i].calls.get(name)
        if call is None:
            return np.nan                       # it failed before
        try:
            with call.context():
                return (call.clock or clock or (batch_seconds if rows[i].on_gpu else awake_seconds))(call.run)
        except Exception as reason:             # too little memory, say, for all at once
            rows[i].refuse(name, f"while timing: {reason}")
            return np.nan

    def warm(place):
        seconds_of(place, clock=wall_seconds)

    places = {(i, name): (i, name) for i, row in enumerate(rows) for name in row.calls}
    for (i, name), seconds in in_turn(places, seconds_of, rounds, warm).items():
        if name in rows[i].calls:
            rows[i].enter(name, seconds, (ceilings or {}).get(rows[i].dtype))


def measured(case, inputs, rivals, count, rounds, ceilings=None, clock=None, **options):
    """`prepare` and `take_turns` for a single problem."""
    row = prepare(case, inputs, rivals, count, **options)
    take_turns([row], rounds, ceilings, clock)
    return row


def shape(inputs):
    """Sizes of a problem, for a row's case."""
    (batch, heads, n, d), kv_heads = inputs.arrays[1].shape, inputs.arrays[2].shape[1]
    return {"dtype": inputs.dtype, "batch": batch, "heads": heads, "kv_heads": kv_heads, "d": d, "n": n}
