"""Numba's simulator with two parts changed: memory is watched, and the threads of a block run one at a time.

Numba's own simulator lets the threads of a block run as they like. Here each runs until it ends or comes to a barrier,
then the next one does; when all have come to the barrier, the first goes on. So a run is the same every time, nothing
can hang, and it is plain which threads have come to which barrier.

A race needs no bad luck to be found: two threads that touch the same element between two barriers, at least one of them
writing, are a race in whatever order they ran. Between blocks there is no barrier at all.
"""

import linecache
import re
import sys
import threading
import time
import warnings
from collections import defaultdict, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from . import Counts
from .faults import Fault, Stopped, raised, show_line, show_place

Dim3 = namedtuple("Dim3", "x y z")
Access = namedtuple("Access", "thread line kind")
RIVALS = {"reads": ("writes", "atomically adds to"), "writes": ("writes", "reads", "atomically adds to"),
          "atomically adds to": ("writes", "reads")}        # for one element, two atomic operations make no race
PIECE = 32              # bytes that a GPU moves to and from global memory at a time
WARP = 32
SECONDS = 20            # for one launch; a solution takes less than one


class Accesses:
    """Who has touched what since everybody last waited for everybody, and who may not touch it now."""

    def __init__(self):
        self.found = {kind: defaultdict(dict) for kind in RIVALS}

    def add(self, place, who, access):
        """Remember an access of `who` to a place; return an earlier one that makes a race with it, or None."""
        self.found[access.kind][place].setdefault(who, access)
        return next((earlier for kind in RIVALS[access.kind] for other, earlier in self.found[kind][place].items()
                     if other != who), None)


@dataclass
class Origin:
    """An array as it was made, before anybody took parts of it."""

    name: str
    shape: tuple
    shared: bool = False
    writable: bool = True
    unwritten: set = field(default_factory=set)     # places that nobody has written yet
    by_thread: Accesses = field(default_factory=Accesses)
    by_block: Accesses = field(default_factory=Accesses)

    def element(self, place):
        """Name of one element."""
        return f"{self.name}[{', '.join(str(int(i)) for i in np.unravel_index(place, self.shape))}]"


class Array:
    """An array, or a part of one, in a kernel: each element that is read or written is told to `memory`.

    It can what arrays can in a compiled kernel: indices, parts, shape; no arithmetic on whole arrays.
    """

    __array_ufunc__ = None

    def __init__(self, memory, origin, values, places=None):
        self._memory, self._origin, self._values = memory, origin, values
        self._places = np.arange(values.size).reshape(values.shape) if places is None else places

    shape = property(lambda self: self._values.shape)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    dtype = property(lambda self: self._values.dtype)
    T = property(lambda self: Array(self._memory, self._origin, self._values.T, self._places.T))

    def __len__(self):
        return len(self._values)

    def _at(self, index):
        try:
            return self._places[index]
        except IndexError as error:
            if "only integers" in str(error):
                raise IndexError(f"an index of {self._origin.name} must be an integer, got {index}") from None
            verb = "too many indices for" if "too many" in str(error) else "an index outside of"
            raise IndexError(f"{verb} {self._origin.name}, whose shape is {self.shape}: "
                             f"{index}. On a GPU this reads or writes foreign memory, without an error.") from None

    def __getitem__(self, index):
        places = self._at(index)
        if isinstance(places, np.ndarray) and places.ndim:
            return Array(self._memory, self._origin, self._values[index], places)
        self._memory.touch(self._origin, int(places), False)
        return self._values[index]

    def __setitem__(self, index, value):
        places = self._at(index)
        if not self._origin.writable:
            raise Fault(f"The kernel writes to {self._origin.name}, which is an input.\n"
                        f"{show_line(self._memory.path, self._memory.line())}")
        for place in np.ravel(places):
            self._memory.touch(self._origin, int(place), True)
        self._values[index] = value


