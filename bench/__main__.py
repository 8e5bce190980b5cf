"""``python -m bench cpu | gpu | hopper | readme | pictures``: see the modules of those names."""

import argparse
import os
from importlib import import_module

parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
parser.add_argument("name", choices=("cpu", "gpu", "hopper", "readme", "pictures"))
parser.add_argument("--out", help="what to write (default: bench/results/NAME.json); of readme, the folder of "
                    "the repository; of pictures, the folder for them")
parser.add_argument("--quick", action="store_true", help="few repeats: does it run, rather than how fast; not stored")
parser.add_argument("--part", action="append", help="of hopper: measure only this, and leave the other parts of the "
                    "results as they are; may be repeated")
arguments = parser.parse_args()
if arguments.part and arguments.name != "hopper":
    parser.error("only hopper has parts")
default = os.devnull if arguments.quick else f"bench/results/{arguments.name}.json"
default = {"readme": ".", "pictures": "numba_flash/cuda/pictures"}.get(arguments.name, default)
try:
    module = import_module(f"bench.{arguments.name}")
except ImportError as error:
    raise SystemExit(f"bench {arguments.name} can't run here: {error}")
parts = {"parts": arguments.part} if arguments.part else {}
module.main(arguments.out or default, arguments.quick, **parts)
