"""``python -m bench cpu | gpu``: see the modules of those names."""

import argparse
from importlib import import_module

NAMES = ("cpu", "gpu")

parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
parser.add_argument("name", choices=NAMES)
parser.add_argument("--out", help="where to write the JSON (default: bench/results/NAME.json)")
parser.add_argument("--quick", action="store_true", help="few repeats: does it run, rather than how fast")
arguments = parser.parse_args()
import_module(f"bench.{arguments.name}").main(arguments.out or f"bench/results/{arguments.name}.json", arguments.quick)
