"""How the warpgroups of a block wait for one another and for copies, and share the registers out.

An mbarrier is 8 bytes of shared memory. It counts arrivals, and bytes that copies have yet to write; when both are
down to what was expected, its phase ends and the next one begins. A waiting thread says the parity (0, 1, 0, ...) of
the phase whose end it waits for. Of a barrier on which nobody has arrived yet, "the phase before the first" has parity
1, and waiting for it returns at once.
"""

from functools import lru_cache

from .assembly import instruction, uint32


@instruction("mbarrier.init.shared::cta.b64 [$0], $1;", None, uint32, uint32)
def mbarrier_init(barrier, arrivals):
    """Set an mbarrier up; each phase ends after this many arrivals. ISA: "mbarrier.init"."""


@instruction("fence.mbarrier_init.release.cluster;", None)
def fence_mbarrier_init():
    """Let copies see mbarriers that were just set up. ISA: "membar/fence"."""


@instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", None, uint32)
def mbarrier_arrive(barrier):
    """Arrive. What this thread read or wrote before is done for whoever waits. ISA: "mbarrier.arrive"."""


@instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, uint32, uint32)
def mbarrier_expect(barrier, size):
    """Arrive, and have the phase wait for so many bytes of copies. ISA: "mbarrier.arrive", .expect_tx."""


@instruction("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again; }",
             None, uint32, uint32)
def mbarrier_wait(barrier, parity):
    """Wait until the phase of this parity has ended. ISA: "mbarrier.test_wait/try_wait"."""


@instruction("{ .reg .pred done, late; .reg .u32 tries; mov.u32 tries, 0; again: "
             "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @done bra over; add.u32 tries, tries, 1; "
             "setp.gt.u32 late, tries, 2000000; @late trap; bra again; over: }", None, uint32, uint32)
def mbarrier_wait_or_trap(barrier, parity):
    """`mbarrier_wait` for debugging: the kernel fails where it would hang."""


@instruction("bar.sync $0, $1;", None, uint32, uint32)
def barrier_sync(number, threads):
    """Arrive at one of the block's barriers 0 to 15 and wait for all of its threads. ISA: "bar/barrier"."""


@instruction("bar.arrive $0, $1;", None, uint32, uint32)
def barrier_arrive(number, threads):
    """Arrive at one of the block's barriers, without waiting. ISA: "bar/barrier"."""


@instruction("fence.proxy.async.shared::cta;", None)
def fence_async():
    """Let bulk copies and wgmma see what this thread wrote to shared memory. ISA: "membar/fence", .proxy.async."""


@lru_cache(maxsize=None)
def make_set_registers(direction, count):
    """Build ``set_registers()``: this warpgroup's threads have `count` registers each from now on.

    ``setmaxnreg``, ISA: "Miscellaneous Instructions". The number is part of the instruction. "inc" waits until other
    warpgroups have given enough up by "dec".
    """
    @instruction(f"setmaxnreg.{direction}.sync.aligned.u32 {count};", None)
    def set_registers():
        """See `make_set_registers`."""

    return set_registers
