"""`flash2` at tiny sizes in Numba's CUDA simulator, or at larger ones on a GPU: what its loops could get wrong."""

import numpy as np
import pytest
from helpers import Engine, problem

from numba_flash import engines

SIMULATED = engines.simulated()
ENGINE = Engine("flash2", "simulator" if SIMULATED else "cupy")
pytestmark = pytest.mark.simulator if SIMULATED else pytest.mark.gpu
TILE = 8 if SIMULATED else 128          # the largest rows of a tile: sizes are told in it


@pytest.mark.parametrize("n_q, n_k", [(1, 1), (TILE, 2 * TILE), (TILE + 1, 2 * TILE + 3), (2 * TILE - 1, TILE - 1)])
def test_tiles_and_tails(n_q, n_k):
    do, q, k, v = problem(n_q=n_q, n_k=n_k, d=5, d_v=20)
    k[:, :, -3:] *= 10                  # the last tile brings new maxima: alpha matters
    ENGINE.check(do, q, k, v, dlse=do[..., 0])


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (TILE, 2)},
                                     {"causal": "top_left", "window": (TILE + 1, None)}], ids=str)
def test_ranges_of_tiles(options):
    """Every query tile begins and ends at another K/V tile, some rows see nothing, and two heads share their keys."""
    ENGINE.check(*problem(heads=2, kv_heads=1, n_q=2 * TILE + 3, n_k=TILE + 2, d=4), **options)


@pytest.mark.parametrize("d, d_v", [(1, 1), (17, 3), (3, 33)])
def test_head_dims(d, d_v):
    ENGINE.check(*problem(n_q=TILE + 1, n_k=TILE + 1, d=d, d_v=d_v))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    import ml_dtypes
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    ENGINE.check(*problem(n_q=TILE - 1, n_k=TILE + 1, d=5, dtype=dtype), causal=True)


def test_hidden_rows_and_keys_have_no_effect():
    """NaN and Inf in a key that nobody sees, in keys that some rows of a tile see, and in a query that sees nothing."""
    rng = np.random.default_rng(0)
    do, q, k, v = problem(n_q=TILE + 2, n_k=TILE + 3, d=4)
    mask = rng.random((TILE + 2, TILE + 3)) < .7
    mask[1], mask[:, 2], mask[:-1, 3] = False, False, False
    clean = ENGINE.both(do, q, k, v, mask=mask)
    for x in do, q:
        x[:, :, 1] = np.nan
    k[:, :, 2], v[:, :, 2] = np.nan, np.inf
    dirty = ENGINE.both(do, q, k, v, mask=mask)
    for a, b in zip(clean, dirty):
        np.testing.assert_array_equal(a, b)
    v[:, :, 3] = np.nan                 # seen by the last row only
    o, _ = ENGINE.attention(q, k, v, mask=mask)
    assert np.isnan(o[:, :, -1]).all() == mask[-1, 3] and not np.isnan(o[:, :, :-1]).any()


@pytest.mark.parametrize("shape", [(2, 2, TILE + 1, TILE + 2), (1, 2, 1, TILE + 2), (2, 1, TILE + 1, 1),
                                   (1, 1, 1, 1)], ids=str)
def test_dbias_of_every_broadcast(shape):
    bias = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    ENGINE.check(*problem(batch=2, n_q=TILE + 1, n_k=TILE + 2, d=3), bias=bias, need=("bias",))


def test_all_options_at_once():
    rng = np.random.default_rng(2)
    bias = rng.standard_normal((1, 2, TILE + 1, TILE + 2)).astype(np.float32)
    bias[..., 3] = -np.inf
    ENGINE.check(*problem(n_q=TILE + 1, n_k=TILE + 2, d=3), causal=True, softcap=2., bias=bias,
                 alibi_slopes=np.float32([.5, .1]), mask=rng.random((TILE + 1, TILE + 2)) < .8,
                 sinks=np.float32([.3, -1]), need=("bias", "sinks"))


def test_any_strides():
    do, q, k, v = problem(n_q=TILE + 1, n_k=TILE + 1, d=6)
    right = ENGINE.both(do, q, k, v)
    odd = (np.broadcast_to(do[:, :, :, :1], do.shape), q[..., ::-1],
           k.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2), v[:, :, ::-1])
    same = [np.ascontiguousarray(x) for x in odd]
    for a, b in zip(ENGINE.both(*odd), ENGINE.both(*same)):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(right, ENGINE.both(do, q, k, v)):       # and every run gives the same bits
        np.testing.assert_array_equal(a, b)


def test_a_single_visible_key_gives_its_value():
    _, q, k, v = problem(n_q=TILE + 1, n_k=TILE + 1, d=3)
    o, _ = ENGINE.attention(q, k, v, window=(0, 0))
    np.testing.assert_array_equal(o, v)
