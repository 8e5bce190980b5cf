"""The figures of the course, ``numba_flash/cuda/README.md``, made from the results and from `reference.traffic`."""

from reference import traffic

from .measure import flops
from .traffic import BATCH, HEADS, D, N, predicted, query_rows
from .words import cell, markdown, other_products, paragraph, read


def moved(count, backward=False):
    """Bytes of one head as cells: GB read and written by all heads, and how many operations there are for a byte."""
    read_gb, written_gb = (BATCH * HEADS * x * 1e-9 for x in count)
    per_byte = flops(BATCH, HEADS, N, N, D, backward=backward) * 1e-9 / (read_gb + written_gb)
    return f"{read_gb:.1f}", f"{written_gb:.1f}", f"{per_byte:.0f}"


def tflops(rows, name, **case):
    """Measured TFLOP/s of the example in one of a result's rows."""
    case = {"n": N, "d": D, "mask": "full", **case}
    return next(cell(row, f"{name} TFLOP/s", 1) for row in rows if case.items() <= row.items())


COUNTS = "GB read", "GB written", "operations per byte", "TFLOP/s"


def rungs_float32(ladder, memory, *names):
    """Forward passes in float32, and the memory that they take for the heads that it was measured with."""
    extra = next(row for row in memory["rows"] if row["n"] == N)
    rows = [(name, *moved(predicted(name)), tflops(ladder["rows"], name, direction="forward"),
             f"{extra[f'{name} forward MiB']:.1f}") for name in names]
    return markdown(("forward, float32", *COUNTS, f"extra MiB for {memory['heads']} heads"), rows)


def circumstances(ladder, forward):
    """On what all was measured, and when."""
    parts = {"float32": ladder, "bfloat16": forward["speed"], "bfloat16, matrix product": forward["matmul"]}
    return "\n".join(f"- {what}: {part['gpu'].split(',')[0]}, {part['date']}" for what, part in parts.items())


def rungs_16_bit(forward, mma, *names):
    """Kernels on tensor cores."""
    def row(words, block_m, measured):
        count = traffic.flash_attention_2_traffic(N, N, D, block_m=block_m, block_n=1, itemsize=2)
        return words.format(block_m), *moved(count), measured

    tiles = query_rows()
    rows = {"mma": row("mma, query tiles of {} rows", tiles["mma"], tflops(mma["rows"], "mma", direction="forward")),
            "hopper": row("hopper, query tiles of {} rows", tiles["hopper"],
                          tflops(forward["speed"]["rows"], "hopper", dtype="bfloat16"))}
    return markdown(("forward, bfloat16", *COUNTS), [rows[name] for name in names])


def rungs_backward(ladder):
    """Backward passes in float32, and on tensor cores."""
    def speed(dtype, name):
        return tflops(ladder[dtype]["rows"], name, direction="backward")

    counts = {name: predicted(name, "backward") for name in ("standard", "flash1", "flash2")}
    return markdown(("backward, float32", *COUNTS), [
        (name, *(moved(count, True) if count else ("-",) * 3), speed("float32", name))
        for name, count in counts.items()]) + "\n\n" + markdown(("backward, bfloat16", "TFLOP/s"), [
            (name, speed("bfloat16", name)) for name in ("flash2", "mma", "hopper")])


def ceiling(mma, forward):
    """How far the last rungs are from what the machine does without softmax, and from others' kernels."""
    part, peer = forward["matmul"], "torch efficient"
    product = [(row["d"], f"{row['hopper TFLOP/s']:.0f}", f"{row['matmul TFLOP/s']:.0f}", f"{row['share']:.1%}")
               for row in part["rows"]]
    peers = []
    for row in mma["rows"]:
        if (row["mask"], row["n"]) == ("full", N):
            ours, theirs = row["mma TFLOP/s"], row[f"{peer} TFLOP/s"]
            peers.append((row["direction"], row["d"], f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"))
    others = other_products(part)
    spread = paragraph(
        f"The product runs at {product[0][2]} TFLOP/s in this run, {others} in others, as the clock varies: only",
        "figures of the same run are a share of it. In this run, by turns with the product, attention is slower than",
        "in the README's tables.") + "\n" if others else ""
    return (markdown((f"bfloat16, n {part['rows'][0]['n']}, d", "hopper TFLOP/s",
                      f"product of {part['size']} x {part['size']}", "share"), product) + "\n\n" + spread
            + markdown((f"float32, n {N}", "d", "mma TFLOP/s", "PyTorch efficient", "ratio"), peers))


def syllabus():
    """The figures of the course, by name."""
    rungs, memory, forward, mma = read("ladder"), read("memory")["float32"], read("forward"), read("mma")
    ladder = rungs["float32"]
    return {"circumstances": circumstances(ladder, forward), "standard": rungs_float32(ladder, memory, "standard"),
            "flash1": rungs_float32(ladder, memory, "standard", "flash1"),
            "flash2": rungs_float32(ladder, memory, "flash1", "flash2"),
            "mma": rungs_16_bit(forward, mma["bfloat16"], "mma"),
            "hopper": rungs_16_bit(forward, mma["bfloat16"], "mma", "hopper"),
            "backward": rungs_backward(rungs), "ceiling": ceiling(mma["float32"], forward)}
