"""The counts of bytes against loops that load and store tile by tile, and against the papers."""

import pytest

from reference import traffic
from reference.problem import tiles

SIZES = [(64, 64, 16, 16, 16, 16), (17, 33, 5, 3, 4, 8), (1, 100, 8, 8, 16, 16), (7, 0, 2, 2, 4, 4),
         (0, 7, 2, 2, 4, 4), (100, 30, 8, 4, 32, 7)]
by_size = pytest.mark.parametrize("n_q, n_k, d, d_v, block_m, block_n", SIZES)


class Memory:
    """Counts the bytes of rows that are loaded and stored."""

    def __init__(self, d, d_v, itemsize=2):
        vector, value = d * itemsize, d_v * itemsize
        self.row = dict(q=vector, k=vector, dq=vector, dk=vector, v=value, dv=value, o=value,
                        do=value, m=4, l=4, lse=4, delta=4)
        self.read = self.written = 0

    def load(self, part, *names):
        self.read += (part.stop - part.start) * sum(self.row[name] for name in names)

    def store(self, part, *names):
        self.written += (part.stop - part.start) * sum(self.row[name] for name in names)


def check(memory, count, n_q, n_k, d, d_v, block_m, block_n, **options):
    assert count(n_q, n_k, d, d_v, block_m=block_m, block_n=block_n, **options) == (
        memory.read, memory.written)


@by_size
def test_flash_attention_1(n_q, n_k, d, d_v, block_m, block_n):
    memory = Memory(d, d_v)
    memory.store(slice(0, n_q), "o", "m", "l")
    for cols in tiles(n_k, block_n):
        memory.load(cols, "k", "v")
        for rows in tiles(n_q, block_m):
            memory.load(rows, "q", "o", "m", "l")
            memory.store(rows, "o", "m", "l")
    check(memory, traffic.flash_attention_1_traffic, n_q, n_k, d, d_v, block_m, block_n)


@by_size
def test_flash_attention_2(n_q, n_k, d, d_v, block_m, block_n):
    memory = Memory(d, d_v)
    for rows in tiles(n_q, block_m):
        memory.load(rows, "q")
        for cols in tiles(n_k, block_n):
            memory.load(cols, "k", "v")
        memory.store(rows, "o", "lse")
    check(memory, traffic.flash_attention_2_traffic, n_q, n_k, d, d_v, block_m, block_n)


@by_size
def test_flash_attention_1_backward(n_q, n_k, d, d_v, block_m, block_n):
    memory = Memory(d, d_v)
    memory.store(slice(0, n_q), "dq")
    for cols in tiles(n_k, block_n):
        memory.load(cols, "k", "v")
        for rows in tiles(n_q, block_m):
            memory.load(rows, "q", "o", "do", "dq", "lse")
            memory.store(rows, "dq")
        memory.store(cols, "dk", "dv")
    check(memory, traffic.flash_attention_1_backward_traffic, n_q, n_k, d, d_v, block_m, block_n)


@by_size
@pytest.mark.parametrize("atomic_dq", [False, True])
def test_flash_attention_2_backward(n_q, n_k, d, d_v, block_m, block_n, atomic_dq):
    memory = Memory(d, d_v)
    memory.load(slice(0, n_q), "o", "do")
    memory.store(slice(0, n_q), "delta")
    if atomic_dq:
        memory.store(slice(0, n_q), "dq")
    for cols in tiles(n_k, block_n):
        memory.load(cols, "k", "v")
        for rows in tiles(n_q, block_m):
            memory.load(rows, "q", "do", "lse", "delta")
            if atomic_dq:
                memory.load(rows, "dq")
                memory.store(rows, "dq")
        memory.store(cols, "dk", "dv")
    for rows in [] if atomic_dq else tiles(n_q, block_m):
        memory.load(rows, "q", "do", "lse", "delta")
        for cols in tiles(n_k, block_n):
            memory.load(cols, "k", "v")
        memory.store(rows, "dq")
    check(memory, traffic.flash_attention_2_backward_traffic, n_q, n_k, d, d_v, block_m, block_n,
          atomic_dq=atomic_dq)


def test_standard_counts_whole_matrices():
    """n_q = 2, n_k = 3, d = 5, d_v = 7: q 10, k 15, v 21, o 14 and s 6 numbers."""
    assert traffic.standard_attention_traffic(2, 3, 5, 7, itemsize=1) == (
        10 + 15 + 6 + 6 + 21, 6 + 6 + 14)
    assert traffic.standard_attention_traffic(2, 3, 5, 7, itemsize=1, extra_passes=2) == (
        10 + 15 + 3 * 6 + 6 + 21, 6 + 3 * 6 + 14)
    assert traffic.standard_attention_backward_traffic(2, 3, 5, 7, itemsize=1) == (
        5 * 6 + 2 * 14 + 21 + 15 + 10, 2 * 6 + 21 + 15 + 10)


def test_one_chunk_of_memory_efficient_attention_is_the_standard():
    sizes, blocks = (20, 30, 8), dict(block_m=20, block_n=30)
    standard = traffic.standard_attention_traffic(*sizes)
    chunked = traffic.memory_efficient_attention_traffic(*sizes, **blocks)
    part, lse = 20 * (8 * 2 + 2 * 4), 20 * 4  # what the one chunk leaves for the merge
    assert chunked == (standard.read + part, standard.written + part + lse)


def test_memory_efficient_attention_saves_no_traffic():
    sizes, blocks = (2048, 2048, 64), dict(block_m=256, block_n=256)
    for chunked, standard in [
            (traffic.memory_efficient_attention_traffic, traffic.standard_attention_traffic),
            (traffic.memory_efficient_attention_backward_traffic,
             traffic.standard_attention_backward_traffic)]:
        assert chunked(*sizes, **blocks).total >= standard(*sizes).total


@pytest.mark.parametrize("count", [traffic.flash_attention_1_traffic,
                                   traffic.flash_attention_1_backward_traffic])
def test_flash_attention_1_is_n_squared_d_squared_over_m(count):
    """Four times the traffic for twice the keys and queries, half of it for twice the chip."""
    def total(n, sram_bytes, d=64):
        block_m, block_n = traffic.tile_sizes(sram_bytes, d)
        return count(n, n, d, block_m=block_m, block_n=block_n).total

    n, sram = 2 ** 16, 2 ** 17
    assert total(2 * n, sram) / total(n, sram) == pytest.approx(4, rel=0.02)
    assert total(n, 2 * sram) / total(n, sram) == pytest.approx(1 / 2, rel=0.02)


def test_flash_moves_several_times_less_than_standard():
    blocks = dict(block_m=128, block_n=128)
    for n in (1024, 4096):
        standard = traffic.standard_attention_traffic(n, n, 64).total
        assert 3 < standard / traffic.flash_attention_2_traffic(n, n, 64, **blocks).total < 9
        standard = traffic.standard_attention_backward_traffic(n, n, 64).total
        assert 2 < standard / traffic.flash_attention_2_backward_traffic(n, n, 64, **blocks).total


@pytest.mark.parametrize("change", [dict(n_q=-1), dict(n_k=-1), dict(d=0), dict(d_v=0),
                                    dict(itemsize=0), dict(block_m=0), dict(block_n=0)])
def test_errors(change):
    sizes = dict(n_q=4, n_k=4, d=4, block_m=2, block_n=2) | change
    with pytest.raises(ValueError, match="must be at least"):
        traffic.flash_attention_1_traffic(**sizes)
    with pytest.raises(ValueError, match="sram_bytes must be at least 1"):
        traffic.tile_sizes(0, 64)
