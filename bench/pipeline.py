"""The pipeline of the Hopper forward kernel, simulated: who waits for whom, and what lies where in shared memory when.

Each warp or warpgroup is a generator that follows `numba_flash.cuda.hopper.forward` step by step and yields what it
waits for; barriers count arrivals and have phases as in `numba_flash.cuda.ptx.barriers`. So the order of things follows
from the kernel's rules. How long things take is made up (`SECONDS`), and two things are simpler than they are: a warp's
copies come one after another, and the tensor cores work on one product at a time, in the order in which they started.
"""

from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

COPIED = "Q", "K", "V"
SECONDS = {"Q": 1, "K": 1, "V": 1, "S": 2, "PV": 2, "softmax": 3, "O / l": 2}


class Barrier:
    """An mbarrier, which remembers when its phases ended."""

    def __init__(self, arrivals):
        self.arrivals = self.left = arrivals
        self.parity, self.ends = 0, []

    def arrive(self, now):
        self.left -= 1
        if self.left == 0:
            self.left = self.arrivals
            self.parity ^= 1
            self.ends.append(now)

    def ended(self, parity):
        """Whether the phase of this parity has ended: at first, the one before the first has."""
        return self.parity != parity


class Span(NamedTuple):
    """What went on in a row of the picture, from `start` to `stop`.

    `what` is a name in `SECONDS`, or "wait"; `turn` counts query tiles, `j` the K/V tiles of each (of Q, the consumers
    that it is for); `place` is that of the tile in shared memory that is read or written.
    """

    row: str
    what: str
    turn: int
    j: int
    start: float
    stop: float
    consumer: int = -1
    place: int = -1


def following(stage, phase, stages):
    """The next place and its barriers' phase, as in `schedule`."""
    return (0, phase ^ 1) if stage == stages - 1 else (stage + 1, phase)


