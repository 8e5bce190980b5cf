"""Every argument that does not fit raises before anything is launched, in words that help; the next call works."""

import math
import weakref

import numpy as np
import pytest
from helpers import problem

import numba_flash as nf
from numba_flash import engines


def x(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


GOOD = {"q": x(2, 4, 3, 8), "k": x(2, 2, 5, 8), "v": x(2, 2, 5, 6)}

BAD = [
    # what is wrong, the arguments that differ from GOOD, the error, words that its text must have
    ("batch", {"k": x(1, 2, 5, 8)}, ValueError, ["batch", "(1, 2, 5, 8)", "(2, 4, 3, 8)"]),
    ("batch of v", {"v": x(1, 2, 5, 6)}, ValueError, ["batch", "(1, 2, 5, 6)"]),
    ("length", {"v": x(2, 2, 6, 6)}, ValueError, ["length", "(2, 2, 6, 6)", "(2, 2, 5, 8)"]),
    ("head dim", {"k": x(2, 2, 5, 7)}, ValueError, ["head dim", "(2, 2, 5, 7)"]),
    ("heads of v", {"v": x(2, 1, 5, 6)}, ValueError, ["heads", "(2, 1, 5, 6)"]),
    ("group", {"q": x(2, 6, 3, 8), "k": x(2, 4, 5, 8), "v": x(2, 4, 5, 6)}, ValueError, ["multiple", "transpose"]),
    ("layout", {"q": x(2, 3, 4, 8)}, ValueError, ["multiple", "transpose(0, 2, 1, 3)"]),
    ("no heads", {"q": x(2, 0, 3, 8), "k": x(2, 0, 5, 8), "v": x(2, 0, 5, 6)}, ValueError, ["heads", "at least 1"]),
    ("no kv heads", {"k": x(2, 0, 5, 8), "v": x(2, 0, 5, 6)}, ValueError, ["at least 1"]),
    ("d of 0", {"q": x(2, 4, 3, 0), "k": x(2, 2, 5, 0)}, ValueError, ["at least 1"]),
    ("d_v of 0", {"v": x(2, 2, 5, 0)}, ValueError, ["at least 1"]),
    ("one axis", {"q": x(8), "k": x(8), "v": x(8)}, ValueError, ["(heads, n, d)", "(8,)"]),
    ("five axes", {"q": x(1, 2, 4, 3, 8)}, ValueError, ["(batch, heads, n, d)"]),
    ("ranks differ", {"k": x(2, 5, 8)}, ValueError, ["same number of axes", "(2, 5, 8)"]),
    ("dtypes differ", {"k": x(2, 2, 5, 8, dtype=np.float16)}, TypeError, ["one dtype", "float16", "float32"]),
    ("integers", {"q": x(2, 4, 3, 8, dtype=np.int32)}, TypeError, ["q ", "int32", "astype"]),
    ("complex", {"v": x(2, 2, 5, 6, dtype=np.complex64)}, TypeError, ["v ", "complex64", "imaginary part", "v.real"]),
    ("long double", {"v": x(2, 2, 5, 6, dtype=np.longdouble)}, TypeError, ["v ", "v.astype('float64')"]),
    ("long double bias", {"bias": x(3, 5, dtype=np.longdouble)}, TypeError, ["bias.astype('float64')"]),
    ("strings", {"q": np.full((2, 4, 3, 8), "a")}, TypeError, ["q "]),
    ("objects", {"q": x(2, 4, 3, 8).astype(object)}, TypeError, ["q ", "object"]),
    ("byte order", {"q": x(2, 4, 3, 8, dtype=">f4")}, TypeError, ["byte order", ">f4", "astype"]),
    ("list", {"q": [[1.0]]}, TypeError, ["q ", "list", "asarray"]),
    ("None", {"k": None}, TypeError, ["k must be an array, got None"]),
    ("matrix", {"q": np.ones((3, 8), np.float32).view(np.matrix)}, TypeError, ["matrix"]),
    ("masked array", {"q": np.ma.masked_array(x(2, 4, 3, 8))}, TypeError, ["MaskedArray"]),
    ("foreign thing", {"q": object()}, TypeError, ["q ", "DLPack"]),
    ("causal", {"causal": "lower"}, ValueError, ["causal", "'lower'", "top_left"]),
    ("causal number", {"causal": 2}, ValueError, ["causal", "2"]),
    ("window below -1", {"window": (-2, 0)}, ValueError, ["window", "(-2, 0)"]),
    ("window of three", {"window": (1, 2, 3)}, ValueError, ["window", "(left, right)"]),
    ("window of floats", {"window": (1.5, 0)}, TypeError, ["window", "1.5"]),
    ("window as number", {"window": 3}, TypeError, ["window", "3"]),
    ("softcap 0", {"softcap": 0}, ValueError, ["softcap", "positive"]),
    ("softcap below 0", {"softcap": -1.0}, ValueError, ["softcap", "-1"]),
    ("softcap inf", {"softcap": math.inf}, ValueError, ["softcap", "finite"]),
    ("softcap beyond float32", {"softcap": 1e39}, ValueError, ["softcap", "float32"]),
    ("softcap rounds to 0", {"softcap": 1e-50}, ValueError, ["softcap", "float32"]),
    ("scale beyond float32", {"scale": 10**400}, ValueError, ["scale", "float32"]),
    ("precision unknown", {"precision": "fp16"}, ValueError, ["precision", "tf32", "fp16"]),
    ("precision float64", {"precision": "tf32", "q": x(2, 4, 3, 8, dtype=np.float64),
                           "k": x(2, 2, 5, 8, dtype=np.float64), "v": x(2, 2, 5, 6, dtype=np.float64)}, ValueError,
     ["precision", "tf32", "float64", "astype"]),
    ("precision list", {"precision": []}, ValueError, ["precision", "tf32", "[]"]),
    ("softcap text", {"softcap": "30"}, TypeError, ["softcap", "str"]),
    ("scale nan", {"scale": math.nan}, ValueError, ["scale", "nan"]),
    ("scale array", {"scale": x(1)}, TypeError, ["scale", "ndarray"]),
    ("scale bool", {"scale": True}, TypeError, ["scale", "bool"]),
    ("slopes shape", {"alibi_slopes": x(3)}, ValueError, ["alibi_slopes", "(4,)", "(3,)"]),
    ("slopes dtype", {"alibi_slopes": np.arange(4)}, TypeError, ["alibi_slopes", "int64"]),
    ("slopes number", {"alibi_slopes": 0.5}, TypeError, ["alibi_slopes", "float"]),
    ("bias shape", {"bias": x(3, 6)}, ValueError, ["bias", "(2, 4, 3, 5)", "(3, 6)"]),
    ("bias rank", {"bias": x(1, 2, 4, 3, 5)}, ValueError, ["bias", "(1, 2, 4, 3, 5)"]),
    ("bias bool", {"bias": np.ones((3, 5), bool)}, TypeError, ["bias", "bool"]),
    ("mask shape", {"mask": np.ones((3, 6), bool)}, ValueError, ["mask", "(3, 6)"]),
    ("mask uint8", {"mask": np.ones((3, 5), np.uint8)}, TypeError, ["mask", "uint8", "bool"]),
    ("mask float", {"mask": x(3, 5)}, TypeError, ["mask", "float32", "bias"]),
    ("sinks shape", {"sinks": x(2)}, ValueError, ["sinks", "(4,)", "(2,)"]),
    ("sinks dtype", {"sinks": np.arange(4)}, TypeError, ["sinks", "int64"]),
    ("unknown option", {"is_causal": True}, TypeError, ["attention()", "'is_causal'", "the options are scale, causal"]),
    ("return_lse text", {"return_lse": "no"}, TypeError, ["return_lse must be True or False, got 'no'"]),
    ("return_lse number", {"return_lse": 1}, TypeError, ["return_lse must be True or False, got 1"]),
    ("return_lse array", {"return_lse": x(2, 2)}, TypeError, ["return_lse must be True or False, got ndarray"]),
    ("mask of batch and keys", {"mask": np.ones((2, 5), bool)}, ValueError, ["mask[:, None, None, :]"]),
    ("out list", {"out": []}, TypeError, ["out ", "list", "np.empty(shape, dtype)"]),
    ("engine", {"kernel": "cudnn"}, ValueError, ["kernel", "'cudnn'", "cpu"]),
    ("engine array", {"kernel": x(2)}, TypeError, ["kernel", "ndarray"]),
    ("causal array", {"causal": x(2)}, ValueError, ["causal"]),
    ("out shape", {"out": x(2, 4, 3, 8)}, ValueError, ["out", "(2, 4, 3, 6)"]),
    ("out dtype", {"out": x(2, 4, 3, 6, dtype=np.float64)}, TypeError, ["out", "float64"]),
    ("out stride 0", {"out": np.lib.stride_tricks.as_strided(x(1), (2, 4, 3, 6), (0,) * 4)}, ValueError,
     ["out", "strides"]),
    ("out read-only", {"out": np.broadcast_to(x(1), (2, 4, 3, 6))}, ValueError, ["out", "writable"]),
]


@pytest.mark.parametrize("change, error, words", [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_argument(change, error, words):
    arguments = {**GOOD, **change}
    with pytest.raises(error) as caught:
        nf.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    assert nf.attention(*GOOD.values()).shape == (2, 4, 3, 6)


@pytest.mark.parametrize("good, bad, error", [
    ({"scale": 1}, {"scale": True}, TypeError), ({"scale": 1.0}, {"scale": np.True_}, TypeError),
    ({"softcap": 1.0}, {"softcap": True}, TypeError), ({"causal": True}, {"causal": 1}, ValueError),
    ({"causal": False}, {"causal": 0.0}, ValueError), ({"causal": np.True_}, {"causal": np.float64(1)}, ValueError),
    ({"window": (1, 0)}, {"window": (1.0, 0)}, TypeError), ({"window": [1, 0]}, {"window": [1, -2]}, ValueError),
    ({}, {"scale": []}, TypeError), ({}, {"causal": []}, ValueError), ({"window": None}, {"window": ()}, ValueError),
    ({"mask": np.True_[None, None]}, {"mask": np.ones((1, 1))}, TypeError)], ids=str)
def test_a_wrong_call_that_equals_a_right_one(good, bad, error):
    """What was worked out for a call is kept for calls like it: True == 1 == 1.0, and yet they aren't alike."""
    right = nf.attention(*GOOD.values(), **good)
    with pytest.raises(error):
        nf.attention(*GOOD.values(), **bad)
    np.testing.assert_array_equal(nf.attention(*GOOD.values(), **good), right)


def test_shapes_and_dtypes_are_checked_at_each_call():
    nf.attention(*GOOD.values())
    for name, value in ("k", x(2, 2, 4, 8)), ("v", x(2, 2, 5, 6, dtype=np.float16)), ("q", x(2, 4, 3, 8, dtype=">f4")):
        with pytest.raises((TypeError, ValueError)):
            nf.attention(**{**GOOD, name: value})


def test_arguments_are_not_kept():
    arguments = {name: value.copy() for name, value in GOOD.items()} | {"sinks": x(4), "bias": x(3, 5)}
    kept = [weakref.ref(value) for value in arguments.values()]
    nf.attention(**arguments, kernel="standard")
    arguments.clear()
    assert not any(reference() is not None for reference in kept)


BACKWARD_BAD = [
    ("do shape", {"do": x(2, 4, 3, 8)}, ValueError, ["do ", "(2, 4, 3, 6)"]),
    ("do dtype", {"do": x(2, 4, 3, 6, dtype=np.float64)}, TypeError, ["do ", "float64"]),
    ("o shape", {"o": x(2, 4, 3, 8)}, ValueError, ["o ", "(2, 4, 3, 6)"]),
    ("lse shape", {"lse": x(2, 4, 5)}, ValueError, ["lse", "(2, 4, 3)"]),
    ("lse dtype", {"lse": x(2, 4, 3, dtype=np.float64)}, TypeError, ["lse", "float64"]),
    ("dlse shape", {"dlse": x(2, 4)}, ValueError, ["dlse", "(2, 4, 3)"]),
    ("dlse dtype", {"dlse": np.ones((2, 4, 3), int)}, TypeError, ["dlse", "int64"]),
    ("unknown need", {"need": ("mask",)}, ValueError, ["need", "'mask'"]),
    ("need without bias", {"need": "bias"}, ValueError, ["need", "bias="]),
    ("need without sinks", {"need": ["sinks"]}, ValueError, ["need", "sinks="]),
    ("engine", {"kernel": "none"}, ValueError, ["kernel"]),
    ("option", {"softcap": -1}, ValueError, ["softcap"]),
    ("unknown option", {"dropout": 0.1}, TypeError, ["attention_backward()", "'dropout'", "softcap"]),
    ("need number", {"need": 5}, ValueError, ["need", "5"]),
    ("need None", {"need": None}, ValueError, ["need", "None", "pass () for none"]),
    ("do None", {"do": None}, TypeError, ["do "]),
    ("deterministic text", {"deterministic": "yes"}, TypeError, ["deterministic must be True or False, got 'yes'"]),
    ("deterministic None", {"deterministic": None}, TypeError, ["deterministic must be True or False, got None"]),
    ("deterministic array", {"deterministic": x(2, 2)}, TypeError, ["deterministic must be True", "got ndarray"]),
]


@pytest.mark.parametrize("change, error, words", [row[1:] for row in BACKWARD_BAD],
                         ids=[row[0] for row in BACKWARD_BAD])
def test_bad_argument_backward(change, error, words):
    o, lse = nf.attention(*GOOD.values(), return_lse=True)
    arguments = {"do": o, **GOOD, "o": o, "lse": lse, **change}
    with pytest.raises(error) as caught:
        nf.attention_backward(*[arguments.pop(name) for name in ("do", "q", "k", "v", "o", "lse")], **arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bools_may_be_numpys():
    o, lse = nf.attention(*GOOD.values(), return_lse=np.True_)
    nf.attention_backward(o, *GOOD.values(), o, lse, deterministic=np.False_)
    for change, name in ({"return_lse": "no"}, "return_lse"), ({"return_lse": False}, "deterministic"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
            nf.attention_vjp(*GOOD.values(), **change)[1](o, deterministic="no")


@pytest.mark.parametrize("change", [{"mask": np.ones((3, 6), bool)}, {"bias": x(2, 4)}, {"k": None}], ids=str)
def test_no_advice_where_it_would_not_help(change):
    with pytest.raises((TypeError, ValueError), match="^[^;]*$"):
        nf.attention(**{**GOOD, **change})


def overlapping(name):
    """Arguments of which `out` shares memory with the one called `name`."""
    arguments = {key: x(2, 4, 5, 6) for key in "qkv"}
    if name in arguments:
        return {**arguments, "out": arguments[name][...]}
    if name == "mask":
        memory = np.ones((2, 4, 5, 24), bool)
        return {**arguments, "mask": memory[..., :5], "out": memory.view(np.float32)}
    if name == "bias":               # of which the engines get a copy, in float32
        arguments = {key: value.astype(np.float16) for key, value in arguments.items()}
        memory = x(2, 4, 5, 6, dtype=np.float16)
        return {**arguments, "bias": memory[..., :5], "out": memory}
    memory = x(2, 4, 5, 6)
    return {**arguments, name: memory[0, :, 0, 0], "out": memory}


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "alibi_slopes", "sinks"])
def test_out_may_not_overlap_an_input(name):
    with pytest.raises(ValueError, match=f"out must not overlap.*{name}"):
        nf.attention(**overlapping(name))


def test_out_may_interleave_with_an_input():
    memory = np.zeros((2, 4, 5, 2, 6), np.float32)
    q, out = memory[..., 0, :], memory[..., 1, :]
    q[...] = np.random.default_rng(0).standard_normal(q.shape)
    assert nf.attention(q, q, q, out=out) is out
    np.testing.assert_array_equal(out, nf.attention(q, q, q))


def test_out_of_any_layout(engine):
    _, q, k, v = problem(n_q=5, n_k=7, d=6)
    right, _ = engine.attention(q, k, v, causal=True)
    for layout in (lambda z: z, lambda z: z[:, :, ::-1], np.asfortranarray):
        out = engine.put(layout(np.full_like(right, np.nan)))
        got = nf.attention(*map(engine.put, (q, k, v)), out=out, causal=True, kernel=engine.kernel)
        assert got is out
        np.testing.assert_array_equal(engine.get(got), right)


def test_an_engine_elsewhere_says_so():
    if engines.simulated():
        pytest.skip("in the simulator GPU engines take NumPy arrays")
    with pytest.raises(ValueError, match="kernel='flash2' runs on a GPU.*CuPy.*NUMBA_ENABLE_CUDASIM=1 before"):
        nf.attention(*GOOD.values(), kernel="flash2")
    with pytest.raises(ValueError, match="kernel='mma' runs on a GPU") as caught:
        nf.attention(*GOOD.values(), kernel="mma")
    assert "NUMBA_ENABLE_CUDASIM" not in str(caught.value)


def test_read_only_inputs(engine):
    arrays = problem(n_q=5, n_k=7)
    if engine.place != "cupy":
        for z in arrays:
            z.flags.writeable = False
    engine.check(*arrays)


def test_memmap(tmp_path):
    q = np.memmap(tmp_path / "q", np.float32, "w+", shape=(1, 1, 3, 4))
    q[...] = np.random.default_rng(0).standard_normal(q.shape)
    o = nf.attention(q, q, q)
    assert type(o) is np.ndarray
    np.testing.assert_array_equal(o, nf.attention(*[np.asarray(q)] * 3))


def test_the_answer_is_new_memory(engine):
    do, q, k, v = problem(n_q=1, n_k=1, d=4)
    for name, got in zip(("o", "lse", "dq", "dk", "dv"), engine.both(do, q, k, v)):
        assert got.flags.c_contiguous, name
        assert not any(np.shares_memory(got, z) for z in (do, q, k, v)), name
