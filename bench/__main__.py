"""``python -m bench NAME``: measure one thing, or make pages and pictures of what was measured.

forward    the Hopper engine's forward beside PyTorch's cuDNN and FlashAttention-2, and FlexAttention
backward   the same for gradients
mma        the engine for any GPU's tensor cores beside PyTorch, in bfloat16, float32 and float64
ladder     every engine on the same problem: standard, memory-efficient, flash1, flash2, and those on tensor cores
memory     bytes that a call takes beyond its inputs and outputs, against the length of the sequence
traffic    bytes between a GPU and its memory, counted by ncu, beside what `reference.traffic` says
latency    what a small call costs the host and the device, decoding, and the first call in a process
train      tokens/s of the demo by engine
cpu        the CPU engine beside PyTorch and the formula in NumPy
readme     put the stored figures into the README and the course, and draw the charts
pictures   draw the course's pictures

Each measures in parts (see its module's docstring), first checks what it measures, prints a table, and writes
bench/results/NAME.json and NAME.png. Without a GPU, what can be measured on the CPU is.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

MEASURED = "forward", "backward", "mma", "ladder", "memory", "traffic", "latency", "train", "cpu"
MADE = {"readme": ".", "pictures": "numba_flash/cuda/pictures"}


def main(arguments=None):
    """Run one command; `arguments` instead of the command line's."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*MEASURED, *MADE), metavar="NAME")
    parser.add_argument("--out", help="what to write (default: bench/results/NAME.json); of readme, the folder of the "
                        "repository; of pictures, the folder for them")
    parser.add_argument("--quick", action="store_true",
                        help="few repeats: does it run, rather than how fast; not stored")
    parser.add_argument("--part", action="append", help="measure only this part, and leave the other parts of the "
                        "results as they are; may be repeated")
    arguments = parser.parse_args(arguments)
    if arguments.name in MADE and (arguments.part or arguments.quick):
        parser.error(f"{arguments.name} has no parts and measures nothing")
    try:
        module = import_module(f"bench.{arguments.name}")
    except ImportError as error:
        raise SystemExit(f"bench {arguments.name} can't run here: {error}")
    if arguments.name in MADE:
        return module.main(arguments.out or MADE[arguments.name])

    from .parts import run

    path = arguments.out or (None if arguments.quick else f"bench/results/{arguments.name}.json")
    try:
        run(module.PARTS, path, arguments.part, rounds=2 if arguments.quick else 5)
    finally:
        if path and Path(path).is_file():
            draw(arguments.name, path)
    if not path:
        print("nothing stored (--quick)", file=sys.stderr)


def draw(name, path):
    """The chart beside the results."""
    from .charts import save

    try:
        save(name, path, Path(path).with_suffix(".png"))
    except ImportError as error:
        print(f"no chart: {error} (pip install \".[bench]\")", file=sys.stderr)


if __name__ == "__main__":
    main()
