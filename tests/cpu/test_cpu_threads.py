"""The engine in a process: many Python threads, fork, one thread, the disk cache, warnings."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import Engine, problem

from numba_flash import cpu
from numba_flash.cpu import threads

CPU = Engine("cpu", "numpy")
ONE_CALL = ("import numpy as np, numba_flash as nf; x = np.ones((1, 2, 40, 8), np.float32); "
            "assert (nf.attention(x, x, x) == 1).all()")


def python(code, **environment):
    """Run code in a fresh interpreter, with every warning an error."""
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})


def test_many_python_threads_at_once():
    arguments = [problem(seed, n_q=300, n_k=200) for seed in range(8)]
    right = [CPU.both(*a) for a in arguments]
    got = [None] * len(arguments)
    start = threading.Barrier(len(arguments))

    def work(i):
        start.wait()
        for _ in range(3):
            got[i] = CPU.both(*arguments[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(arguments))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for one, other in zip(got, right):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_call_after_fork(monkeypatch):
    monkeypatch.setattr(cpu, "thread_count", lambda: 2)
    arguments = problem(n_q=600, n_k=100)
    right = CPU.both(*arguments)
    code = ONE_CALL + ("; import os, numba_flash.cpu as cpu; cpu.thread_count = lambda: 2; y = np.ones((1, 8, 600, 8), "
                       "np.float32); nf.attention(y, y, y); child = os.fork(); nf.attention(y, y, y); "
                       "os._exit(0) if not child else None; assert os.waitpid(child, 0)[1] == 0")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert result.returncode == 0, result.stderr
    for x, y in zip(CPU.both(*arguments), right, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("count", (1, 2, 5))
def test_forward_does_not_depend_on_the_number_of_threads(count, monkeypatch):
    _, q, k, v = problem(heads=3, n_q=600, n_k=100)
    right = CPU.attention(q, k, v)
    monkeypatch.setattr(cpu, "thread_count", lambda: count)
    for x, y in zip(CPU.attention(q, k, v), right, strict=True):
        np.testing.assert_array_equal(x, y)


def test_thread_count_is_bounded(monkeypatch):
    monkeypatch.setattr(threads.config, "NUMBA_NUM_THREADS", 10**6)
    assert 1 <= threads.thread_count() <= os.cpu_count()
    monkeypatch.setattr(threads.config, "NUMBA_NUM_THREADS", 1)
    assert threads.thread_count() == 1


def test_an_error_in_a_worker_comes_out():
    def work(worker, counter):
        if worker == 1:
            raise MemoryError

    def works_until_the_helper_has_started(worker, counter):
        if worker == 1:
            started.set()
        else:
            started.wait()
        work(worker, counter)

    started = threading.Event()
    with pytest.raises(MemoryError):
        threads.run(works_until_the_helper_has_started, 2)


def test_a_system_that_starts_no_more_threads(monkeypatch):
    """The call must not return before every worker that did start has finished."""
    starts, real = [], threading.Thread.start

    def start(thread):
        starts.append(thread)
        if len(starts) > 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threads, "_pool", None)
    monkeypatch.setattr(threads, "thread_count", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", start)
    done = []

    def work(worker, counter):
        if worker:
            time.sleep(0.2)
        done.append(worker)

    threads.run(work, 4)
    finished = len(done)
    time.sleep(0.5)
    assert len(done) == finished and 0 in done


def test_deterministic_gradients_do_not_depend_on_the_number_of_threads(monkeypatch):
    do, q, k, v = problem(heads=1, n_q=700, n_k=300)
    o, lse = CPU.attention(q, k, v)
    answers = []
    for count in (1, 2, 5):
        monkeypatch.setattr(cpu, "thread_count", lambda count=count: count)
        answers.append(CPU.attention_backward(do, q, k, v, o, lse, deterministic=True))
    for answer in answers[1:]:
        for x, y in zip(answer, answers[0], strict=True):
            np.testing.assert_array_equal(x, y)


def test_the_second_process_compiles_nothing(tmp_path):
    code = ("from numba.core import event\nwith event.install_recorder('numba:compile') as recorder:\n    " + ONE_CALL
            + "\nprint(len(recorder.buffer))")
    first, second = (python(code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert int(first.stdout) > 0 and int(second.stdout) == 0
