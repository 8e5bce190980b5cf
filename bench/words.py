"""How stored figures are read and put into words and tables."""

import json
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parent.parent
RESULTS = Path("bench", "results")
LABELS = {"numba_flash": "numba_flash", "torch": "PyTorch", "numpy": "NumPy", "torch efficient": "PyTorch efficient",
          "torch flash": "PyTorch flash", "torch math": "PyTorch math", "torch default": "PyTorch's choice",
          "mma tf32": "mma, tf32", "cudnn": "cuDNN", "flex": "FlexAttention", "jax xla": "JAX",
          "jax cudnn": "JAX's cuDNN"}


def read(name):
    """The parts of a stored result, by name; none if nothing was stored."""
    path = ROOT / RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def markdown(header, rows):
    """A Markdown table."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows))


def cell(row, name, digits, factor=1):
    """A figure, or a dash for what was not measured."""
    return f"{row[name] * factor:.{digits}f}" if name in row else "-"


def names(rows, unit):
    """Whose figures of a unit the rows have, in order."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key.removesuffix(f" {unit}") for key in keys if key.endswith(f" {unit}")]


def label(name):
    """What tables and charts call a rival; engines by their names."""
    plain = name.removesuffix(" deterministic")
    return LABELS.get(plain, plain) + name[len(plain):]


def paragraph(*sentences):
    """Words in lines of the README's width."""
    return fill(" ".join(filter(None, sentences)), 120, break_on_hyphens=False, break_long_words=False) + "\n"


def span(values, digits):
    """The smallest and the largest, or the one."""
    return " to ".join(dict.fromkeys(f"{x:.{digits}f}" for x in (min(values), max(values))))


def other_products(part, dtype="bfloat16"):
    """The smallest and the largest TFLOP/s of the same matrix product in all other runs on the same GPU, if any."""
    parts = [other for name in ("forward", "backward", "ladder", "mma") for other in read(name).values()]
    found = [other["ceiling"][dtype] for other in parts
             if other.get("gpu") == part["gpu"] and dtype in other.get("ceiling", ())]
    return span(found, 0) if found else ""


def where(part):
    """On what GPU, or on what CPU, and when."""
    machine = part["gpu"].split(",")[0] if "gpu" in part else f"{part['threads']} cores of {part['cpu']}"
    return f"{machine}, {part['date']}"


def torch(part):
    """PyTorch with its version."""
    return f"PyTorch {part['versions'].get('torch', '(not there)')}"


def cudnn(part):
    """cuDNN, with versions."""
    return f"cuDNN {part['cudnn']} through {torch(part)}" if "cudnn" in part else "cuDNN (not there)"
