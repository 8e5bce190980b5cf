"""The figures of the README: ``python -m bench readme`` puts them and those of the `course` into their pages and draws
the `charts`; a test compares.
"""

from pathlib import Path
from statistics import geometric_mean
from textwrap import shorten

from . import charts
from .course import syllabus
from .words import (RESULTS, ROOT, cell, cudnn, label, markdown, names, other_products, paragraph, read, span, torch,
                    where)

BEGIN, END = "<!-- figures: python -m bench readme -->", "<!-- end of figures -->"


def missing(part):
    """A sentence about who has no figures at all, and why."""
    found = {name for unit in ("TFLOP/s", "GFLOP/s", "GB/s", "us", "MiB") for name in names(part["rows"], unit)}
    found |= {name.rsplit(" ", 1)[0] for name in found}             # with a direction, where there are several
    whose = {}                                                      # reason to names
    for name in names(part["rows"], "not measured"):
        if name not in found:
            reason = next(row[f"{name} not measured"] for row in part["rows"] if f"{name} not measured" in row)
            whose.setdefault(shorten(reason, 100, placeholder=" ...").rstrip("."), []).append(label(name))
    return " ".join(f"Not measured: {', '.join(refused)} ({reason})." for reason, refused in whose.items())


def with_table(words, header, rows, part):
    """Words, a table, and who is not in it."""
    gone = missing(part)
    return f"{paragraph(*words)}\n{markdown(header, rows)}\n" + (f"\n{paragraph(gone)}" if gone else "")


def chunks(rivals):
    """What `memory-efficient` is, if it is one of them."""
    return ("`memory-efficient`, in the benchmarks only, has `standard` compute Rabe and Staats' chunks of 2048 "
            "queries and keys." if "memory-efficient" in rivals else "")


# ---- a CPU -----------------------------------------------------------------------------------------------------------

def cpu_speed(part):
    """Speed of the CPU engine beside its peers."""
    rivals = "numba_flash", "torch", "numpy"
    rows = [(row["direction"], ", ".join(str(row[name]) for name in ("batch", "heads", "n", "d")), row["mask"],
             *(cell(row, f"{name} GFLOP/s", 0) for name in rivals),
             *(cell(row, f"numba_flash / {name}", digits) for name, digits in (("torch", 2), ("numpy", 1))))
            for row in part["rows"]]
    most = f"A product of two matrices runs at {part['ceiling']['float32']:.0f}." if "ceiling" in part else ""
    header = "", "batch, heads, n, d", "mask", *map(label, rivals), "numba_flash / PyTorch", "numba_flash / NumPy"
    return "### On a CPU, float32\n\n" + paragraph(
        f"GFLOP/s on {where(part)}, beside {torch(part)} and the formula written in NumPy {part['versions']['numpy']},",
        "all in one run. Causal attention counts half of the operations.", most) + f"\n{markdown(header, rows)}\n"


def cpu_memory(part):
    """The longest sequence of the CPU engine."""
    row = [row for row in part["rows"] if "cpu forward MiB" in row][-1]
    scores = part["heads"] * row["n"]**2 * 4 / 2**20
    return paragraph(
        f"Beyond inputs and outputs, (1, {part['heads']}, {row['n']}, {part['d']}) takes",
        f"{row['cpu forward MiB']:.0f} MiB forward and {row['cpu backward MiB']:.0f} MiB backward; the formula takes",
        f"{scores:.0f} MiB for one copy of its scores.")


# ---- all engines -----------------------------------------------------------------------------------------------------

def ladder(part, dtype):
    """Speed of every rung beside its peers, in one dtype."""
    rungs = names(part["rows"], "TFLOP/s")
    peer = "cudnn" if "cudnn" in rungs else "torch efficient"           # the fastest
    ratios = names(part["rows"], f"/ {peer}")
    rows = [(row["direction"], row["d"], row["mask"], *(cell(row, f"{name} TFLOP/s", 1) for name in rungs),
             *(cell(row, f"{name} / {peer}", 2) for name in ratios)) for row in part["rows"]]
    header = "", "d", "mask", *map(label, rungs), *(f"{name} / {label(peer)}" for name in ratios)
    return f"### On a GPU, {dtype}\n\n" + with_table([
        f"TFLOP/s on one {where(part)}, 2048 / d heads, n 4096, batch 4, beside {torch(part)}'s backends; PyTorch",
        "efficient is the fused kernel that it has for float32"
        + (", PyTorch math keeps all scores for its backward pass." if "torch math" in rungs else "."), chunks(rungs)],
        header, rows, part)


