"""Train a character-level transformer with hand-written gradients: the library as somebody would use it.

Every layer is a function of its input and the parameters that returns its output and a pullback, a function from the
gradient at the output to the gradient at the input; `attention_vjp` is one layer among them. A layer's pullback puts
the gradients of its parameters into a dictionary under their names. NumPy or CuPy, whichever `xp` is; float32.

    tokens -> embedding + positions -> layers x (x += attention(norm(x)); x += mlp(norm(x))) -> norm -> logits -> loss
"""

import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from tqdm import tqdm

from . import engines
from .attention import attention_vjp
from .describe import describe
from .problem import BFLOAT16, FLOAT16, FLOAT32

ATTENTION_DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


def setting(default, help):
    """A field of `Settings` that is an option of the command line too."""
    return field(default=default, metadata={"help": help})


@dataclass
class Settings:
    """Sizes of the model and of its training; the defaults halve the loss within a minute or so on two cores."""

    text: str | None = setting(None, "a text file to learn from instead of Python's own help topics")
    attention: str = setting("auto", "an engine's name, or 'reference' for the NumPy reference")
    attention_dtype: str = setting("float32", "of q, k, v and o: float32, float16 or bfloat16")
    steps: int = setting(700, "optimizer steps")
    batch: int = setting(16, "windows of text in a step")
    context: int = setting(64, "characters in a window")
    dim: int = setting(128, "width of the residual stream")
    heads: int = setting(4, "attention heads")
    layers: int = setting(2, "transformer layers")
    learning_rate: float = setting(3e-3, "Adam's, at its highest")
    seed: int = setting(0, "of weights, batches and sample")
    sample: int = setting(200, "characters to write at the end")

    def __post_init__(self):
        for name in ("steps", "batch", "context", "dim", "heads", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("sample", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"--learning-rate must be above 0 and finite, got {self.learning_rate}")
        if self.attention_dtype not in ATTENTION_DTYPES:
            raise ValueError(f"--attention-dtype must be one of {', '.join(ATTENTION_DTYPES)}, "
                             f"got {self.attention_dtype}")
        if self.dim % self.heads:
            raise ValueError(f"--dim must be a multiple of --heads, got {self.dim} and {self.heads}")


@dataclass
class Result:
    """What a training run hands back."""

    losses: list = field(default_factory=list)
    held_out: float = float("nan")
    sample: str = ""
    tokens_per_second: float = 0.0


# ---- data ------------------------------------------------------------------------------------------------------------

def read_text(path=None):
    """English that every Python carries (the topics of ``help()``, about half a megabyte), or a file of your own."""
    if path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except UnicodeDecodeError:
            raise ValueError(f"--text {path} is no UTF-8 text") from None
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def batches(tokens, settings, rng):
    """Yield random windows of the text and, for each character, the one that follows it."""
    while True:
        starts = rng.integers(0, len(tokens) - settings.context, settings.batch)
        windows = tokens[starts[:, None] + np.arange(settings.context + 1)]
        yield windows[:, :-1], windows[:, 1:]


# ---- layers: each returns its output and its pullback ----------------------------------------------------------------

def linear(x, params, grads, name):
    """``y = x w + b``."""
    w = params[name + ".w"]

    def pullback(dy):
        rows = dy.reshape(-1, dy.shape[-1])
        grads[name + ".w"] = x.reshape(-1, x.shape[-1]).T @ rows
        grads[name + ".b"] = rows.sum(0)
        return dy @ w.T

    return x @ w + params[name + ".b"], pullback


def layer_norm(x, params, grads, name):
    """Each row to mean 0 and variance 1, then a learned gain."""
    gain = params[name + ".gain"]
    centred = x - x.mean(-1, keepdims=True)
    deviation = ((centred**2).mean(-1, keepdims=True) + 1e-5)**0.5
    unit = centred / deviation

    def pullback(dy):
        grads[name + ".gain"] = (dy * unit).sum((0, 1))
        du = dy * gain
        return (du - du.mean(-1, keepdims=True) - unit * (du * unit).mean(-1, keepdims=True)) / deviation

    return unit * gain, pullback


def causal_attention(x, params, grads, name, heads, attend):
    """Multi-head attention. The heads are views of one matrix product, in (batch, n, head, d) layout: no copies."""
    xp, (batch, n, dim) = namespace(x), x.shape
    qkv, project_back = linear(x, params, grads, name + ".qkv")
    q, k, v = qkv.reshape(batch, n, 3, heads, dim // heads).transpose(2, 0, 3, 1, 4)
    o, attend_back = attend(q, k, v)
    y, output_back = linear(o.transpose(0, 2, 1, 3).reshape(x.shape), params, grads, name + ".out")

    def pullback(dy):
        do = output_back(dy).reshape(batch, n, heads, dim // heads).transpose(0, 2, 1, 3)
        dqkv = xp.stack(attend_back(do)).transpose(1, 3, 0, 2, 4).reshape(qkv.shape)
        return project_back(dqkv)

    return y, pullback


def mlp(x, params, grads, name):
    """Widen four times, ReLU, and back."""
    wide, widen_back = linear(x, params, grads, name + ".up")
    active = wide > 0
    y, narrow_back = linear(wide * active, params, grads, name + ".down")
    return y, lambda dy: widen_back(narrow_back(dy) * active)


def cross_entropy(logits, targets):
    """Mean of -log softmax(logits)[target] over all positions."""
    xp = namespace(logits)
    logits = logits - logits.max(-1, keepdims=True)
    log_p = logits - xp.log(xp.exp(logits).sum(-1, keepdims=True))
    picked = xp.take_along_axis(log_p, targets[..., None], -1)

    def pullback():
        d_logits = xp.exp(log_p)
        xp.put_along_axis(d_logits, targets[..., None], xp.exp(picked) - 1, -1)
        return d_logits / targets.size

    return -picked.mean(), pullback


# ---- the model -------------------------------------------------------------------------------------------------------

def namespace(x):
    """NumPy or CuPy, whichever `x` belongs to."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


def attention_layer(name, dtype=None):
    """The attention that ``--attention`` asks for, as ``attend(q, k, v) -> o, pullback``; in a dtype of its own."""
    if name != "reference":
        attend = partial(attention_vjp, causal=True, kernel=name)
        return attend if dtype is None else rounded(attend, dtype)
    import reference

    def attend(q, k, v):
        xp = namespace(q)
        host = [x if xp is np else x.get() for x in (q, k, v)]

        def pullback(do):
            do = do if xp is np else do.get()
            grads = reference.standard_attention_backward(do, *host, causal=True)
            return [xp.asarray(grad, dtype=q.dtype) for grad in grads]

        return xp.asarray(reference.standard_attention(*host, causal=True), dtype=q.dtype), pullback

    return attend


def choose_engines(settings, xp):
    """Raise a ValueError if the engine can't do the demo's attention here, in either direction."""
    shape = settings.batch, settings.heads, settings.context, settings.dim // settings.heads
    q = xp.empty(shape, ATTENTION_DTYPES[settings.attention_dtype])
    call = describe("attention_vjp", q, q, q, causal=True)
    for backward in (False, True):
        engines.choose(settings.attention, call.device, call.problem, backward)


def rounded(attend, dtype):
    """The same attention on q, k, v of another dtype; o and gradients come back in theirs."""
    def attend_rounded(q, k, v):
        if q.dtype == dtype:
            return attend(q, k, v)
        o, pullback = attend(*(x.astype(dtype) for x in (q, k, v)))
        return o.astype(q.dtype), lambda do: [grad.astype(q.dtype) for grad in pullback(do.astype(dtype))]

    return attend_rounded


def make_params(xp, vocabulary, settings):
    """Random weights by name, scaled so that every layer starts with outputs of about the size of its inputs."""
    rng, dim = np.random.default_rng(settings.seed), settings.dim
    params = {"tokens": rng.standard_normal((vocabulary, dim)),
              "positions": 0.5 * rng.standard_normal((settings.context, dim)), "norm.gain": np.ones(dim)}

    def add_linear(name, n_in, n_out, gain=1.0):
        params[name + ".w"] = gain * rng.standard_normal((n_in, n_out)) / n_in**0.5
        params[name + ".b"] = np.zeros(n_out)

    into_residual = (2 * settings.layers)**-0.5              # the residual stream sums 2 * layers of these
    for i in range(settings.layers):
        params[f"{i}.norm1.gain"] = params[f"{i}.norm2.gain"] = np.ones(dim)
        add_linear(f"{i}.qkv", dim, 3 * dim)
        add_linear(f"{i}.out", dim, dim, into_residual)
        add_linear(f"{i}.up", dim, 4 * dim)
        add_linear(f"{i}.down", 4 * dim, dim, into_residual)
    add_linear("head", dim, vocabulary, 0.1)
    return {name: xp.asarray(value, dtype=np.float32) for name, value in params.items()}


def forward(tokens, params, settings, attend, grads):
    """Logits of the next character at every position, and the pullback that fills `grads`."""
    xp, n = namespace(tokens), tokens.shape[1]
    x = params["tokens"][tokens] + params["positions"][:n]
    backs = []
    for i in range(settings.layers):
        h, norm1_back = layer_norm(x, params, grads, f"{i}.norm1")
        h, attention_back = causal_attention(h, params, grads, str(i), settings.heads, attend)
        x = x + h
        h, norm2_back = layer_norm(x, params, grads, f"{i}.norm2")
        h, mlp_back = mlp(h, params, grads, str(i))
        x = x + h
        backs += [(norm1_back, attention_back), (norm2_back, mlp_back)]
    h, norm_back = layer_norm(x, params, grads, "norm")
    logits, head_back = linear(h, params, grads, "head")

    def pullback(d_logits):
        dx = norm_back(head_back(d_logits))
        for norm, branch in reversed(backs):
            dx = dx + norm(branch(dx))
        grads["positions"] = xp.zeros_like(params["positions"])
        grads["positions"][:n] = dx.sum(0)
        one_hot = (tokens.reshape(-1, 1) == xp.arange(len(params["tokens"]))).astype(np.float32)
        grads["tokens"] = one_hot.T @ dx.reshape(-1, dx.shape[-1])

    return logits, pullback


class Adam:
    """Kingma and Ba, arXiv 1412.6980, with a warm-up and a linear decay of the learning rate."""

    def __init__(self, params, learning_rate, steps):
        xp = namespace(params["tokens"])
        self.first, self.second = ({name: xp.zeros_like(p) for name, p in params.items()} for _ in range(2))
        self.learning_rate, self.steps, self.step = learning_rate, steps, 0

    def update(self, params, grads):
        """One step, in place."""
        self.step += 1
        rate = self.learning_rate * min(self.step / 20, 1, 1.1 - self.step / self.steps)
        for name, g in grads.items():
            first, second = self.first[name], self.second[name]
            first += 0.1 * (g - first)
            second += 0.01 * (g * g - second)
            params[name] -= rate / (1 - 0.9**self.step) * first / ((second / (1 - 0.99**self.step))**0.5 + 1e-8)


# ---- training --------------------------------------------------------------------------------------------------------

def train(settings, xp=np, progress=True):
    """Train, and return the losses, the held-out loss and a sample of generated text.

    Parameters
    ----------
    settings : Settings
    xp : module
        NumPy or CuPy.
    progress : bool
        Show a progress bar with loss and tokens/s.

    Returns
    -------
    result : Result
    """
    text = read_text(settings.text)
    alphabet = sorted(set(text))
    codes = {character: code for code, character in enumerate(alphabet)}
    tokens = np.array([codes[character] for character in text])
    split = len(tokens) * 9 // 10
    if len(tokens) - split <= settings.context:
        raise ValueError(f"the text must have over {10 * settings.context} characters for a context of "
                         f"{settings.context}, got {len(tokens)}; pass a longer --text or a smaller --context")
    rng = np.random.default_rng(settings.seed)
    attend = attention_layer(settings.attention, ATTENTION_DTYPES[settings.attention_dtype])
    params, result = make_params(xp, len(alphabet), settings), Result()
    adam = Adam(params, settings.learning_rate, settings.steps)

    data, start = batches(tokens[:split], settings, rng), time.perf_counter()
    with tqdm(total=settings.steps, disable=not progress, unit="step", mininterval=0.5) as bar:
        for inputs, targets in data:
            grads = {}
            logits, pullback = forward(xp.asarray(inputs), params, settings, attend, grads)
            loss, loss_back = cross_entropy(logits, xp.asarray(targets))
            pullback(loss_back())
            adam.update(params, grads)
            result.losses.append(float(loss))
            result.tokens_per_second = len(result.losses) * inputs.size / (time.perf_counter() - start)
            bar.set_postfix_str(f"loss {result.losses[-1]:.3f}, {result.tokens_per_second:,.0f} tokens/s",
                                refresh=False)
            bar.update()
            if len(result.losses) == settings.steps:
                break

    held_out = batches(tokens[split:], settings, rng)
    result.held_out = float(np.mean([
        float(cross_entropy(forward(xp.asarray(inputs), params, settings, attend, {})[0], xp.asarray(targets))[0])
        for inputs, targets in (next(held_out) for _ in range(4))]))
    result.sample = generate(alphabet, params, settings, attend, rng, settings.sample)
    return result


def generate(alphabet, params, settings, attend, rng, length):
    """Draw `length` characters, one after the other, each from the model's distribution given the last `context`."""
    xp, written = namespace(params["tokens"]), [alphabet.index("\n") if "\n" in alphabet else 0]
    for _ in range(length):
        logits = forward(xp.asarray([written[-settings.context:]]), params, settings, attend, {})[0][0, -1]
        logits = logits if xp is np else logits.get()
        p = np.exp(1.25 * (logits - logits.max()).astype(np.float64))         # a little less random than the model
        written.append(int(rng.choice(len(alphabet), p=p / p.sum())))
    return "".join(alphabet[code] for code in written[1:])
