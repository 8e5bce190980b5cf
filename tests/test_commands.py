"""The command line and the demo, at small sizes; the README's code; the examples in docstrings; style."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numba_flash
import reference
from numba_flash import check, demo, engines
from numba_flash.__main__ import main

ROOT = Path(__file__).parent.parent
SMALL = {"dim": 16, "heads": 2, "layers": 1, "context": 16, "batch": 4}


def test_info(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in engines.NAMES) and "numpy" in out and "GPU:" in out
    for line in out[out.index("engines:"):].splitlines()[1:]:
        assert re.match(r"  \w+ +(NumPy|CuPy|simulator): \w", line), line


def test_check_passes(capsys):
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    last = out.splitlines()[-2:]
    assert "right: cpu (cpu), standard (cpu)" in (last[0] if last[1].startswith("did not run: ") else last[1])
    place = "simulator" if engines.simulated() else "gpu"
    assert last[1].startswith("did not run: ") or not (check.gpu_trouble() or engines.simulated())
    for name in engines.ON_TENSOR_CORES:
        assert re.search(rf"^{name} +(\w+ +[\d.]+|{place} +did not run: \w|\w+ +not its problem: )", out, re.M), out


def test_check_fails_with_a_wrong_engine(capsys, monkeypatch):
    name = "flash2" if engines.simulated() else "standard"
    module = engines.load(name)
    real = module.forward

    def wrong(problem, operands, o, lse):
        real(problem, operands, o, lse)
        o *= 1.01

    monkeypatch.setattr(module, "forward", wrong)
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and re.search(rf"^wrong: {name} \(", out, re.M)


def test_demo_learns():
    result = demo.train(demo.Settings(**SMALL, steps=60, learning_rate=1e-2), progress=False)
    assert np.mean(result.losses[-10:]) < 0.8 * result.losses[0]
    assert np.isfinite(result.held_out) and len(result.sample) == 200 and result.tokens_per_second > 0


def test_demo_in_16_bits_learns_the_same():
    ours, other = (demo.train(demo.Settings(**SMALL, steps=20, sample=0, attention_dtype=dtype), progress=False)
                   for dtype in ("float32", "bfloat16"))
    np.testing.assert_allclose(ours.losses, other.losses, rtol=0, atol=2e-2)
    assert ours.losses != other.losses and other.sample == ""


def test_demo_with_the_reference_gives_the_same_losses():
    ours, right = (demo.train(demo.Settings(**SMALL, steps=20, attention=name), progress=False).losses
                   for name in ("auto", "reference"))
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-4)


def test_demo_gradients_by_finite_differences():
    """All of the hand-written backward passes, in float64."""
    settings = demo.Settings(**{**SMALL, "context": 8, "batch": 2, "layers": 2})
    rng = np.random.default_rng(1)
    params = {name: value.astype(np.float64) for name, value in demo.make_params(np, 20, settings).items()}
    tokens, targets = rng.integers(0, 20, (2, 2, 8))
    attend = demo.attention_layer("auto")

    def loss(grads):
        logits, pullback = demo.forward(tokens, params, settings, attend, grads)
        value, loss_back = demo.cross_entropy(logits, targets)
        return value, lambda: pullback(loss_back())

    grads = {}
    loss(grads)[1]()
    assert set(grads) == set(params)
    for name, value in params.items():
        at = (tokens[0, 3], 2) if name == "tokens" else tuple(rng.integers(0, size) for size in value.shape)
        old, step = value[at], 1e-5
        losses = []
        for value[at] in (old + step, old - step):
            losses.append(loss({})[0])
        value[at] = old
        np.testing.assert_allclose(grads[name][at], (losses[0] - losses[1]) / (2 * step), rtol=1e-5, atol=1e-9)


def test_demo_command(tmp_path, capsys):
    (tmp_path / "text").write_text("the cat sat on the mat. " * 40, encoding="utf-8")
    arguments = ["demo", "--text", str(tmp_path / "text"), "--steps", "3"]
    for name, value in SMALL.items():
        arguments += [f"--{name}", str(value)]
    try:
        import matplotlib  # noqa: F401
        arguments += ["--plot", str(tmp_path / "loss.png")]
    except ImportError:
        pass
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "held out" in out and "tokens/s" in out and "it writes:" in out
    assert "--plot" not in arguments or (tmp_path / "loss.png").stat().st_size > 1000


def test_demo_refuses_a_short_text(tmp_path):
    (tmp_path / "text").write_text("short")
    with pytest.raises(ValueError, match="longer --text"):
        demo.train(demo.Settings(text=str(tmp_path / "text")), progress=False)


@pytest.mark.parametrize("arguments, words", [
    (["--sample", "-1"], "--sample must be at least 0"), (["--seed", "-1"], "--seed must be at least 0, got -1"),
    (["--attention-dtype", "int8"], "--attention-dtype must be one of"),
    (["--learning-rate", "-1"], "--learning-rate must be above 0"), (["--learning-rate", "nan"], "above 0"),
    (["--steps", "0"], "--steps must be at least 1"), (["--heads", "3", "--dim", "8"], "multiple of --heads"),
    (["--attention", "hopper"], "--attention hopper"),              # where there is a GPU, as it takes no float32
    (["--text", "/nowhere/at/all"], "nowhere"), (["--attention", "none"], "reference, cpu, standard"),
    (["--plot", "/nowhere/at/all.png"], "--plot")])
def test_demo_says_what_is_wrong(arguments, words, capsys):
    with pytest.raises(SystemExit):
        main(["demo", *arguments])
    assert words in capsys.readouterr().err


def test_demo_refuses_what_is_no_text(tmp_path):
    (tmp_path / "text").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="--text .* is no UTF-8 text"):
        demo.read_text(tmp_path / "text")


def test_demo_refuses_a_plot_that_cannot_be_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        main(["demo", "--plot", str(tmp_path / "a.xyz")])
    assert "--plot must end with one of" in capsys.readouterr().err


def test_unknown_command():
    with pytest.raises(SystemExit):
        main(["fly"])


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("number", range(len(readme_blocks())))
def test_readme_code(number, capsys):
    """Each Python block of the README runs, and prints what the comments behind its prints say."""
    block = readme_blocks()[number]
    if "cupy" in block and check.gpu_trouble():
        pytest.skip(check.gpu_trouble())
    exec(compile(block, f"README block {number}", "exec"), {"__name__": "readme"})
    promised = [line.split("#", 1)[1].strip() for line in block.splitlines()
                if line.startswith("print(") and "#" in line]
    assert capsys.readouterr().out.splitlines() == promised


def test_readme_has_code():
    assert readme_blocks()


MODULES = [module.name for package in (numba_flash, reference)
           for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
           if not module.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} can't be imported here: {error}")
    assert module.__doc__, f"{name} has no docstring"
    results = doctest.testmod(module, extraglobs={"np": np})
    assert results.failed == 0


def test_style():
    pytest.importorskip("flake8")
    done = subprocess.run([sys.executable, "-m", "flake8", "numba_flash", "reference", "tests", "bench"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
