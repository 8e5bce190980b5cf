"""Runs a kernel's PTX without a GPU: a warp at a time, its 32 lanes as NumPy arrays.

It knows the instructions that the kernels of `mma` are made of; those of `hopper` are in `interpreter_hopper`. Of what
a GPU leaves open it takes the worst: shared memory starts as NaN, copies arrive when they are waited for and not before
(or earlier, as likely as ``early`` says), and which warp goes on is drawn by lot. A misaligned access, one out of
bounds, a barrier in a warp that has gone apart and a deadlock are errors.

Registers are bit patterns; an instruction's type says how they are read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import ml_dtypes
import numpy as np

LANE, ALL = np.arange(32), np.ones(32, bool)
ROW, PAIR = LANE // 4, 2 * (LANE % 4)       # of a fragment: "Matrix Fragments for mma.m16n8k16" in the ISA
TYPES = {"pred": bool, **{name: np.dtype(type_) for name, type_ in (
             ("f32", np.float32), ("f64", np.float64), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16))},
         **{f"{kind}{8 * size}": np.dtype(f"{'i' if kind == 's' else 'u'}{size}")
            for kind in "bus" for size in (2, 4, 8)}}
COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
           "ne": np.not_equal, "neu": np.not_equal, "gtu": lambda x, y: ~(x <= y), "ltu": lambda x, y: ~(x >= y),
           "geu": lambda x, y: ~(x < y), "leu": lambda x, y: ~(x > y),
           "equ": lambda x, y: (x == y) | np.isnan(x) | np.isnan(y)}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
          "xor": np.bitwise_xor, "min": np.fmin, "max": np.fmax,
          "shl": lambda x, n: np.left_shift(x, n.astype(x.dtype)),
          "shr": lambda x, n: np.right_shift(x, n.astype(x.dtype)),
          "div": lambda x, y: x / y if x.dtype.kind == "f" else x // np.where(y == 0, 1, y).astype(y.dtype),
          "bmsk": lambda start, count: (np.uint64(1) << np.minimum(count, 32).astype(np.uint64)) - 1 << start,
          "rem": lambda x, y: x % np.where(y == 0, 1, y).astype(y.dtype)}
UNARY = {"not": np.invert, "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2,
         "rcp": lambda x: 1 / x}
SHARED_START = 1024         # what comes before is the driver's, on a GPU
PAUSE, AGAIN = 1, 2         # of an instruction: others go on now; and then it comes again


def sum_cut_off(terms):
    """Sum float32 numbers and products as tensor cores do: all are cut off where the largest has its 26th bit.

    So has been found on several generations, and that the sum of such terms is cut off too, and never rounded.
    """
    terms = np.stack(terms)                     # in float64
    unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(0))[1] - 26)            # or anything, beside an infinity
    exact = (np.trunc(terms / unit) * unit).sum(0)
    rounded = exact.astype(np.float32)
    return np.where(np.abs(rounded) > np.abs(exact), np.nextafter(rounded, np.float32(0)), rounded)


def _statements(body):
    """Instructions and labels, each with the number of its scope; the braces of operands become < and >."""
    text, depth, scope, scopes = "", 0, 0, 0
    for token in re.split(r"([{};])", body):
        if token == "{" and text.strip() and not text.strip().endswith(":"):
            text += "<"
            depth += 1
        elif token == "}" and depth:
            text += ">"
            depth -= 1
        elif token in ("{", "}", ";"):
            yield text.strip(), scope
            text = ""
            scopes += token == "{"
            scope = scopes if token == "{" else 0 if token == "}" else scope
        else:
            text += token


@lru_cache(maxsize=None)
def _constant(name, dtype):
    """A number in all lanes."""
    if re.match(r"0[fFdD][0-9a-fA-F]{8}", name):
        return np.full(32, int(name[2:], 16), f"u{dtype.itemsize}").view(dtype)
    if dtype is bool:
        return np.full(32, bool(int(name)))
    return np.full(32, int(name, 0) & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)


class Kernel:
    """A program: its parameters' names, its instructions as (opcode, arguments, guard), and where labels point."""

    def __init__(self, ptx):
        entry = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry"):])
        head, body = entry.split("{", 1)
        self.parameters = re.findall(r"\.param (?:\.\w+ |\d+ )*([\w$]+)", head)
        self.code, self.labels = [], {}
        for line, scope in _statements(body):
            while label := re.match(r"(\$?[\w$]+):\s*", line):
                self.labels[self._label(label.group(1), scope)] = len(self.code)
                line = line[label.end():]
            if line and not line.startswith("."):
                opcode, args, guard = self._parse(line)
                self.code.append((opcode, [self._label(*args, scope)] if opcode[0] == "bra" else args, guard))
        self.code.append((["ret"], [], None))

    @staticmethod
    def _label(name, scope):
        """Labels of inline PTX are known in its braces only."""
        return name if name.startswith("$") else f"{name} {scope}"

    @staticmethod
    def _parse(line):
        guard = re.match(r"@(!?)(%?[\w.]+)\s+", line)
        line = line[guard.end():] if guard else line
        opcode, _, rest = re.sub(r"\s+", " ", line).partition(" ")
        args = [arg.strip() for arg in re.findall(r"(?:[^,<\[]|<[^>]*>|\[[^\]]*\])+", rest)]
        return re.sub("::c(ta|luster)", "", opcode).split("."), args, guard and (guard.group(2), guard.group(1) == "!")


