"""The two hooks of `numba_flash.scores`, applied to a thread's micro-tile of scores in every kernel."""

from functools import lru_cache
from math import exp, inf

from ..scores import make_score, squash, visible
from .compile import device
from .memory import read
from .signatures import real_type

sees = device(visible)


@lru_cache(maxsize=None)
def make_hooks(tile, spec, transposed=False):
    """Build the device functions that a kernel with this tile shape and these options applies to its micro-tiles.

    Code for options that a call doesn't have is not compiled. The functions take three tuples that kernels make::

        here    = i_first, j_first, ty, tx              where the tile begins, and which thread this is
        band    = n_q, n_k, offset, left, right         who may see whom
        options = cap, slopes, biases, masks, b, h      None for the arrays that are not there

    Parameters
    ----------
    tile : TileConfig
    spec : Spec
    transposed : bool
        Whether rows of the micro-tiles are keys and columns queries.

    Returns
    -------
    score_tile, hide_tile, probability_tile, gradient_tile : function
        See their docstrings.

    Notes
    -----
    Pairs past the ends, which a tile at the edge has, read element 0 of `biases` and `masks`: no branch keeps a load
    waiting.
    """
    threads_m, threads_n = tile.threads_m, tile.threads_n
    alibi, bias, mask = spec.alibi, spec.bias, spec.mask
    real = real_type(spec.dtype)
    score, score_grad = map(device, make_score(spec.softcap, alibi, bias, device(squash)))

    @device
    def pair(r, c, here):
        i_first, j_first, ty, tx = here
        if transposed:
            return i_first + tx + c * threads_n, j_first + ty + r * threads_m
        return i_first + ty + r * threads_m, j_first + tx + c * threads_n

    @device
    def pair_score(x, i, j, band, options):
        n_q, n_k, offset, _, _ = band
        cap, slopes, biases, _, b, h = options
        slope = read(slopes, (b, h)) if alibi else real(0)
        distance = real(abs(i + offset - j)) if alibi else real(0)
        added = read(biases, (b, h, i if i < n_q else 0, j if j < n_k else 0)) if bias else real(0)
        return score(x, cap, slope, distance, added)

    @device
    def score_tile(s, scale, here, band, options):
        """Turn ``q·k`` into scores, all of them as if visible."""
        for r in range(s.shape[0]):
            for c in range(s.shape[1]):
                i, j = pair(r, c, here)
                s[r, c] = pair_score(scale * s[r, c], i, j, band, options)

    @device
    def hide_tile(s, value, here, band, options):
        """Write `value` where the key is hidden: by the band, the mask, a bias of -inf, or past an end."""
        n_q, n_k, offset, left, right = band
        _, _, biases, masks, b, h = options
        for r in range(s.shape[0]):
            for c in range(s.shape[1]):
                i, j = pair(r, c, here)
                seen = (i < n_q) & (j < n_k) & sees(i, j, offset, left, right)
                if mask:
                    seen &= read(masks, (b, h, i if i < n_q else 0, j if j < n_k else 0))
                if bias:
                    seen &= read(biases, (b, h, i if i < n_q else 0, j if j < n_k else 0)) != real(-inf)
                s[r, c] = s[r, c] if seen else value

    @device
    def probability_tile(p, s, lse_tile, scale, here, band, options):
        """From ``q·k`` to ``p = exp(score - lse)``, all as if visible; `lse_tile` is the lse of the tile's queries."""
        i_first = here[0]
        for r in range(s.shape[0]):
            for c in range(s.shape[1]):
                i, j = pair(r, c, here)
                p[r, c] = real(exp(pair_score(scale * s[r, c], i, j, band, options) - lse_tile[i - i_first]))

    @device
    def gradient_tile(dp, p, s, delta_tile, scale, here, cap):
        """From dp to ds, the gradient at ``scale * q·k``: ``p (dp - delta) score'``; a pair without weight has none."""
        i_first = here[0]
        for r in range(s.shape[0]):
            for c in range(s.shape[1]):
                i, _ = pair(r, c, here)
                ds = p[r, c] * (dp[r, c] - delta_tile[i - i_first]) * real(score_grad(scale * s[r, c], cap))
                dp[r, c] = real(0) if p[r, c] <= real(0) else ds

    return score_tile, hide_tile, probability_tile, gradient_tile
