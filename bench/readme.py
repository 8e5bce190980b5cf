"""The README's figures, made from the results: ``python -m bench readme`` rewrites them, and a test compares."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: python -m bench readme -->", "<!-- end of figures -->"


def markdown(header, rows):
    """A Markdown table."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows))


def read(name):
    """A stored result."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def cpu_figures(result):
    """Speed of the CPU engine beside its peers."""
    def cell(row, name, digits):
        return f"{row[name]:.{digits}f}" if name in row else "-"      # a peer that was not there

    rows = [(row["direction"], row["shape"].replace(",", ", "), row["mask"],
             *(cell(row, f"{name} GFLOP/s", 0) for name in ("numba_flash", "torch", "numpy")),
             cell(row, "of torch", 2), cell(row, "of numpy", 1)) for row in result["rows"]]
    memory = result["memory"]
    versions = result["versions"]
    return f"""### On a CPU, float32

GFLOP/s on {result["threads"]} cores of {result["cpu"]}, {result["date"]}, beside
PyTorch {versions.get("torch", "(not there)")} and the formula written in NumPy {versions["numpy"]}, all in one run.
Causal attention counts half of the operations.

{markdown(("", "batch, heads, n, d", "mask", "numba_flash", "PyTorch", "NumPy", "of PyTorch", "of NumPy"), rows)}

Beyond inputs and outputs, ({memory["shape"].replace(",", ", ")}) takes {memory["forward MB"]:.0f} MB forward and
{memory["backward MB"]:.0f} MB backward; the formula takes 8600 MB for one copy of its scores.
"""


def gpu_figures(result):
    """Speed, memory and host time of the CUDA engines beside their peer."""
    names = ["standard", "flash1", "flash2", "torch efficient"]
    rows = [(row["direction"], row["d"], row["mask"], *(f"{row[name + ' TFLOP/s']:.1f}" for name in names),
             f"{row['flash2 / torch']:.2f}") for row in result["rows"]]
    memory = [(row["n"], *(round(row[f"{name} {direction}"], 1) for name in ("standard", "flash1", "flash2")
                           for direction in ("forward", "backward"))) for row in result["memory_mib"]]
    host = result["host_us"]
    return f"""### On a GPU, float32

TFLOP/s on one {result["gpu"].split(",")[0]}, {result["date"]}, 2048 / d heads, n 4096, batch 4, beside PyTorch
{result["versions"]["torch"]}'s memory-efficient attention (the fused kernel that it has for float32):

{markdown(("", "d", "mask", "standard", "flash1", "flash2", "PyTorch", "flash2 of PyTorch"), rows)}

MiB beyond inputs and outputs, 4 heads of d 64:

{markdown(("n", *(f"{name} {direction}" for name in ("standard", "flash1", "flash2")
                  for direction in ("forward", "backward"))), memory)}

A call at (1, 1, 128, 64) keeps the host busy for {host["flash2 forward"]:.0f} µs forward and
{host["flash2 backward"]:.0f} µs backward (PyTorch: {host["torch efficient forward"]:.0f} and
{host["torch efficient backward"]:.0f} µs).
"""


def hopper_figures(result):
    """The hopper engine beside cuDNN."""
    lengths = sorted({row["n"] for row in result["rows"]})
    found = {(row["d"], row["mask"], row["n"]): row for row in result["rows"]}
    rows = [(d, mask, *(f"{found[d, mask, n]['hopper TFLOP/s']} ({found[d, mask, n]['hopper / cudnn']:.2f})"
                        for n in lengths)) for d, mask, n in found if n == lengths[0]]
    return f"""### On Hopper, bfloat16, forward

TFLOP/s on one {result["gpu"].split(",")[0]}, {result["date"]}, and in parentheses the share of cuDNN {result["cudnn"]}
in the same run; 2048 / d heads, 16384 / n batches. The errors against float64 are within 0.3 % of cuDNN's.

{markdown(("d", "mask", *(f"n {n}" for n in lengths)), rows)}
"""


def figures():
    """All figures, as they stand in the README."""
    parts = cpu_figures(read("cpu")), gpu_figures(read("gpu")), hopper_figures(read("hopper"))
    return BEGIN + "\n" + "\n".join(parts) + END


def main(path=ROOT / "README.md", quick=False):
    """Put the figures into the README."""
    text = Path(path).read_text(encoding="utf-8")
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    Path(path).write_text(text[:begin] + figures() + text[end:], encoding="utf-8")