class Memory:
    """Global memory: arrays behind one another."""

    start = 1 << 20

    def __init__(self, size):
        self.bytes, self.used, self.releases = np.zeros(size, np.uint8), 0, 0

    def put(self, x):
        """Copy an array there: its address, and a view of it."""
        raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        first, self.used = self.used, self.used + -(-raw.size // 256) * 256 + 256
        self.bytes[first:first + raw.size] = raw
        return self.start + first, self.bytes[first:first + raw.size].view(x.dtype).reshape(x.shape)


@dataclass(eq=False)
class Warp:
    """32 lanes, each with its place in the program."""

    block: "Block"
    number: int
    registers: dict = field(default_factory=dict)
    place: np.ndarray = field(default_factory=lambda: np.zeros(32, int))
    alive: np.ndarray = field(default_factory=lambda: ALL)
    apart: bool = False                                     # or all lanes are at the first one's place
    groups: list = field(default_factory=lambda: [[]])      # copies under way; the last group is open
    waits: Callable = None                                  # tells whether the warp may go on

    # ---- operands ----------------------------------------------------------------------------------------------------

    def held(self, name):
        """What a register holds, None if nothing has been written."""
        return self.registers.get(name)

    def read(self, name, type_):
        """A register, a special one, or a constant, in all lanes."""
        x, dtype = self.held(name), TYPES[type_]
        if x is None:
            special = {"%tid.x": self.number * 32 + LANE, "%laneid": LANE, "%ctaid.x": self.block.index,
                       "%nctaid.x": self.block.grid, "%nctaid.y": 1, "dynamic_shared_memory": SHARED_START}
            if name in special:
                return np.broadcast_to(special[name], 32).astype(dtype)
            if name in self.block.arguments:            # its address, made up
                return np.full(32, 128 * self.block.kernel.parameters.index(name), dtype)
            if name[0] != "%":
                return _constant(name, dtype)
            x = np.full(32, 0x7fc0dead, np.uint64 if "d" in name else np.uint32)        # a NaN
        if dtype is bool or x.dtype.itemsize == dtype.itemsize:
            return x.view(dtype)
        return x.astype(f"u{dtype.itemsize}").view(dtype)

    def write(self, name, x, lanes):
        x = np.ascontiguousarray(x)
        x = x if x.dtype == bool else x.view(f"u{x.itemsize}")
        if name != "_":
            old = None if lanes is ALL else self.held(name)
            self.registers[name] = x if old is None else np.where(lanes, x, old)

    def load(self, names, words, lanes, shared):
        """Write what ``words()`` reads from memory, for each register."""
        for name, word in zip(names, words()):
            self.write(name, word, lanes)

    @staticmethod
    def names(arg):
        return [name.strip() for name in arg.strip("<>").split(",")]

    def memory(self, opcode, arg, lanes, size):
        """Memory of an operand in brackets, in units of `size` bytes, and the lanes' places there."""
        terms = arg.strip("[] ").split("+")
        at = sum(self.read(term.strip(), "s64") for term in terms)
        memory, start = (self.block.shared, 0) if "shared" in opcode else (self.block.memory.bytes, Memory.start)
        at = np.where(lanes, at - start, 0)
        assert not (at % size).any(), "misaligned"
        assert (at >= 0).all() and (at + size <= memory.size).all(), "out of bounds"
        return memory, at

    # ---- instructions ------------------------------------------------------------------------------------------------

    def run(self):
        """Go on until there is something to wait for, or the end."""
        code, labels = self.block.kernel.code, self.block.kernel.labels
        while self.alive.any():
            place, here = self.place[0], self.alive
            if self.apart:
                place = self.place[self.alive].min()        # who is behind goes first: so all meet again
                here = self.alive & (self.place == place)
                if (here == self.alive).all():
                    self.apart, here = False, self.alive
                    self.place[:] = place
            opcode, args, guard = code[place]
            lanes = here & (self.registers[guard[0]] ^ guard[1]) if guard else here
            lanes = ALL if lanes.all() else lanes
            self.place[here if self.apart else slice(None)] += 1
            if opcode[0] == "bra":
                self.apart = self.apart or lanes.any() and (lanes != here).any()
                if self.apart:
                    self.place[lanes] = labels[args[0]]
                elif lanes.any():
                    self.place[:] = labels[args[0]]
            elif opcode[0] == "ret":
                self.alive = self.alive & ~lanes
                self.apart = True
            elif lanes is ALL or lanes.any():
                then = getattr(self, "_" + opcode[0], self._arithmetic)(opcode, args, lanes)
                if then == AGAIN:
                    self.place[here if self.apart else slice(None)] -= 1
                if then:
                    return

    def _trap(self, opcode, args, lanes):
        raise AssertionError("trap")

    def _bar(self, opcode, args, lanes):
        assert lanes.all(), "the warp has gone apart"
        if opcode[1] == "warp":
            return
        everyone = str(32 * len(self.block.warps))
        number, threads = (int(self.read(arg, "u32")[0]) for arg in (*args, everyone)[:2])
        self.block.arrive(number, threads, self if opcode[1] == "sync" else None)
        return PAUSE

    def _arithmetic(self, opcode, args, lanes):
        name, type_ = opcode[0], opcode[-1]
        x = [self.read(arg, type_ if opcode[0] not in ("shl", "shr") or n == 0 else "u32")
             for n, arg in enumerate(args[1:])]
        if opcode[1] == "wide":
            x = [y.astype(np.int64) for y in x]
        if name == "fma":
            result = x[0].astype(np.longdouble if type_ == "f64" else np.float64) * x[1] + x[2]
        elif name == "mad":
            result = x[0] * x[1] + x[2]
        elif opcode[:2] == ["min", "NaN"]:
            result = np.minimum(*x)
        elif opcode[:2] == ["mul", "hi"]:
            result = np.array([int(a) * int(b) >> 8 * x[0].itemsize for a, b in zip(*x)], x[0].dtype)
        elif name == "bfi":
            first, count = (x[n].astype(x[0].dtype) for n in (2, 3))
            mask = ((x[0].dtype.type(1) << count) - x[0].dtype.type(1)) << first
            result = x[1] & ~mask | x[0] << first & mask
        else:
            result = (BINARY if len(x) == 2 else UNARY)[name](*x)
        self.write(args[0], result if result.dtype == bool or name == "bfi" else result.astype(x[0].dtype), lanes)

    def _mov(self, opcode, args, lanes):
        if args[1].startswith("<"):         # a register of two halves
            low, high = (self.read(name, "u32").astype(np.uint64) for name in self.names(args[1]))
            self.write(args[0], low | high << np.uint64(32), lanes)
        elif args[0].startswith("<"):       # halves of a register
            x = self.read(args[1], opcode[-1]).view(f"u{TYPES[opcode[-1]].itemsize // 2}").reshape(32, 2).T
            for name, half in zip(self.names(args[0]), x):
                self.write(name, half, lanes)
        else:
            self.write(args[0], self.read(args[1], opcode[-1]), lanes)

    def _cvt(self, opcode, args, lanes):
        to, of = opcode[-2:]
        if to.endswith("x2"):
            high, low = (self.read(arg, "f32").astype(TYPES[to[:-2]]).view(np.uint16).astype(np.uint32)
                         for arg in args[1:])
            self.write(args[0], high << np.uint32(16) | low, lanes)
        else:
            self.write(args[0], self.read(args[1], of).astype(TYPES[to]), lanes)

    def _setp(self, opcode, args, lanes):
        x = COMPARE[opcode[1]](self.read(args[1], opcode[-1]), self.read(args[2], opcode[-1]))
        self.write(args[0], x & self.read(args[3], "pred") if opcode[2] == "and" else x, lanes)

    def _selp(self, opcode, args, lanes):
        self.write(args[0], np.where(self.read(args[3], "pred"), *(self.read(arg, opcode[-1]) for arg in args[1:3])),
                   lanes)

    def _shfl(self, opcode, args, lanes):
        assert lanes.all()
        target, _, inside = args[0].partition("|")
        self.write(target, self.read(args[1], "b32")[LANE ^ self.read(args[2], "b32")], lanes)
        if inside:
            self.write(inside, np.ones(32, bool), lanes)

    def _vote(self, opcode, args, lanes):
        assert lanes.all()
        self.write(args[0], np.full(32, self.read(args[1], "pred").any()), lanes)

    def _redux(self, opcode, args, lanes):
        assert lanes.all()
        self.write(args[0], np.full(32, np.bitwise_or.reduce(self.read(args[1], "b32"))), lanes)

    def _ld(self, opcode, args, lanes):
        if opcode[1] == "param":
            self.write(args[0], np.full(32, self.block.arguments[args[1].strip("[] ")]), lanes)
            return
        names, type_ = self.names(args[0]), TYPES[opcode[-1]]
        memory, at = self.memory(opcode, args[1], lanes, type_.itemsize * len(names))
        self.load(names, lambda: memory.view(type_)[at // type_.itemsize + np.arange(len(names))[:, None]], lanes,
                  "shared" in opcode)

    def _st(self, opcode, args, lanes):
        names, type_ = self.names(args[1]), TYPES[opcode[-1]]
        memory, at = self.memory(opcode, args[0], lanes, type_.itemsize * len(names))
        for word, name in enumerate(names):
            memory.view(type_)[at[lanes] // type_.itemsize + word] = self.read(name, opcode[-1])[lanes]

    def _red(self, opcode, args, lanes):
        names, type_ = self.names(args[1]), TYPES[opcode[-1]]
        memory, at = self.memory(opcode, args[0], lanes, type_.itemsize * len(names))
        for word, name in enumerate(names):
            np.add.at(memory.view(type_), at[lanes] // type_.itemsize + word, self.read(name, opcode[-1])[lanes])

    def _cp(self, opcode, args, lanes):
        if "commit_group" in opcode:
            self.groups.append([])
        elif "wait_group" in opcode:
            while len(self.groups) - 1 > int(args[0]):
                for copy in self.groups.pop(0):
                    self._copy(*copy)
        else:
            copy = args, lanes, *(self.read(arg.strip("[]").split("+")[0].strip(), "s64") for arg in args[:2]), \
                self.read(args[3], "s32")
            self._copy(*copy) if self.block.rng.random() < self.block.early else self.groups[-1].append(copy)

    def _copy(self, args, lanes, target, source, sizes):
        target, source = (at + sum(int(term) for term in arg.strip("[]").split("+")[1:])
                          for at, arg in ((target, args[0]), (source, args[1])))
        memory, shared = self.block.memory.bytes, self.block.shared
        for to, of, size in zip(target[lanes], source[lanes] - Memory.start, sizes[lanes]):
            assert to % 16 == of % 16 == 0 and SHARED_START <= to <= shared.size - 16 and size in (0, 16)
            assert size == 0 or 0 <= of <= memory.size - 16, "out of bounds"
            shared[to:to + 16] = memory[of:of + 16] if size else 0

    def _ldmatrix(self, opcode, args, lanes):
        assert lanes.all()
        memory, at = self.memory(opcode, args[1], lanes, 16)
        names = self.names(args[0])

        def words():
            rows = memory.view(np.uint16)[at[:8 * len(names), None] // 2 + np.arange(8)].astype(np.uint32)
            matrices = rows.reshape(-1, 8, 8)
            matrices = matrices.transpose(0, 2, 1) if "trans" in opcode else matrices
            return matrices[:, ROW, PAIR] | matrices[:, ROW, PAIR + 1] << np.uint32(16)

        self.load(names, words, lanes, True)

    def _mma(self, opcode, args, lanes):
        assert lanes.all()
        d, a, b, c = map(self.names, args)
        if "tf32" in opcode:
            self._mma_tf32(d, a, b, c, lanes)
            return
        if "f64" in opcode:
            self._mma_f64(d, a, b, c, lanes)
            return
        matrices = {size: np.zeros(size, np.float32) for size in ((16, 16), (16, 8))}
        left, right, total = matrices[16, 16], matrices[16, 8], np.zeros((16, 8), np.float32)
        for e in range(2):
            def halves(names):
                return [self.read(name, "b32").view(TYPES[opcode[-2]])[e::2].astype(np.float32) for name in names]

            (left[ROW, PAIR + e], left[ROW + 8, PAIR + e], left[ROW, PAIR + 8 + e],
             left[ROW + 8, PAIR + 8 + e]) = halves(a)
            right[PAIR + e, ROW], right[PAIR + 8 + e, ROW] = halves(b)
        for e, name in enumerate(c):
            total[ROW + e // 2 * 8, PAIR + e % 2] = self.read(name, "f32")
        total += left @ right
        for e, name in enumerate(d):
            self.write(name, total[ROW + e // 2 * 8, PAIR + e % 2], lanes)

    def _mma_tf32(self, d, a, b, c, lanes):
        """"Matrix Fragments for mma.m16n8k8": the last 13 bits of a number are not looked at."""
        left, right, total = np.zeros((16, 8)), np.zeros((8, 8)), np.zeros((16, 8), np.float32)
        column, cut = LANE % 4, np.uint32(0xffffe000)
        for n, name in enumerate(a):
            left[ROW + n % 2 * 8, column + n // 2 * 4] = (self.read(name, "b32") & cut).view(np.float32)
        for n, name in enumerate(b):
            right[column + n * 4, ROW] = (self.read(name, "b32") & cut).view(np.float32)
        for e, name in enumerate(c):
            total[ROW + e // 2 * 8, PAIR + e % 2] = self.read(name, "f32")
        for first in 0, 4:
            total = sum_cut_off([total, *(left[:, k, None] * right[k] for k in range(first, first + 4))])
        for e, name in enumerate(d):
            self.write(name, total[ROW + e // 2 * 8, PAIR + e % 2], lanes)

    def _mma_f64(self, d, a, b, c, lanes):
        """"Matrix Fragments for mma.m8n8k4 with .f64 floating point type", "... mma.m16n8k8" likewise."""
        rows, depth = 4 * len(c), 4 * len(b)
        left, right, total = np.zeros((rows, depth)), np.zeros((depth, 8)), np.zeros((rows, 8))
        for n, name in enumerate(a):
            left[ROW + n * 8 % rows, LANE % 4 + n * 8 // rows * 4] = self.read(name, "f64")
        for n, name in enumerate(b):
            right[LANE % 4 + n * 4, ROW] = self.read(name, "f64")
        for e, name in enumerate(c):
            total[ROW + e // 2 * 8, PAIR + e % 2] = self.read(name, "f64")
        total += left @ right
        for e, name in enumerate(d):
            self.write(name, total[ROW + e // 2 * 8, PAIR + e % 2], lanes)


class Block:
    """One block of a launch."""

    warp_type = Warp

    def __init__(self, kernel, arguments, memory, threads, shared_bytes, index, grid, early, rng):
        self.kernel, self.memory, self.index, self.grid, self.early, self.rng = (kernel, memory, index, grid, early,
                                                                                 rng)
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.shared = np.full(SHARED_START + shared_bytes, 255, np.uint8)
        self.barriers = {}                  # number: threads that have come, warps that wait
        self.warps = [self.warp_type(self, number) for number in range(threads // 32)]
        self.speeds = rng.random(len(self.warps)) ** 2 + .02

    @property
    def alive(self):
        return any(warp.alive.any() for warp in self.warps)

    def able(self):
        """Indices of warps that can go on."""
        return [warp.number for warp in self.warps if warp.alive.any() and (warp.waits is None or warp.waits())]

    def under_way(self):
        """Of what was started and happens whenever it likes: functions that have it happen."""
        return []

    def step(self):
        """Something happens. Whether anything could."""
        able, under_way = self.able(), self.under_way()
        if under_way and (not able or self.rng.random() < self.early):
            under_way[self.rng.integers(len(under_way))]()
        elif able:
            speeds = np.cumsum(self.speeds[able])
            warp = self.warps[able[np.searchsorted(speeds, self.rng.random() * speeds[-1])]]
            warp.waits = None
            warp.run()
        return bool(able or under_way)

    def arrive(self, number, threads, warp):
        """A warp comes to a barrier, to wait there, or None."""
        come, waiting = self.barriers.get(number, (0, []))
        come, waiting = come + 32, [*waiting, warp] if warp else waiting
        assert come <= threads
        if warp:
            warp.waits = lambda: False
        if come == threads:
            for other in waiting:
                other.waits = None
            come, waiting = 0, []
        self.barriers[number] = come, waiting


def launch(kernel, arguments, memory, threads, shared_bytes, grid, early=0, seed=0, block_type=Block, together=1):
    """Run all blocks; `arguments` are integers (or tensor maps), one for each parameter of the PTX.

    Blocks come one after the other, in any order, or so many `together`, the first ones first. `early` is how likely
    what was started happens before a warp goes on that could.
    """
    rng, running = np.random.default_rng(seed), []
    waiting = list(range(grid) if together > 1 else rng.permutation(grid))
    with np.errstate(all="ignore"):
        while waiting or running:
            while waiting and len(running) < together:
                running.append(block_type(kernel, arguments, memory, threads, shared_bytes, waiting.pop(0), grid, early,
                                          rng))
            steps = (running[index].step() for index in rng.permutation(len(running)))
            assert any(steps), f"deadlock: {[block.barriers for block in running]}"
            running = [block for block in running if block.alive]
