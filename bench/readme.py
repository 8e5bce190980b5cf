"""The figures of the README and of the syllabus, ``numba_flash/cuda/README.md``, made from the results and from
`reference.traffic`: ``python -m bench readme`` rewrites them, and a test compares.
"""

import json
from pathlib import Path
from textwrap import fill

from numba_flash.cuda import config
from numba_flash.cuda.hopper import config as hopper_config
from numba_flash.cuda.tensor_cores.spec import Spec
from reference import traffic

from .measure import flops

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
        "the same run; 2048 / d heads, rounded down, and 16384 / n batches.",
        f"Geometric mean of the shares over d 64, 128 and 256: {means}." if means else ""
    ) + "\n" + beside_cudnn(sorted(part["rows"], key=lambda row: (row["dtype"], row["d"])), "dtype", "d", "mask")


def hopper_gqa(part):
    return paragraph(
        f"The same for 64 query heads on 8 key/value heads, bfloat16, d 128, batch 1, {part['date']}, {peer(part)}:"
    ) + "\n" + beside_cudnn(part["rows"], "mask")


def hopper_options(part):
    header = "", "mask", "n", "hopper", "of plain", "FlexAttention", "hopper / FlexAttention"
    return paragraph(
        f"TFLOP/s with options, bfloat16, d 128, 16 heads, 16384 / n batches, in a run of their own, {part['date']},",
        "beside PyTorch",
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
        " and ".join(f"{row['share']:.0%} of that for d {row['d']}" for row in part["rows"]),
        f"(in turns with it, in a run of its own, {part['date']}).")


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


# ---- the syllabus ----------------------------------------------------------------------------------------------------

BATCH, HEADS, N, D = 4, 32, 4096, 64        # its example; float32 is 4 bytes, and 16 bits are 2


def tile_rows(kernel):
    """block_m and block_n of the fastest shape that `flash1` or `flash2` has for the example in float32."""
    return next(shape[:2] for largest, _, shape in config.FLOAT32_SHAPES[kernel] if D <= largest)


def moved(count, backward=False):
    """Bytes of one head as cells: GB read and written by all heads, and how many operations there are for a byte."""
    read_gb, written_gb = (BATCH * HEADS * x * 1e-9 for x in count)
    per_byte = flops(BATCH, HEADS, N, N, D, backward=backward) * 1e-9 / (read_gb + written_gb)
    return f"{read_gb:.1f}", f"{written_gb:.1f}", f"{per_byte:.0f}"


def tflops(rows, name, **case):
    """Measured TFLOP/s of the example in one of a result's rows."""
    case = {"n": N, "d": D, "mask": "full", **case}
    return next(f"{row[f'{name} TFLOP/s']:.1f}" for row in rows if case.items() <= row.items())


def rung_forward(name):
    """Bytes that the forward pass of an engine moves in the example, float32."""
    if name == "standard":
        return traffic.standard_attention_traffic(N, N, D, itemsize=4, extra_passes=1)
    count, kernel = {"flash1": (traffic.flash_attention_1_traffic, "flash1_forward"),
                     "flash2": (traffic.flash_attention_2_traffic, "forward")}[name]
    block_m, block_n = tile_rows(kernel)
    return count(N, N, D, block_m=block_m, block_n=block_n, itemsize=4)


COUNTS = "GB read", "GB written", "operations per byte", "TFLOP/s"


def rungs_float32(result, *names):
    """Forward passes in float32; extra memory was measured for 4 heads."""
    extra = next(row for row in result["memory_mib"] if row["n"] == N)
    rows = [(name, *moved(rung_forward(name)), tflops(result["rows"], name, direction="forward"),
             f"{extra[f'{name} forward']:.1f}") for name in names]
    return markdown(("forward, float32", *COUNTS, "extra MiB for 4 heads"), rows)


def circumstances(gpu, result):
    """On what all was measured, and when."""
    parts = {"float32": gpu, "bfloat16": result["speed"], "bfloat16, matrix product": result["matmul"]}
    return "\n".join(f"- {what}: {part['gpu'].split(',')[0]}, {part['date']}" for what, part in parts.items())


def rung_hopper(result):
    """The Hopper kernel in 16 bits, and what its bytes would be with the query tiles of flash2."""
    def row(words, block_m, measured):
        count = traffic.flash_attention_2_traffic(N, N, D, block_m=block_m, block_n=1, itemsize=2)
        return words.format(block_m), *moved(count), measured

    tile, speed = hopper_config.choose(Spec(None, D, D)), result["speed"]["rows"]
    return markdown(("forward, bfloat16", *COUNTS), [
        row("with query tiles of {} rows, as in flash2", tile_rows("forward")[0], "-"),
        row("hopper, query tiles of {} rows", tile.block_m, tflops(speed, "hopper", dtype="bfloat16"))])


def rungs_backward(result):
    """Backward passes in float32."""
    block_n = tile_rows("flash1_backward")[1]
    flash1 = traffic.flash_attention_1_backward_traffic(N, N, D, block_m=1, block_n=block_n, itemsize=4)
    block_m, block_n = tile_rows("dq")[0], tile_rows("dkdv")[1]
    flash2 = traffic.flash_attention_2_backward_traffic(N, N, D, block_m=block_m, block_n=block_n, itemsize=4)
    cells = {"standard": ("-",) * 3, "flash1": moved(flash1, True), "flash2": moved(flash2, True)}
    return markdown(("backward, float32", *COUNTS), [
        (name, *counts, tflops(result["rows"], name, direction="backward")) for name, counts in cells.items()])


def ceiling(gpu, result):
    """How far the last rungs are from what the machine does without softmax, and from others' kernels."""
    part = result["matmul"]
    product = [(row["d"], f"{row['hopper TFLOP/s']:.0f}", f"{row['matmul TFLOP/s']:.0f}", f"{row['share']:.1%}")
               for row in part["rows"]]
    peers = [(row["direction"], row["d"], f"{row['flash2 TFLOP/s']:.1f}", f"{row['torch efficient TFLOP/s']:.1f}",
              f"{row['flash2 / torch']:.0%}") for row in gpu["rows"] if row["mask"] == "full"]
    return (markdown((f"bfloat16, n {part['rows'][0]['n']}, d", "hopper TFLOP/s",
                      f"product of {part['size']} x {part['size']}", "share"), product) + "\n\n"
            + markdown((f"float32, n {N}", "d", "flash2 TFLOP/s", "PyTorch", "share"), peers))


def syllabus():
    """The figures of the syllabus, by name."""
    gpu, result = read("gpu"), read("hopper")
    return {"circumstances": circumstances(gpu, result), "standard": rungs_float32(gpu, "standard"),
            "flash1": rungs_float32(gpu, "standard", "flash1"), "flash2": rungs_float32(gpu, "flash1", "flash2"),
            "hopper": rung_hopper(result), "backward": rungs_backward(gpu), "ceiling": ceiling(gpu, result)}


SYLLABUS = Path("numba_flash", "cuda", "README.md")


def pages():
    """Each page's blocks of figures, between their marks."""
    named = [f"{BEGIN.replace('figures', f'figures of {name}')}\n\n{table}\n\n{END}"
             for name, table in syllabus().items()]
    return {Path("README.md"): [figures()], SYLLABUS: named}


def main(root=ROOT, quick=False):
    """Put the figures into the pages."""
    for page, blocks in pages().items():
        text = (Path(root) / page).read_text(encoding="utf-8")
        for block in blocks:
            begin = text.index(block.splitlines()[0])
            text = text[:begin] + block + text[text.index(END, begin) + len(END):]
        (Path(root) / page).write_text(text, encoding="utf-8")
