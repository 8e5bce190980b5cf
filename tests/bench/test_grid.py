"""What forward and backward compare."""

import pytest

from bench import backward, forward, grid, ladder
from bench.contest import Row
from numba_flash import engines


def test_the_shapes_have_their_kernels_compiled_ahead():
    shapes = grid.speed_shapes()
    assert len(shapes) == len(set(shapes)) == 2 * 9 + 4 and len(backward.SHAPES) == 2 * 9 + 6
    for module in forward, backward:
        assert {(dtype, d) for dtype, d, _ in shapes} == {
            (kernel.dtype, kernel.d) for kernel in module.PARTS["speed"].kernels}
    assert all(kernel.backward for part in backward.PARTS.values() for kernel in part.kernels)
    assert not any(kernel.backward for part in forward.PARTS.values() for kernel in part.kernels)


def test_ours_comes_first():
    assert all(next(iter(rivals)) == "hopper" for rivals in (forward.RIVALS, backward.RIVALS, backward.REPEATABLE))


@pytest.mark.parametrize("dtype", ladder.PARTS)
def test_the_ladder_compiles_every_engine_that_has_kernels(dtype):
    without = {"standard", *(engines.ONLY_16_BIT if dtype == "float32" else ())}
    assert {kernel.engine for kernel in ladder.kernels(dtype)} == set(engines.ON_GPU) - without
    assert all(kernel.dtype == dtype for kernel in ladder.PARTS[dtype].kernels)


def test_geometric_means_need_all_ratios_of_the_usual_head_dims():
    def row(d, ratio):
        return Row({"dtype": "bfloat16", "d": d}, 1, "us", "bfloat16", True, figures={"hopper": {}, "cudnn": {}},
                   seconds={"hopper": 1.0, "cudnn": ratio} if ratio else {"hopper": 1.0})

    rows = [row(d, ratio) for d, ratio in ((64, 0.5), (128, 2.0), (96, 9.0))]
    assert grid.geometric_means(rows) == {"bfloat16": pytest.approx(1)}
    assert grid.geometric_means([*rows, row(256, None)]) == {}


def test_only_causal_windows_are_counted():
    for group in grid.option_groups().values():
        plain, *others = group.values()
        assert set(plain) <= {"causal"}
        for options in others:
            assert options.get("causal") == plain.get("causal") and options.get("window", (0, 0))[1] == 0
