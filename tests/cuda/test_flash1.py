"""`flash1` at tiny sizes in Numba's CUDA simulator, or at larger ones on a GPU: what its loops could get wrong."""

import numpy as np
import pytest
from helpers import Engine, problem

from numba_flash import engines

SIMULATED = engines.simulated()
ENGINE = Engine("flash1", "simulator" if SIMULATED else "cupy")
pytestmark = pytest.mark.simulator if SIMULATED else pytest.mark.gpu
TILE = 8 if SIMULATED else 64           # the largest rows of a tile: sizes are told in it


@pytest.mark.parametrize("n_q, n_k", [(1, 1), (TILE, 2 * TILE), (TILE + 1, 2 * TILE + 3)])
def test_corrects_o_m_and_l_with_every_tile(n_q, n_k):
    do, q, k, v = problem(n_q=n_q, n_k=n_k, d=5, d_v=20)
    k[:, :, -3:] *= 10                  # the last tile brings new maxima
    ENGINE.check(do, q, k, v, dlse=do[..., 0])


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (TILE, 2)}], ids=str)
def test_ranges_of_tiles(options):
    """Query tiles that a K/V tile skips keep O, m and l; rows that see nothing get o = 0; heads share keys."""
    ENGINE.check(*problem(heads=2, kv_heads=1, n_q=2 * TILE + 3, n_k=TILE + 2, d=4), **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    """16-bit O and dQ are updated in float32 and rounded once."""
    import ml_dtypes
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    ENGINE.check(*problem(n_q=TILE - 1, n_k=2 * TILE + 1, d=5, dtype=dtype), causal=True)


def test_hidden_rows_and_keys_have_no_effect():
    rng = np.random.default_rng(0)
    do, q, k, v = problem(n_q=TILE + 2, n_k=TILE + 3, d=4)
    mask = rng.random((TILE + 2, TILE + 3)) < .7
    mask[1], mask[:, 2] = False, False
    clean = ENGINE.both(do, q, k, v, mask=mask)
    for x in do, q:
        x[:, :, 1] = np.nan
    k[:, :, 2], v[:, :, 2] = np.nan, np.inf
    for a, b in zip(clean, ENGINE.both(do, q, k, v, mask=mask)):
        np.testing.assert_array_equal(a, b)


def test_all_options_at_once():
    rng = np.random.default_rng(2)
    bias = rng.standard_normal((1, 2, TILE + 1, TILE + 2)).astype(np.float32)
    bias[..., 3] = -np.inf
    ENGINE.check(*problem(n_q=TILE + 1, n_k=TILE + 2, d=3), causal=True, softcap=2., bias=bias,
                 alibi_slopes=np.float32([.5, .1]), mask=rng.random((TILE + 1, TILE + 2)) < .8,
                 sinks=np.float32([.3, -1]), need=("bias", "sinks"))


def test_a_single_visible_key_gives_its_value():
    _, q, k, v = problem(n_q=TILE + 1, n_k=TILE + 1, d=3)
    o, _ = ENGINE.attention(q, k, v, window=(0, 0))
    np.testing.assert_array_equal(o, v)