class Simulation:
    """A block that works on `turns` query tiles with `tiles` K/V tiles each.

    Parameters
    ----------
    tile : hopper.config.Tile
    tiles, turns : int

    Attributes
    ----------
    spans : list of Span
        What happened, after `run`.
    """

    def __init__(self, tile, tiles, turns):
        self.tile, self.tiles, self.turns = tile, tiles, turns
        self.now, self.events, self.order = 0, [], count()
        self.busy_until, self.spans = {}, []
        self.may_start = [True] + [False] * (tile.consumers - 1)        # whose turn it is, if consumers take turns
        q_places = tile.q_stages * tile.consumers
        self.full = {"Q": [Barrier(1) for _ in range(q_places)]}
        self.empty = {"Q": [Barrier(1) for _ in range(q_places)]}      # one arrival here is the warpgroup's 128
        for name in "KV":
            self.full[name] = [Barrier(1) for _ in range(tile.stages)]
            self.empty[name] = [Barrier(tile.consumers) for _ in range(tile.stages)]

    def run(self):
        """Let everybody go on until all are done; return `spans`."""
        processes = {"Q warp": self.load_queries(), "K warp": self.load_tiles("K"), "V warp": self.load_tiles("V")}
        processes |= {f"consumer {c}": self.consume(c) for c in range(self.tile.consumers)}
        waiting = {name: (0, lambda: True) for name in processes}
        while waiting:
            ready = [name for name, (_, condition) in waiting.items() if condition()]
            if not ready and not self.events:
                raise RuntimeError(f"everybody waits: {', '.join(waiting)}")
            if not ready:
                self.now, _, action = heappop(self.events)
                action()
            for name in ready:
                since, _ = waiting.pop(name)
                if self.now > since:
                    self.spans.append(Span(name, "wait", -1, -1, since, self.now))
                condition = next(processes[name], None)
                if condition:
                    waiting[name] = self.now, condition
        return self.spans

    def occupy(self, row, what, turn, j, consumer=-1, place=-1, action=lambda: None):
        """Do something in a row as soon as that is free, then the action; what to yield to wait for its end."""
        start = max(self.now, self.busy_until.get(row, 0))
        stop = self.busy_until[row] = start + SECONDS[what]
        self.spans.append(Span(row, what, turn, j, start, stop, consumer, place))
        heappush(self.events, (stop, next(self.order), action))
        return lambda: self.now >= stop

    def copy(self, what, turn, j, place):
        self.occupy(f"{what} warp", what, turn, j, place=place, action=lambda: self.full[what][place].arrive(self.now))

    # ---- the producer's warps ----------------------------------------------------------------------------------------

    def load_queries(self):
        stage, phase = 0, 1
        for turn in range(self.turns + 1):
            for consumer in range(self.tile.consumers):
                place = stage * self.tile.consumers + consumer
                yield partial(self.empty["Q"][place].ended, phase)
                if turn < self.turns:
                    self.copy("Q", turn, consumer, place)
                else:
                    self.full["Q"][place].arrive(self.now)      # the note that there are no more
            stage, phase = following(stage, phase, self.tile.q_stages)

    def load_tiles(self, name):
        stage, phase = 0, 1
        for turn in range(self.turns):
            for j in range(self.tiles):
                yield partial(self.empty[name][stage].ended, phase)
                self.copy(name, turn, j, stage)
                stage, phase = following(stage, phase, self.tile.stages)

    # ---- the consumers -----------------------------------------------------------------------------------------------

    def consume(self, consumer):
        product = partial(self.occupy, "tensor cores", consumer=consumer)
        work = partial(self.occupy, f"consumer {consumer}", consumer=consumer)
        full, empty = self.full, self.empty
        stage, phase, q_stage, q_phase, q_place = 0, 0, 0, 0, consumer

        # S = Q K^T, of the first tiles
        yield partial(full["Q"][q_place].ended, q_phase)
        if self.tile.q_in_registers:
            empty["Q"][q_place].arrive(self.now)
        yield partial(full["K"][stage].ended, phase)
        yield product("S", 0, 0, place=stage)
        empty["K"][stage].arrive(self.now)

        for turn in range(self.turns):
            yield work("softmax", turn, 0)
            yield partial(full["V"][stage].ended, phase)
            for j in range(1, self.tiles):
                next_stage, next_phase = following(stage, phase, self.tile.stages)
                yield partial(full["K"][next_stage].ended, next_phase)
                if self.tile.turns:
                    yield partial(self.may_start.__getitem__, consumer)
                s = product("S", turn, j, place=next_stage)
                o = product("PV", turn, j - 1, place=stage)
                self.may_start[consumer] = False
                self.may_start[(consumer + 1) % self.tile.consumers] = True
                yield s
                empty["K"][next_stage].arrive(self.now)
                yield work("softmax", turn, j)
                yield partial(full["V"][next_stage].ended, next_phase)
                yield o
                empty["V"][stage].arrive(self.now)
                stage, phase = next_stage, next_phase

            # the last O += P V, and S of the next query tile
            o, v_read = product("PV", turn, self.tiles - 1, place=stage), empty["V"][stage]
            if not self.tile.q_in_registers:
                empty["Q"][q_place].arrive(self.now)
            stage, phase = following(stage, phase, self.tile.stages)
            q_stage, q_phase = following(q_stage, q_phase, self.tile.q_stages)
            q_place = q_stage * self.tile.consumers + consumer
            yield partial(full["Q"][q_place].ended, q_phase)
            more = turn + 1 < self.turns
            if more:
                if self.tile.q_in_registers:
                    empty["Q"][q_place].arrive(self.now)
                yield partial(full["K"][stage].ended, phase)
                s = product("S", turn + 1, 0, place=stage)
            yield o
            v_read.arrive(self.now)
            yield work("O / l", turn, 0)
            if more:
                yield s
                empty["K"][stage].arrive(self.now)