class Memory:
    """Global memory, the shared memory of the block that runs, and what is done to them.

    Parameters
    ----------
    path : str
        The learner's file.
    """

    def __init__(self, path):
        self.path, self.atomic = str(path), False       # atomic: inside of an atomic operation
        self.counts = {(shared, writes): defaultdict(int) for shared in (False, True) for writes in (False, True)}
        self.moved = defaultdict(set)       # by each warp at each step: numbers of pieces
        self.steps = defaultdict(int)       # how often a thread has been at a place of the code
        self.origins, self.shared, self.arrays = [], {}, {}
        self.raced = self.early = None      # the first race, the first element that was read too early: in words

    def add(self, name, values, writable):
        """An array of global memory for a kernel."""
        origin = Origin(name, values.shape, writable=writable)
        origin.unwritten = set(range(values.size)) if writable else set()
        self.origins.append(origin)
        return Array(self, origin, values)

    def line(self):
        """The line of the learner's code that runs now."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return frame.f_lineno

    def touch(self, origin, place, writes):
        """A thread reads or writes one element."""
        thread, line = threading.current_thread(), self.line()
        self.tally(origin, place, writes, thread, line)
        self.judge(origin, place, writes, thread, line)

    def tally(self, origin, place, writes, thread, line):
        """Count an access, and the piece of global memory that it moves."""
        if not self.atomic or writes:
            self.counts[origin.shared, writes][thread.place] += 1
        if self.atomic and writes:              # one read and one write, however Numba's simulator does it
            self.counts[origin.shared, False][thread.place] += 1
        if not origin.shared:
            site = line, writes, origin.name
            self.steps[thread.place, site] += 1
            warp = thread.blockIdx, thread.number // WARP
            self.moved[warp, site, self.steps[thread.place, site]].add(place * 4 // PIECE)

    def judge(self, origin, place, writes, thread, line):
        """Find out whether an access makes a race, or reads what has no value yet; `barrier` will tell."""
        if writes:
            origin.unwritten.discard(place)
        if not self.raced:
            access = Access(thread, line, "atomically adds to" if self.atomic else "writes" if writes else "reads")
            rival = origin.by_thread.add(place, thread.threadIdx, access)
            if rival is None and not origin.shared:
                rival = origin.by_block.add(place, thread.blockIdx, access)
            self.raced = rival and self.race(origin, place, access, rival)
        if origin.shared and place in origin.unwritten and not self.early:
            self.early = (f"{thread.title} reads {origin.element(place)}, which no thread has written: shared memory "
                          f"begins with whatever an earlier block left there.\n{show_line(self.path, line)}")

    def race(self, origin, place, access, rival):
        """Explain a race."""
        def say(access):
            return f"  {access.thread.title} {access.kind} it\n  {show_line(self.path, access.line)}"

        same_block = access.thread.blockIdx == rival.thread.blockIdx
        advice = ("No barrier lies between the two, so on a GPU nobody knows which comes first. Put cuda.syncthreads() "
                  "where all threads of the block pass between them, or let one thread alone write this element."
                  if same_block else
                  "Blocks run in no particular order, and no barrier holds more than one block: an element of global "
                  "memory that one block writes, no other block may touch.")
        return f"A race for {origin.element(place)}:\n{say(rival)}\n{say(access)}\n{advice}"

    def barrier(self):
        """All threads of the block have come: what was done before is no rival of what is done from now on.

        Faults of memory are told only now. That not all threads came to the barrier would explain a race, and a race
        would explain that an element was read before it was written.
        """
        self.tell()
        for origin in (*self.origins, *self.shared.values()):
            origin.by_thread = Accesses()

    def tell(self):
        """Raise what was found to be wrong so far."""
        if self.raced or self.early:
            raise Fault(self.raced or self.early)

    def start_block(self):
        """A block starts: it has shared memory of its own, and nothing in it."""
        self.barrier()
        self.shared, self.arrays = {}, {}

    def start_kernel(self):
        """A kernel starts when the one before has ended."""
        self.steps.clear()
        for origin in self.origins:
            origin.by_thread, origin.by_block = Accesses(), Accesses()

    def shared_array(self, shape, dtype):
        """`cuda.shared.array`: the same array for all threads of a block that come to this place of the code."""
        line, place = self.line(), threading.current_thread().place
        self.steps[place, line] += 1
        site = line, self.steps[place, line]            # a line may make several
        if site not in self.shared:
            values = new_array(shape, dtype)
            named = re.match(r"\s*(\w+)\s*=", linecache.getline(self.path, line))
            name = named[1] if named else f"the shared array of line {line}"
            self.shared[site] = Origin(name, values.shape, shared=True, unwritten=set(range(values.size)))
            self.arrays[site] = Array(self, self.shared[site], values)
        return self.arrays[site]

    def count(self):
        """All that was counted so far."""
        def busiest(shared, writes):
            return max(self.counts[shared, writes].values(), default=0)

        return Counts(busiest(False, False), busiest(False, True), busiest(True, False), busiest(True, True),
                      sum(map(len, self.moved.values())))


def new_array(shape, dtype):
    """An array whose elements have no value yet: NaN where there is one."""
    values = np.zeros(shape, dtype if isinstance(dtype, (np.dtype, type)) else str(dtype))     # or one of Numba's types
    if values.dtype.kind == "f":
        values.fill(np.nan)
    return values


class Thread(threading.Thread):
    """One thread of a block. Numba's simulator asks it for `threadIdx` and `blockIdx` and calls its barriers."""

    def __init__(self, run, block, blockIdx, threadIdx, number):
        super().__init__(daemon=True)
        self.body, self.block, self.blockIdx, self.threadIdx, self.number = run, block, blockIdx, threadIdx, number
        self.place, self.thread_id = (blockIdx, threadIdx), number
        self.title = f"thread {show_place(threadIdx, block.shape)} of block {show_place(blockIdx, block.grid)}"
        self.turn = threading.Semaphore(0)
        self.barrier = self.error = None        # line of the barrier where it waits; what it raised

    def run(self):
        self.turn.acquire()
        try:
            if not self.block.stopped:
                self.body()
        except BaseException as error:          # SystemExit too: the block must hear of it
            self.error = error
        self.barrier = None
        self.block.arrived.release()

    def syncthreads(self):
        self.barrier = self.block.memory.line()
        self.block.arrived.release()
        self.turn.acquire()
        if self.block.stopped:
            raise Stopped

    def syncthreads_count(self, value):
        self.vote = bool(value)
        self.syncthreads()
        count = sum(thread.vote for thread in self.block.threads)
        self.syncthreads()                      # or a fast thread votes again before others have counted
        return count

    def syncthreads_and(self, value):
        return int(self.syncthreads_count(value) == len(self.block.threads))

    def syncthreads_or(self, value):
        return int(self.syncthreads_count(value) > 0)