def by_length(rows, name, peer, *labels):
    """A table with a column for each n: TFLOP/s, and in parentheses how many times as fast as a peer."""
    lengths, cells = sorted({row["n"] for row in rows}), {}
    for row in rows:
        text = f"{cell(row, f'{name} TFLOP/s', 0)} ({cell(row, f'{name} / {peer}', 2)})"
        cells.setdefault(tuple(row[label] for label in labels), {})[row["n"]] = text
    return markdown((*labels, *(f"n {n}" for n in lengths)),
                    [(*key, *(found.get(n, "-") for n in lengths)) for key, found in cells.items()]) + "\n"


def mma(part, dtype):
    """Speed of the engine for any GPU in one dtype, and how many times as fast as a peer and other ways it is."""
    rows, means = part["rows"], []
    peer = next(name for name in names(rows, "TFLOP/s") if name.startswith("torch"))

    def ratios(name, direction=None):
        return [row[f"mma / {name}"] for row in rows
                if f"mma / {name}" in row and direction in (None, row["direction"])]

    for direction in dict.fromkeys(row["direction"] for row in rows):
        if ratios(peer, direction):
            means.append(f"{geometric_mean(ratios(peer, direction)):.2f} {direction}")
    lines = [f"TFLOP/s of `mma` in {dtype} on one {where(part)}, and in parentheses how many times as fast it is as",
             f"{label(peer)} ({torch(part)}); 2048 / d heads, 16384 / n batches. Geometric mean: {', '.join(means)}."]
    if len(ratios(peer)) < len(rows):
        lines.append(f"(-): {label(peer)} did not run (mostly for want of memory); means are of the others.")
    if ratios("mma deterministic"):
        lines += ["With `deterministic=True`, the same bits in every run, gradients take",
                  f"{span(ratios('mma deterministic'), 2)} times as long."]
    if ratios("standard"):
        lines.append(f"`standard` takes {span(ratios('standard'), 1)} times as long.")
    if ratios("mma tf32"):
        lines.append(f"`precision=\"tf32\"` is {span([1 / x for x in ratios('mma tf32')], 1)} times as fast.")
    if dtype in part["ceiling"]:
        lines.append(f"cuBLAS's product of two matrices runs at {part['ceiling'][dtype]:.0f}"
                     + (", without tensor cores." if dtype == "float32" else "."))
    return paragraph(*lines) + "\n" + by_length(rows, "mma", peer, "direction", "d", "mask")


def memory(part, name):
    """MiB, with a column for each n."""
    rows = []
    for measured in names(part["rows"], "MiB"):
        rival, direction = measured.rsplit(" ", 1)
        rows.append((label(rival), direction, *(cell(row, f"{measured} MiB", 1) for row in part["rows"])))
    header = "", "", *(f"n {row['n']}" for row in part["rows"])
    both = " (both: one pass after the other)" if any(direction == "both" for _, direction, *_ in rows) else ""
    notes = chunks([rival for rival, *_ in rows])
    gaps = [f"{label(rival)} at n {row['n']} ({row[f'{rival} not measured']})" for row in part["rows"]
            for rival in names([row], "not measured") if any(label(rival) == other for other, *_ in rows)]
    notes += f" Not measured: {', '.join(gaps)}." if gaps else ""
    return with_table([f"MiB beyond inputs and outputs, {part['heads']} heads of d {part['d']}, {name}, on",
                       f"{where(part)}{both}. {notes}"], header, rows, part)


def host(part, dtype):
    """What a small call costs the host."""
    def words(row):
        return ", ".join(f"{label(name)} {cell(row, f'{name} us', 0)}" for name in names([row], "us"))

    return paragraph(
        f"A {dtype} call at ({part['rows'][0]['shape']}) keeps the host busy for so many µs ({where(part)}):",
        "; ".join(f"{row['direction']} {words(row)}" for row in part["rows"]) + ".")


def compiling(part):
    """What the first call costs."""
    taken = {cache: [row["first call s"] for row in part["rows"] if row["cache"] == cache]
             for cache in ("empty", "filled")}
    return paragraph(
        f"The first call of `hopper` in a process takes {span(taken['empty'], 1)} s more than a later one,",
        f"{span(taken['filled'], 2)} s once the machine code is on disk; importing the engine takes",
        f"{span([row['import s'] for row in part['rows']], 1)} s ({where(part)}).")


def small(part, words, digits):
    """µs of small calls."""
    rivals = names(part["rows"], "us")
    rows = [(row["direction"], row["shape"], *(cell(row, f"{name} us", digits) for name in rivals))
            for row in part["rows"]]
    return with_table([f"µs of {words} ({where(part)}):"], ("", "batch, heads, n, d", *map(label, rivals)), rows, part)


