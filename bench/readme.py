"""The README's figures, made from the results: ``python -m bench readme`` rewrites them, and a test compares."""

import json
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: python -m bench readme -->", "<!-- end of figures -->"


def markdown(header, rows):
    """A Markdown table."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows))


def read(name):
    """A stored result."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def cell(row, name, digits):
    """A figure, or a dash for what was not measured."""
    return f"{row[name]:.{digits}f}" if name in row else "-"


def cpu_figures(result):
    """Speed of the CPU engine beside its peers."""
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


def paragraph(*sentences):
    """Words in lines of the README's width."""
    return fill(" ".join(sentences), 120, break_on_hyphens=False) + "\n"


def span(values, digits):
    """The smallest and the largest, or the one."""
    return " to ".join(dict.fromkeys(f"{x:.{digits}f}" for x in (min(values), max(values))))


def peer(part):
    """cuDNN, with versions."""
    if "cudnn" not in part:
        return "cuDNN (not there)"
    return f"cuDNN {part['cudnn']} through PyTorch {part['versions']['torch']}"


def beside_cudnn(rows, *labels):
    """A table with a column for each n: TFLOP/s, and in parentheses the share of cuDNN."""
    lengths = sorted({row["n"] for row in rows})
    cells = {}
    for row in rows:
        key, text = tuple(row[label] for label in labels), cell(row, "hopper TFLOP/s", 0)
        cells.setdefault(key, {})[row["n"]] = f"{text} ({cell(row, 'hopper / cudnn', 2)})"
    return markdown((*labels, *(f"n {n}" for n in lengths)),
                    [(*key, *(by_length.get(n, "-") for n in lengths)) for key, by_length in cells.items()]) + "\n"


def hopper_speed(part):
    means = ", ".join(f"{mean:.2f} in {dtype}" for dtype, mean in part["geometric mean"].items())
    return paragraph(
        f"TFLOP/s on one {part['gpu'].split(',')[0]}, {part['date']}, and in parentheses the share of {peer(part)} in",
        "the same run; 2048 / d heads, 16384 / n batches.",
        f"Geometric mean of the shares over d 64, 128 and 256: {means}." if means else ""
    ) + "\n" + beside_cudnn(sorted(part["rows"], key=lambda row: (row["dtype"], row["d"])), "dtype", "d", "mask")


def hopper_gqa(part):
    return paragraph(
        f"The same for 64 query heads on 8 key/value heads, bfloat16, d 128, batch 1, {part['date']}, {peer(part)}:"
    ) + "\n" + beside_cudnn(part["rows"], "mask")


def hopper_options(part):
    header = "", "mask", "n", "hopper", "of plain", "FlexAttention", "hopper / FlexAttention"
    return paragraph(
        f"TFLOP/s with options, bfloat16, d 128, 16 heads, {part['date']}, beside PyTorch",
        f"{part['versions'].get('torch', '(not there)')}'s compiled FlexAttention.",
        "The window shows a query 1024 keys: only these count, and plain is causal attention there."
    ) + "\n" + markdown(header, [
        (row["option"], row["mask"], row["n"], cell(row, "hopper TFLOP/s", 0), cell(row, "of plain", 2),
         cell(row, "flex TFLOP/s", 0), cell(row, "hopper / flex", 2)) for row in part["rows"]]) + "\n"


def hopper_matmul(part):
    one = part["rows"][0]
    return paragraph(
        f"A bfloat16 product of two {part['size']} x {part['size']} matrices runs at {one['matmul TFLOP/s']:.0f}",
        f"TFLOP/s, attention at n {one['n']}, {one['mask']}, at",
        " and ".join(f"{row['share']:.0%} of that for d {row['d']}" for row in part["rows"]) + f" ({part['date']}).")


def hopper_error(part):
    ratios = [row["hopper / cudnn"] for row in part["rows"] if "hopper / cudnn" in row]
    factors = sorted({row["q factor"] for row in part["rows"]} - {1})
    return paragraph(
        f"The relative error against float64 is {span([row['hopper error'] for row in part['rows']], 4)} in bfloat16",
        f"on {' and '.join(['normal inputs', *(f'with q {factor} times as large' for factor in factors)])}"
        + (f", {span(ratios, 3)} times cuDNN's" if ratios else "") + f" ({part['date']}).")


def hopper_host(part):
    us = {row["call"]: f"{row['us']:.0f} µs" for row in part["rows"]}
    words = {"torch default": "by the backend of its choice", "torch cudnn": "by cuDNN"}
    theirs = ", ".join(f"{us[name]} {how}" for name, how in words.items() if name in us)
    return paragraph(
        f"A float16 call at (1, 1, 128, 64) keeps the host busy for {us['numba_flash auto']},",
        f'{us["numba_flash hopper"]} with `kernel="hopper"`' + (f", PyTorch's for {theirs}" if theirs else ""),
        f"({part['date']}).")


def hopper_compile(part):
    taken = {cache: [row["first call s"] for row in part["rows"] if row["cache"] == cache]
             for cache in ("empty", "filled")}
    return paragraph(
        f"The first call in a process takes {span(taken['empty'], 1)} s more than a later one,",
        f"{span(taken['filled'], 2)} s once the machine code is on disk; importing the engine takes",
        f"{span([row['import s'] for row in part['rows']], 1)} s ({part['date']}).")


def hopper_memory(part):
    most = max(row["bytes"] for row in part["rows"])
    return paragraph(
        f"Beyond inputs, o and lse, a call at n {part['rows'][0]['n']} takes {most or 'no'} bytes ({part['date']}).")


HOPPER_PARTS = {"speed": hopper_speed, "gqa": hopper_gqa, "options": hopper_options, "matmul": hopper_matmul,
                "error": hopper_error, "host": hopper_host, "compile": hopper_compile, "memory": hopper_memory}


def hopper_figures(result):
    """The hopper engine beside its peers: the parts that were measured."""
    parts = [words(result[name]) for name, words in HOPPER_PARTS.items() if name in result]
    return "\n".join(["### On Hopper, forward\n", *parts])


def figures():
    """All figures, as they stand in the README."""
    parts = cpu_figures(read("cpu")), gpu_figures(read("gpu")), hopper_figures(read("hopper"))
    return BEGIN + "\n" + "\n".join(parts) + END


def main(path=ROOT / "README.md", quick=False):
    """Put the figures into the README."""
    text = Path(path).read_text(encoding="utf-8")
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    Path(path).write_text(text[:begin] + figures() + text[end:], encoding="utf-8")
