"""``python -m bench cpu | gpu | readme``: see the modules of those names."""

import argparse
import os
from importlib import import_module

parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
parser.add_argument("name", choices=("cpu", "gpu", "readme"))
parser.add_argument("--out", help="what to write (default: bench/results/NAME.json, or the README)")
parser.add_argument("--quick", action="store_true", help="few repeats: does it run, rather than how fast; not stored")
arguments = parser.parse_args()
default = "README.md" if arguments.name == "readme" else f"bench/results/{arguments.name}.json"
if arguments.quick and arguments.name != "readme":
    default = os.devnull
try:
    module = import_module(f"bench.{arguments.name}")
except ImportError as error:
    raise SystemExit(f"bench {arguments.name} can't run here: {error}")
module.main(arguments.out or default, arguments.quick)
