"""Worker threads: one kernel call each, which takes tasks from a shared counter until there are none left.

Kernels release the GIL, so plain Python threads run side by side; Numba's own threading layers are not used, since they
abort when two Python threads call them at once or when the process forks.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

_pool = None


def _forget_pool():
    """The threads of the parent do not exist in a forked child."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def thread_count():
    """NUMBA_NUM_THREADS, but no more than the CPUs that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(config.NUMBA_NUM_THREADS, allowed))


@intrinsic
def next_task(typing, counter):
    """Take a number from a counter that several threads share: 0, 1, 2, ..."""

    def codegen(context, builder, sig, args):
        array = make_array(sig.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


def run(work, workers):
    """Call ``work(worker, counter)`` for every worker number, on as many threads as are free.

    The calling thread is worker 0. It goes on until no task is left, so a worker that the pool has not started by then
    (it is busy with another call, or can't start a thread) is not needed any more, and does nothing when it starts.
    """
    counter = np.zeros(1, np.int64)
    changed, running, closed, errors = threading.Condition(), 0, False, []

    def help_out(worker):
        nonlocal running
        with changed:
            if closed:
                return
            running += 1
        try:
            work(worker, counter)
        except BaseException as error:
            errors.append(error)
        finally:
            with changed:
                running -= 1
                changed.notify_all()

    _submit(help_out, workers)
    try:
        work(0, counter)
    finally:
        with changed:
            closed = True
            changed.wait_for(lambda: running == 0)
    if errors:
        raise errors[0]


def _submit(help_out, workers):
    global _pool
    if workers == 1:
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(max(1, thread_count() - 1), thread_name_prefix="numba_flash")
    try:
        for worker in range(1, workers):
            _pool.submit(help_out, worker)
    except RuntimeError:        # no more threads: the system has no more, or the interpreter is shutting down
        pass