def decode(part):
    """How fast one query a head reads its keys and values."""
    rivals, sizes = names(part["rows"], "GB/s"), ("batch", "heads", "kv_heads", "n", "d")
    rows = [(", ".join(str(row[name]) for name in sizes), *(cell(row, f"{name} GB/s", 0) for name in rivals))
            for row in part["rows"]]
    return with_table([
        f"Decoding, one query a head: GB/s of keys and values in bfloat16 ({where(part)}; copying an array moves",
        f"{part['ceiling']['bfloat16']:.0f}):"], (", ".join(sizes), *map(label, rivals)), rows, part)


# ---- Hopper's tensor cores -------------------------------------------------------------------------------------------

def beside_cudnn(rows, *labels):
    """`by_length` for Hopper's engine and cuDNN."""
    return by_length(rows, "hopper", "cudnn", *labels)


def speed(part):
    """The usual shapes, forward or backward."""
    means = ", ".join(f"{mean:.2f} in {dtype}" for dtype, mean in part.get("geometric mean", {}).items())
    table = beside_cudnn(sorted(part["rows"], key=lambda row: (row["dtype"], row["d"])), "dtype", "d", "mask")
    return paragraph(
        f"TFLOP/s on one {where(part)}, and in parentheses how many times as fast it is as {cudnn(part)} in the same",
        "run; 2048 / d heads, rounded down, and 16384 / n batches.", "-: not measured." if "| - |" in table else "",
        f"Geometric mean over d 64, 128 and 256: {means}." if means else ""
    ) + "\n" + table


def gqa(part):
    """Grouped heads."""
    return paragraph(
        f"The same for 64 query heads on 8 key/value heads, bfloat16, d 128, batch 1, {part['date']}, {cudnn(part)}:"
    ) + "\n" + beside_cudnn(part["rows"], "mask")


def options(part):
    """Options beside plain attention and FlexAttention."""
    header = "", "mask", "n", "hopper", "of plain", "FlexAttention", "hopper / FlexAttention"
    return paragraph(
        f"TFLOP/s with options, bfloat16, d 128, 16 heads, 16384 / n batches, in a run of their own, {part['date']},",
        f"beside {torch(part)}'s compiled FlexAttention.",
        "The softcap is 20, ALiBi's slopes are 2^-0.5 to 2^-8. The window shows a query 1024 keys: only these count,",
        "and plain is causal attention there."
    ) + "\n" + markdown(header, [
        (row["option"], row["mask"], row["n"], cell(row, "hopper TFLOP/s", 0), cell(row, "of plain", 2),
         cell(row, "flex TFLOP/s", 0), cell(row, "hopper / flex", 2)) for row in part["rows"]]) + "\n"


def matmul(part):
    """Attention as a share of a matrix product."""
    one, others = part["rows"][0], other_products(part)
    spread = f" in this run, {others} in others, as the clock varies;" if others else ","
    return paragraph(
        f"A bfloat16 product of two {part['size']} x {part['size']} matrices runs at {one['matmul TFLOP/s']:.0f}",
        f"TFLOP/s{spread} attention at n {one['n']}, {one['mask']}, at",
        " and ".join(f"{row['share']:.0%} of that for d {row['d']}" for row in part["rows"]),
        f"(in turns with it, in a run of its own, {part['date']}, in which attention is slower than in the table).")


def error(part):
    """Errors against float64."""
    ratios = [row["hopper error"] / row["cudnn error"] for row in part["rows"] if "cudnn error" in row]
    factors = sorted({row["q factor"] for row in part["rows"]} - {1})
    return paragraph(
        f"The relative error against float64 is {span([row['hopper error'] for row in part['rows']], 4)} in bfloat16",
        f"on {' and '.join(['normal inputs', *(f'with q {factor} times as large' for factor in factors)])}"
        + (f", {span(ratios, 3)} times cuDNN's" if ratios else "") + f" ({part['date']}).")


def deterministic(part):
    """Repeatable gradients beside the usual ones."""
    rivals = names(part["rows"], "TFLOP/s")
    rows = [(row["d"], row["mask"], row["n"], *(cell(row, f"{name} TFLOP/s", 0) for name in rivals))
            for row in part["rows"]]
    return with_table([f"TFLOP/s of bitwise repeatable gradients beside the usual ones, bfloat16, {part['date']}:"],
                      ("d", "mask", "n", *map(label, rivals)), rows, part)


