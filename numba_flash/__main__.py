"""The command line: ``python -m numba_flash info | check | demo | lesson``."""

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path


def main(arguments=None):
    """Run one command.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line's.

    Returns
    -------
    status : int
        1 if `check` found a wrong engine, or `lesson` a file that does not pass; 130 if a check was interrupted;
        otherwise 0.
    """
    from .demo import Settings
    from .lessons import command

    parser = argparse.ArgumentParser(prog="python -m numba_flash", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, and each engine: does it run here, and if not, why")
    commands.add_parser("check", help="every engine that runs here against the reference, with errors and times")
    demo = commands.add_parser("demo", help="train a small transformer on English text, on the GPU if there is one",
                               formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for setting in fields(Settings):
        demo.add_argument(f"--{setting.name.replace('_', '-')}", default=setting.default,
                          type=type(setting.default) if setting.default is not None else str,
                          metavar="FILE" if setting.name == "text" else None,
                          help=setting.metadata["help"])
    demo.add_argument("--plot", metavar="FILE.png", help="draw the loss curve (needs matplotlib)")
    lesson = commands.add_parser("lesson", help="learn to write these kernels: exercises, checked without a GPU")
    command.add_arguments(lesson)
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["lesson"]:     # with options between its positional arguments, which subparsers don't take
        arguments = lesson.parse_intermixed_args(arguments[1:], argparse.Namespace(command="lesson"))
    else:
        arguments = parser.parse_args(arguments)

    if arguments.command == "info":
        from .check import info

        info()
    elif arguments.command == "check":
        from .check import check, reference_trouble

        if reference_trouble():
            raise SystemExit(f"check can't run: {reference_trouble()}")
        return 1 if check() else 0
    elif arguments.command == "lesson":
        try:
            return command.run(arguments)
        except BrokenPipeError:         # an OSError too, but no mistake
            raise
        except (ValueError, OSError) as error:       # no such lesson, no such file, or one that is there already
            lesson.error(str(error))
    else:
        try:
            run_demo(Settings(**{setting.name: getattr(arguments, setting.name) for setting in fields(Settings)}),
                     arguments.plot)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:       # a size that can't be, a file that isn't there or isn't text
            demo.error(str(error))
    return 0


def run_demo(settings, plot=None):
    """Train on the GPU if there is one, print what came out, and draw the losses."""
    from . import demo
    from .check import gpu_trouble

    if gpu_trouble() is None:
        import cupy as xp
    else:
        import numpy as xp
    check_attention(settings, xp)       # what would fail during the training, or after it, fails before it
    if plot:
        check_plot(plot)
    print(f"training on {'the GPU with CuPy' if xp.__name__ == 'cupy' else 'the CPU with NumPy'}, "
          f"attention: {settings.attention}", flush=True)
    result = demo.train(settings, xp)
    print(f"loss {result.losses[0]:.3f} -> {sum(result.losses[-20:]) / len(result.losses[-20:]):.3f} "
          f"(mean of the last 20), held out {result.held_out:.3f}, {result.tokens_per_second:,.0f} tokens/s")
    print(f"\nit writes:\n{result.sample}")
    if plot:
        draw(result.losses, plot)


def check_attention(settings, xp):
    """Raise a ValueError if the demo can't run with the attention that it is to use."""
    from . import demo, engines
    from .check import gpu_trouble, reference_trouble

    name, simulated = settings.attention, engines.simulated()
    if name not in ("auto", "reference", *engines.NAMES):
        raise ValueError(f"--attention must be auto, reference, {', '.join(engines.NAMES)}, got {name}")
    if name == "reference":
        if reference_trouble():
            raise ValueError(f"--attention reference can't run: {reference_trouble()}")
        return
    if xp.__name__ == "numpy" and name not in ("auto", *engines.ON_CPU) and not simulated:
        raise ValueError(f"--attention {name} needs a GPU: {gpu_trouble()}; without one, take auto, reference, "
                         f"{', '.join(engines.ON_CPU)}")
    try:
        demo.choose_engines(settings, xp)
    except ValueError as error:
        raise ValueError(f"--attention {name} can't run: {error}") from None


def check_plot(path):
    """Raise a ValueError if no loss curve can be drawn there."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install ".[bench]"') from None
    matplotlib.use("Agg")
    from matplotlib.backend_bases import FigureCanvasBase

    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"--plot must name a file in a folder that exists, got {path}")
    ending, known = Path(path).suffix[1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if ending and ending not in known:
        raise ValueError(f"--plot must end with one of .{', .'.join(sorted(known))}, got {path}")


def draw(losses, path):
    """The loss curve as a PNG."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss (nats per character)", title="character-level transformer")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def run():
    """The program: `main`, and a quiet end where nobody reads on (``| head``)."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # Python flushes once more as it ends
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(run())
