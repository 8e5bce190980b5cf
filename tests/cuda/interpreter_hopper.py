"""Hopper's instructions for the `interpreter`: mbarriers, bulk copies with tensor maps, products of warpgroups.

What is asynchronous happens at a time that is drawn by lot, as late as somebody waits for it (``early`` 0), at once
(1), or between:

- A bulk copy reads and writes all its bytes at once, then tells its mbarrier.
- A product reads its operands, in shared memory and in registers, and writes its accumulator at once, after all four
  warps have started it. Before the wait that covers it the accumulator reads as NaN. A group of products is one
  here.
- A load from shared memory (``ldmatrix``, ``ld.shared``) reads when its registers are first used, or before. Barriers
  of the block wait for it, an mbarrier's arrival does not: so it was seen on a GPU.
- Products are sure to see what a thread has written to shared memory only after its ``fence.proxy.async``, and may
  see it before: there are two images of shared memory.
"""

from dataclasses import dataclass, field

import numpy as np
from interpreter import AGAIN, ALL, PAIR, PAUSE, ROW, SHARED_START, TYPES, Block, Warp

WARPS = 4                                   # of a warpgroup
BOX_ROW = 128                               # bytes
NAN = np.full(32, 0x7fc0dead, np.uint32)


@dataclass(frozen=True, eq=False)
class TensorMap:
    """In place of the driver's 128 bytes: a (batch, heads, n, d) array in memory, and the rows of a box."""

    array: np.ndarray
    rows: int
    swizzled: bool

    def box(self, column, row, head, batch):
        """128 bytes of so many rows, zeros outside of the array."""
        item = self.array.itemsize
        box, matrix = np.zeros((self.rows, BOX_ROW // item), f"u{item}"), self.array.view(f"u{item}")[batch, head]
        assert row >= 0 <= column and head >= 0 <= batch
        inside = matrix[row:row + self.rows, column:column + box.shape[1]]
        box[:inside.shape[0], :inside.shape[1]] = inside
        return box.view(np.uint8)


@dataclass
class Barrier:
    """An mbarrier: what its phase still waits for."""

    count: int
    arrivals: int
    bytes: int = 0
    phase: int = 0

    def change(self, arrivals=0, size=0):
        """So many arrive, and so many more bytes are to come."""
        assert arrivals <= self.arrivals, "an arrival too many"
        self.arrivals, self.bytes = self.arrivals - arrivals, self.bytes + size
        if self.arrivals == self.bytes == 0:
            self.arrivals, self.phase = self.count, self.phase + 1

    def ended(self, parity):
        """Whether the last phase of this parity has ended, as a wait is told."""
        return self.phase & 1 != parity


class Load:
    """What a load has read or will read."""

    def __init__(self, words):
        self._words, self._read = words, None

    def word(self, index):
        if self._read is None:
            self._read = np.ascontiguousarray(self._words())
        return self._read[index]


@dataclass(eq=False)
class Part:
    """A warp's part of a product: 16 rows."""

    warp: Warp
    steps: list = field(default_factory=list)       # accumulators, A, B, whether to add, whether they are transposed
    before: list = field(default_factory=list)      # what the accumulators' registers held
    words: np.ndarray = None
    waited: bool = False

    def word(self, index):
        """An accumulator as an instruction sees it."""
        return self.words[index] if self.waited else NAN


@dataclass(eq=False)
class Late:
    """What a register will hold: word `index` of a `Load` or a `Part`. Moves don't touch it."""

    source: Load | Part
    index: int


def operand(shared, descriptor, size, transposed):
    """The (size, 16) operand at a descriptor, of an `Operand` or `NarrowOperand`; `transposed`: its depth runs down."""
    address, first_stride, second_stride = (int(descriptor) >> bit & 0x3fff for bit in (0, 16, 32))
    swizzled = int(descriptor) >> 46 == 1 << 16
    assert swizzled or int(descriptor) >> 46 == 0 and not transposed, "a swizzle other than that of 128 bytes"
    x, depth = np.arange(size)[:, None], np.arange(16)
    row, column = (depth, x) if transposed else (x, depth)
    box, row_bytes = (BOX_ROW // 2, BOX_ROW) if swizzled else (8, 16)
    at = (16 * (address + column // box * first_stride + row // 8 * second_stride) + row % 8 * row_bytes
          + column % box * 2)
    if swizzled:
        at ^= (at >> 7 & 7) << 4
    assert SHARED_START <= at.min() and at.max() < shared.size, "out of bounds"
    return shared.view(np.uint16)[at // 2]


class Product:
    """A group of products of a warpgroup: 64 rows, of one accumulator."""

    def __init__(self):
        self.parts, self.done = {}, False

    def run(self):
        """Read the operands and write the accumulators."""
        first = self.parts[0]
        shared = first.warp.block.seen
        columns, dtype = 2 * len(first.steps[0][0]), first.steps[0][-1]
        left, right = [], []
        for n, (names, a, b, add, a_flag, b_flag, _) in enumerate(first.steps):
            for part in self.parts.values():
                assert (part.steps[n][2:] == (b, add, a_flag, b_flag, dtype)
                        and (isinstance(a, list) or part.steps[n][1] == a)), "warps of a warpgroup don't agree"
                assert part.steps[n][0] == part.steps[0][0] and (n == 0 or add), "not one accumulator"
            if isinstance(a, list):
                rows = np.empty((64, 16), np.uint16)
                for number, part in self.parts.items():
                    for word, name in enumerate(part.steps[n][1]):
                        x = part.warp.read(name, "b32").view(np.uint16)
                        for e in range(2):
                            rows[16 * number + word % 2 * 8 + ROW, word // 2 * 8 + PAIR + e] = x[e::2]
            else:
                rows = operand(shared, a, 64, a_flag)
            left.append(rows)
            right.append(operand(shared, b, columns, b_flag))
        left, right = (np.concatenate(x, 1).view(dtype).astype(np.float32) for x in (left, right))
        total = left @ right.T
        element = np.arange(columns // 2)[:, None]
        for number, part in self.parts.items():
            words = total[16 * number + element // 2 % 2 * 8 + ROW, element // 4 * 8 + element % 2 + PAIR]
            if first.steps[0][3]:
                words = words + np.array([x.source.words[x.index] if isinstance(x, Late) else x
                                          for x in part.before]).view(np.float32)
            part.words = np.ascontiguousarray(words).view(np.uint32)
        self.done = True


@dataclass(eq=False)
class HopperWarp(Warp):
    """A warp of `HopperBlock`."""

    loads: list = field(default_factory=list)       # that may not have read yet
    unfenced: list = field(default_factory=list)    # where it has written since its last fence
    part: Part = None                               # of the group that is open
    started: int = 0                                # groups
    unwaited: list = field(default_factory=list)    # (group, part)
    acquired: tuple = None                          # what it has read last of what other blocks write

    # ---- registers ---------------------------------------------------------------------------------------------------

    def held(self, name):
        x = self.registers.get(name)
        if isinstance(x, Late):
            word = x.source.word(x.index)
            if word is not NAN:
                self.registers[name] = word
            return word
        return x

    def _mov(self, opcode, args, lanes):
        x = self.registers.get(args[1])
        if isinstance(x, Late) and lanes is ALL:
            self.registers[args[0]] = x
        else:
            super()._mov(opcode, args, lanes)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def load(self, names, words, lanes, shared):
        if not shared or lanes is not ALL:
            return super().load(names, words, lanes, shared)
        self.loads.append(Load(words))
        for index, name in enumerate(names):
            self.registers[name] = Late(self.loads[-1], index)

    def finish_loads(self):
        """Have all loads read."""
        for load in self.loads:
            load.word(0)
        self.loads = []

    def run(self):
        if self.block.rng.random() < self.block.early:
            self.finish_loads()
        super().run()

    def written(self, at):
        """Bytes of shared memory that have been written: seen by a product now, or only after a fence."""
        if self.block.rng.random() < .5:
            self.block.seen[at] = self.block.shared[at]
        else:
            self.unfenced.append(at.ravel())

    def _st(self, opcode, args, lanes):
        self.finish_loads()
        super()._st(opcode, args, lanes)
        if "shared" in opcode:
            size = 4 * len(self.names(args[1]))
            self.written(self.memory(opcode, args[0], lanes, size)[1][lanes][:, None] + np.arange(size))
        elif "release" in opcode:
            self.block.memory.releases += 1

    def _stmatrix(self, opcode, args, lanes):
        assert lanes.all() and "trans" in opcode
        self.finish_loads()
        memory, at = self.memory(opcode, args[0], lanes, 16)
        for n, name in enumerate(self.names(args[1])):
            word, start = self.read(name, "b32"), at[8 * n:8 * n + 8]
            for e in range(2):
                memory.view(np.uint16)[start[PAIR + e] // 2 + ROW] = word.view(np.uint16)[e::2]
        self.written(at[:, None] + np.arange(16))

    def _fence(self, opcode, args, lanes):
        if opcode[1:3] == ["proxy", "async"]:
            assert lanes.all(), "who has written what is not kept by lanes"
            for at in self.unfenced:
                self.block.seen[at] = self.block.shared[at]
            self.unfenced = []

    def _ld(self, opcode, args, lanes):
        super()._ld(opcode, args, lanes)
        if "acquire" in opcode:
            now = args[1], self.read(args[0], "b32").tobytes(), self.block.memory.releases
            if self.acquired == now:        # the same again: until another block writes
                self.waits = lambda: self.block.memory.releases != now[-1]
            self.acquired = now
            return PAUSE

    def _bar(self, opcode, args, lanes):
        self.finish_loads()
        return super()._bar(opcode, args, lanes)

    def _setmaxnreg(self, opcode, args, lanes):
        assert lanes.all()

    def _cvta(self, opcode, args, lanes):
        self._mov(opcode, args, lanes)

    # ---- mbarriers and bulk copies -----------------------------------------------------------------------------------

    def pause(self):
        """Perhaps let others go on."""
        return PAUSE if self.block.rng.random() < .5 else None

    def numbers(self, arg, lanes):
        """An operand of an instruction of one thread or of several: those lanes' values."""
        return self.read(arg.strip("[]<> "), "u32")[lanes].tolist()

    def _mbarrier(self, opcode, args, lanes):
        address = args[1 if opcode[1] in ("arrive", "try_wait") else 0]
        barriers = self.numbers(address, lanes)
        if opcode[1] == "init":
            for at, count in zip(barriers, self.numbers(args[1], lanes)):
                assert at % 8 == 0 and SHARED_START <= at < self.block.shared.size
                self.block.mbarriers[at] = Barrier(count, count)
        elif opcode[1] == "arrive":
            sizes = self.numbers(args[2], lanes) if "expect_tx" in opcode else [0] * len(barriers)
            for at, size in zip(barriers, sizes):
                self.block.mbarriers[at].change(1, size)
        else:
            waited = [(self.block.mbarriers[at], parity) for at, parity in zip(barriers, self.numbers(args[2], lanes))]
            if not all(barrier.ended(parity) for barrier, parity in waited):
                self.waits = lambda: all(barrier.ended(parity) for barrier, parity in waited)
                return AGAIN
            self.write(args[0], ALL, lanes)
        return self.pause()

    def _cp(self, opcode, args, lanes):
        if "bulk" not in opcode:
            return super()._cp(opcode, args, lanes)
        assert lanes.sum() == 1 and "tensor" in opcode
        target, barrier = (self.numbers(args[n], lanes)[0] for n in (0, -1))
        barrier = self.block.mbarriers[barrier]
        address, _, place = args[1].strip("[] ").partition(",")
        address = int(self.read(address, "u64")[lanes][0])
        map_ = self.block.arguments[self.block.kernel.parameters[address // 128]]
        assert address % 128 == target % (1024 if map_.swizzled else 128) == 0      # the swizzle is of addresses
        place = [int(self.read(name, "s32")[lanes][0]) for name in self.names(place.strip())]
        row, byte = np.arange(map_.rows)[:, None], np.arange(BOX_ROW)
        at = target + row * BOX_ROW + (byte ^ (row % 8 << 4 if map_.swizzled else 0))
        assert SHARED_START <= at.min() and at.max() < self.block.shared.size, "out of bounds"
        self.block.copies.append((at, lambda: map_.box(*place), barrier))
        return self.pause()

    # ---- products ----------------------------------------------------------------------------------------------------

    def _wgmma(self, opcode, args, lanes):
        assert lanes.all(), "the warp has gone apart"
        if opcode[1] == "mma_async":
            self._start_step(opcode, args)
        elif opcode[1] == "commit_group":
            product = self.block.product(self.number // WARPS, self.started)
            product.parts[self.number % WARPS] = self.part
            self.unwaited.append((product, self.part))
            self.started, self.part = self.started + 1, None
            return self.pause()
        elif opcode[1] == "wait_group":
            waited = self.unwaited[:len(self.unwaited) - int(args[0])]
            if not all(product.done for product, _ in waited):
                self.waits = lambda: all(product.done for product, _ in waited)
                return AGAIN
            del self.unwaited[:len(waited)]
            for _, part in waited:
                part.waited = True
            return self.pause()

    def _start_step(self, opcode, args):
        names, a_names = self.names(args[0]), args[1].startswith("<") and self.names(args[1])
        for name in a_names or ():
            self.held(name)                 # here a GPU waits for loads
        if not self.part:
            self.part = Part(self, before=[self.registers.get(name, NAN) for name in names])
            for index, name in enumerate(names):
                self.registers[name] = Late(self.part, index)
        a, b = a_names or int(self.read(args[1], "u64")[0]), int(self.read(args[2], "u64")[0])
        assert args[4:6] == ["1", "1"]
        self.part.steps.append((names, a, b, bool(self.read(args[3], "pred")[0]), not a_names and args[6] == "1",
                                args[-1] == "1", TYPES[opcode[-1]]))


class HopperBlock(Block):
    """A block on a GPU of compute capability 9.0."""

    warp_type = HopperWarp

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = self.shared.copy()      # shared memory as products and bulk copies see it
        self.mbarriers, self.copies, self.products = {}, [], {}

    def product(self, warpgroup, number):
        """A group of a warpgroup's products; groups are counted."""
        products = self.products.setdefault(warpgroup, [])
        if number == len(products):
            products.append(Product())
        return products[number]

    def under_way(self):
        possible = [lambda index=index: self._copy_bulk(*self.copies.pop(index)) for index in range(len(self.copies))]
        for products in self.products.values():
            product = next((product for product in products if not product.done), None)
            if product and len(product.parts) == WARPS:
                possible.append(product.run)
        return possible

    def _copy_bulk(self, at, source, barrier):
        self.shared[at] = self.seen[at] = source()
        barrier.change(size=-at.size)
