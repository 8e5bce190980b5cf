"""Fragments in memory just as threads hold them: added up in global memory, or left in shared memory for another warp.

So what a warp writes at once lies side by side, and nothing is exchanged between lanes.
"""

from functools import lru_cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.typing import signature as numba_signature

from .assembly import (CONSTRAINTS, LLVM_TYPES, emit, float32, float64, int32, pack, registers, uint32, uint64, unpack,
                       with_arity)

WARP_WORDS = 512        # 16 bytes of each lane


def _sums_at(builder, address, thread, count, threads, by_four, real):
    """Where a thread's elements are, as `SumParts` says: the first one's address, and (element, bytes, count, PTX)."""
    step, width, item = (4, ".v4.f32", 4) if by_four else (1, f".f{real.bitwidth}", real.bitwidth // 8)
    at = builder.add(address, builder.zext(builder.mul(thread, thread.type(item * step)), address.type))
    return at, [(first, first * threads * item, step, width) for first in range(0, count, step)]


@lru_cache(maxsize=None)
def make_add_fragment(threads, by_four):
    """Build ``add_fragment(fragment, address, thread)``: add to a group's numbers in global memory, in any order.

    ``red.global.add``, ISA: "Parallel Synchronization and Communication Instructions: red".
    """
    def add_fragment(typing_context, fragment, address, thread):
        def codegen(context, builder, signature, args):
            values = unpack(builder, args[0], fragment.count)
            at, places = _sums_at(builder, *args[1:], fragment.count, threads, by_four, fragment.dtype)
            for first, place, step, width in places:
                names = "{$1, $2, $3, $4}" if by_four else "$1"
                emit(builder, f"red.global.add{width} [$0 + {place}], {names};", ir.VoidType(), [],
                     [at, *values[first:first + step]], ["l"] + [CONSTRAINTS[fragment.dtype]] * step)
            return context.get_dummy_value()

        return numba_signature(types.void, fragment, uint64, int32), codegen

    return with_arity(add_fragment, ("fragment", "address", "thread"))


@lru_cache(maxsize=None)
def make_load_sums(columns, threads, by_four, real=float32):
    """Build ``load_sums(address, thread)``: the fragment that `make_add_fragment` has added up there."""
    def load_sums(typing_context, address, thread):
        def codegen(context, builder, signature, args):
            values = []
            at, places = _sums_at(builder, *args, columns // 2, threads, by_four, real)
            for _, place, step, width in places:
                names = "{$0, $1, $2, $3}" if by_four else "$0"
                loaded = emit(builder, f"ld.global{width} {names}, [${step} + {place}];",
                              ir.LiteralStructType([LLVM_TYPES[real]] * step) if by_four else LLVM_TYPES[real],
                              ["=" + CONSTRAINTS[real]] * step, [at], ["l"])
                values += unpack(builder, loaded, step) if by_four else [loaded]
            return pack(builder, values)

        return numba_signature(registers(real, columns // 2), uint64, int32), codegen

    return with_arity(load_sums, ("address", "thread"))


def _words_at(count, dtype, run, step):
    """Where a warp's fragment lies: (element, bytes, elements, their PTX), for 16 bytes of a lane at a time."""
    at_once, width = (2, ".v2.b64") if dtype == float64 else (4, ".v4.b32")
    for first in range(0, count, at_once):
        runs, within = divmod(first // at_once * WARP_WORDS, run or 1 << 30)
        yield first, runs * step + within, at_once, width


def _operands(first, count):
    return "{" + ", ".join(f"${first + n}" for n in range(count)) + "}"


@lru_cache(maxsize=None)
def make_store_words(run=0, step=0):
    """Build ``store_words(fragment, address)``: leave a warp's fragment in shared memory for `make_load_words`.

    `address`: 16 bytes for each lane before. `run`: bytes after which it goes on `step` bytes from where they began.
    """
    def store_words(typing_context, fragment, address):
        def codegen(context, builder, signature, args):
            words = unpack(builder, args[0], fragment.count)
            for first, place, at_once, width in _words_at(fragment.count, fragment.dtype, run, step):
                emit(builder, f"st.shared{width} [$0 + {place}], {_operands(1, at_once)};", ir.VoidType(), [],
                     [args[1], *words[first:first + at_once]], ["r"] + [CONSTRAINTS[fragment.dtype]] * at_once)
            return context.get_dummy_value()

        return numba_signature(types.void, fragment, uint32), codegen

    return with_arity(store_words, ("fragment", "address"))


store_words = make_store_words()


@lru_cache(maxsize=None)
def make_load_words(count, dtype=uint32, run=0, step=0):
    """Build ``load_words(address)``: the fragment, of so many elements, that another warp has left by `store_words`."""
    def load_words(typing_context, address):
        def codegen(context, builder, signature, args):
            words = []
            for _, place, at_once, width in _words_at(count, dtype, run, step):
                text = f"ld.shared{width} {_operands(0, at_once)}, [${at_once} + {place}];"
                out = emit(builder, text, ir.LiteralStructType([LLVM_TYPES[dtype]] * at_once),
                           ["=" + CONSTRAINTS[dtype]] * at_once, args, ["r"])
                words += unpack(builder, out, at_once)
            return pack(builder, words)

        return numba_signature(registers(dtype, count), uint32), codegen

    return with_arity(load_words, ("address",))