# ---- the algorithms, and a whole training step -----------------------------------------------------------------------

def traffic(part, dtype):
    """Bytes counted beside bytes predicted."""
    columns = "predicted GB read", "predicted GB written", "GB read", "GB written", "GB read from L2", \
        "GB written to L2"
    rows = [(row["direction"], row["engine"], *(cell(row, name, 1) for name in columns),
             cell(row, "counted / predicted", 2)) for row in part["rows"] if "not measured" not in row]
    sizes = part["sizes"]
    asking = [f"`{name}`" for name in ("flash2", "mma", "hopper") if any(name == engine for _, engine, *_ in rows)]
    return paragraph(
        f"{dtype} on one {where(part)}, batch {sizes['batch']}, {sizes['heads']} heads, n {sizes['n']},",
        f"d {sizes['d']}, counted by ncu. The last column is what HBM saw, read and written, to what was predicted: L2",
        f"keeps the K and V of the heads at work, which {', '.join(asking)} ask for again and again, and CuPy's",
        "softmax is several passes for `standard`."
    ) + "\n" + markdown(("", "engine", *columns, "counted / predicted"), rows) + "\n"


def train(part, place):
    """Tokens/s of the demo."""
    settings = " ".join(f"--{name} {value}" for name, value in part["settings"].items())
    rows = [(row["engine"], row["attention in"], cell(row, "tokens/s", 0), cell(row, "of the first", 2))
            for row in part["rows"]]
    return paragraph(f"Tokens/s of `python -m numba_flash demo {settings}` on {where(part)}:") + "\n" + markdown(
        ("engine", "dtype of attention", "tokens/s", "times the first"), rows) + "\n"


FORWARD = {"speed": speed, "gqa": gqa, "options": options, "matmul": matmul, "error": error}
BACKWARD = {"speed": speed, "gqa": gqa, "deterministic": deterministic, "options": options}
LATENCY = {"float32": lambda part: host(part, "float32"), "float16": lambda part: host(part, "float16"),
           "device": lambda part: small(part, "the device's time for small calls in bfloat16", 1), "decode": decode,
           "compile": compiling, "cpu": lambda part: small(part, "a small call on a CPU, float32", 0)}


def of_parts(words, result):
    """The words of those parts that were measured."""
    return [words[name](result[name]) for name in words if name in result]


def sections():
    """Title (None: it has its own) to blocks of words, in the README's order; what was not measured has none."""
    results = {name: read(name) for name in charts.PANELS}
    kept = results["memory"]
    return [
        (None, "cpu", [cpu_speed(results["cpu"]["speed"])] + ([cpu_memory(kept["cpu"])] if "cpu" in kept else [])),
        (None, "ladder", [ladder(part, dtype) for dtype, part in results["ladder"].items()]),
        ("On tensor cores of any GPU", "mma", [mma(part, dtype) for dtype, part in results["mma"].items()]),
        ("Memory", "memory", [memory(part, name) for name, part in kept.items() if name != "cpu"]),
        ("Small calls", "latency", of_parts(LATENCY, results["latency"])),
        ("On Hopper, forward", "forward", of_parts(FORWARD, results["forward"])),
        ("On Hopper, backward", "backward", of_parts(BACKWARD, results["backward"])),
        ("Bytes moved", "traffic", [traffic(part, dtype) for dtype, part in results["traffic"].items()]),
        ("Training", "train", [train(part, place) for place, part in results["train"].items()])]


def figures():
    """All figures, as they stand in the README."""
    blocks = []
    for title, name, words in sections():
        if words:
            picture = f"![A chart of these figures]({(RESULTS / name).as_posix()}.png)\n"
            blocks += [f"### {title}\n"] * (title is not None) + words + [picture]
    return BEGIN + "\n" + "\n".join(blocks) + END


COURSE = Path("numba_flash", "cuda", "README.md")


def pages():
    """Each page's blocks of figures, between their marks."""
    named = [f"{BEGIN.replace('figures', f'figures of {name}')}\n\n{table}\n\n{END}"
             for name, table in syllabus().items()]
    return {Path("README.md"): [figures()], COURSE: named}


def main(root=ROOT):
    """Put the figures into the pages, and draw the charts."""
    for page, blocks in pages().items():
        text = (Path(root) / page).read_text(encoding="utf-8")
        for block in blocks:
            begin = text.index(block.splitlines()[0])
            text = text[:begin] + block + text[text.index(END, begin) + len(END):]
        (Path(root) / page).write_text(text, encoding="utf-8")
    charts.main(root)