class Block:
    """One block; takes the place of Numba's BlockManager."""

    def __init__(self, kernel, grid, shape, memory, stop_at):
        self.kernel, self.grid, self.shape, self.memory, self.stop_at = kernel, grid, shape, memory, stop_at
        self.arrived, self.stopped, self.threads = threading.Semaphore(0), False, []

    def run(self, grid_point, *args):
        """Run all threads to their ends, from barrier to barrier."""
        width, height, depth = self.shape
        places = [Dim3(x, y, z) for z in range(depth) for y in range(height) for x in range(width)]
        self.threads = [Thread(lambda: self.kernel(*args), self, Dim3(*map(int, grid_point)), place, number)
                        for number, place in enumerate(places)]
        self.memory.start_block()
        try:
            for thread in self.threads:
                thread.start()
            while self.until_the_next_barrier():
                pass
        finally:
            self.stopped = True
            for thread in self.threads:
                thread.turn.release()

    def until_the_next_barrier(self):
        """Let each thread run in its turn; return whether all wait now, and have not ended."""
        for thread in self.threads:
            thread.turn.release()
            arrived = self.arrived.acquire(timeout=max(self.stop_at - time.monotonic(), 0.01))
            if not arrived or time.monotonic() > self.stop_at:      # an endless loop may arrive again and again
                raise Fault(self.endless(thread))
            if thread.error:
                self.memory.tell()          # what is wrong with memory may have led to the error
            if isinstance(thread.error, Fault):
                raise thread.error
            if thread.error:
                raise raised(thread.error, self.memory.path, thread.title)
        lines = {thread.barrier: thread for thread in reversed(self.threads)}      # with the first thread of each
        if len(lines) > 1:
            raise Fault(self.diverged(lines))
        self.memory.barrier()
        return None not in lines

    def diverged(self, lines):
        """Explain a barrier that only some threads reach."""
        path, text = self.memory.path, ["A barrier that only some threads of a block reach:"]
        for line, thread in sorted(lines.items(), key=lambda item: item[1].number):
            count = sum(other.barrier == line for other in self.threads)
            others = f" and {count - 1} more" if count > 1 else ""
            text.append(f"  {thread.title}{others}: " + (
                f"at the barrier of\n  {show_line(path, line)}" if line else "at the end, not at any barrier"))
        text.append("cuda.syncthreads() holds every thread until all have come, so a GPU may wait for ever, or go on "
                    "with wrong values. Move the barrier out of the branch or loop that not all threads take; a thread "
                    "with nothing to do must come too.")
        return "\n".join(text)

    def endless(self, thread):
        """Explain a launch that takes too long."""
        frame = sys._current_frames().get(thread.ident)
        while frame and frame.f_code.co_filename != self.memory.path:
            frame = frame.f_back
        where = f"\n{show_line(self.memory.path, frame.f_lineno)}" if frame else ""
        return (f"Not finished after {SECONDS} seconds: {thread.title} is still running. "
                f"Does a loop never end?{where}")


def watched_module(module, memory):
    """Numba's stand-in for `cuda` inside of a kernel, with our memory."""
    atomics = module._atomic

    def atomic(name):
        def call(*args):
            memory.atomic = True
            try:
                return getattr(atomics, name)(*args)
            finally:
                memory.atomic = False
        return call

    module._shared = SimpleNamespace(array=lambda shape, dtype, alignment=None: memory.shared_array(shape, dtype))
    module._local = SimpleNamespace(array=lambda shape, dtype, alignment=None: new_array(shape, dtype))
    module._atomic = SimpleNamespace(**{name: atomic(name) for name in dir(atomics) if not name.startswith("__")})
    return module


@contextmanager
def watched(memory):
    """Numba's simulator with our parts in the place of its own."""
    from numba.cuda.simulator import kernel

    module, manager = kernel.FakeCUDAModule, kernel.BlockManager
    stop_at = time.monotonic() + SECONDS
    kernel.FakeCUDAModule = lambda *args: watched_module(module(*args), memory)
    kernel.BlockManager = lambda f, grid, block, debug: Block(f, grid, block, memory, stop_at)
    try:
        with warnings.catch_warnings():         # what overflows on a GPU does so silently
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        kernel.FakeCUDAModule, kernel.BlockManager = module, manager


def launch(kernel, grid, block, arguments, memory):
    """Run a kernel; its arrays are `Array` objects of `memory`."""
    memory.start_kernel()
    with watched(memory):
        kernel[grid, block](*arguments)
