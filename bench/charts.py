"""A chart of each benchmark, drawn from what is stored: bench/results/NAME.png.

A chart carries a digest of the figures that it shows, so that a test can tell whether it is that of the results.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .words import RESULTS, ROOT, label, names, read

DIGEST = "Description"          # of the PNG's text fields, the one that carries the digest


@dataclass
class Panel:
    """Axes with a curve for each name over numbers, or with groups of bars where the places are words.

    Attributes
    ----------
    title, unit, across : str
    series : dict
        Name to (places, values).
    log : bool
    """

    title: str
    unit: str
    across: str = ""
    series: dict = field(default_factory=dict)
    log: bool = False

    def add(self, name, place, value):
        places, values = self.series.setdefault(name, ([], []))
        places.append(place)
        values.append(value)


def panels_of(rows, unit, title, over, log=False):
    """Panels of rows.

    Parameters
    ----------
    rows : list of dict
    unit : str
        What the figures' names end with.
    title : function
        Of a row: the panel that it belongs to.
    over : str or function
        The column that goes across, or words made of a row.
    log : bool
        Whether both axes are logarithmic.
    """
    panels = {}
    for row in rows:
        panel = panels.setdefault(title(row), Panel(title(row), unit, "" if callable(over) else over, log=log))
        for name in names([row], unit):
            panel.add(name, over(row) if callable(over) else row[over], row[f"{name} {unit}"])
    return list(panels.values())


def grid_panels(result):
    """Of `forward` and `backward`: TFLOP/s over n."""
    titles = {"speed": lambda row: f"{row['dtype']}, d {row['d']}, {row['mask']}",
              "gqa": lambda row: f"64 heads on 8, {row['mask']}"}
    return [panel for part, title in titles.items() if part in result
            for panel in panels_of(result[part]["rows"], "TFLOP/s", title, "n") if "float16, " not in
            panel.title or "bfloat16" in panel.title]


def mma_panels(result):
    """TFLOP/s by length and mask, one panel for each dtype, direction and head dim."""
    return [panel for dtype, part in result.items()
            for panel in panels_of(part["rows"], "TFLOP/s", lambda row: f"{row['direction']}, {dtype}, d {row['d']}",
                                   lambda row: f"{row['n']} {row['mask']}")]


def ladder_panels(result):
    """TFLOP/s of every rung, by head dim and mask."""
    return [panel for dtype, part in result.items()
            for panel in panels_of(part["rows"], "TFLOP/s", lambda row: f"{row['direction']}, {dtype}",
                                   lambda row: f"d {row['d']} {row['mask']}")]


def memory_panels(result):
    """MiB over n, one panel for each direction."""
    panels = []
    for part, content in result.items():
        split = {}
        for row in content["rows"]:
            for name in names([row], "MiB"):
                rival, direction = name.rsplit(" ", 1)
                title = f"{direction}, {part}, {content['heads']} heads of {content['d']}"
                panel = split.setdefault(direction, Panel(title, "MiB, 0.01 at least", "n", log=True))
                panel.add(rival, row["n"], max(row[f"{name} MiB"], 0.01))           # a logarithm has no zero
        panels += split.values()
    return [panel for panel in panels if any(len(places) > 1 for places, _ in panel.series.values())]     # curves


def traffic_panels(result):
    """GB predicted and counted, by engine."""
    panels = []
    for part, content in result.items():
        for row in content["rows"]:
            if "not measured" in row:
                continue
            title = f"{row['direction']}, {part}"
            if title not in [panel.title for panel in panels]:
                panels.append(Panel(title, "GB read and written"))
            for name, keys in {"predicted": ("predicted GB read", "predicted GB written"),
                               "counted at HBM": ("GB read", "GB written"),
                               "counted at L2": ("GB read from L2", "GB written to L2")}.items():
                panels[-1].series.setdefault(name, ([], []))            # in this order everywhere
                if all(key in row for key in keys):
                    panels[-1].add(name, row["engine"], sum(row[key] for key in keys))
    for panel in panels:
        panel.series = {name: found for name, found in panel.series.items() if found[0]}
    return panels


def latency_panels(result):
    """µs of small calls, and GB/s of decoding."""
    panels = []
    for part, content in result.items():
        if part == "decode":
            panels += panels_of(content["rows"], "GB/s", lambda row: "decoding", lambda row: ", ".join(
                str(row[name]) for name in ("batch", "heads", "kv_heads", "n")))
        elif part != "compile":
            title = {"device": "the device's time", "cpu": "a small call on a CPU"}
            panels += panels_of(content["rows"], "us", lambda row: title.get(part, f"the host's time, {part}"),
                                lambda row: f"{row['direction']} {row['shape']}")
    return panels


def train_panels(result):
    """Tokens/s by engine."""
    panels = []
    for part, content in result.items():
        panel = Panel(f"training, {part}, context {content['settings']['context']}", "tokens/s")
        for row in content["rows"]:
            if "tokens/s" in row:
                panel.add(f"attention in {row['attention in']}", row["engine"], row["tokens/s"])
        panels.append(panel)
    return [panel for panel in panels if panel.series]


def cpu_panels(result):
    """GFLOP/s by shape."""
    return panels_of(result["speed"]["rows"], "GFLOP/s", lambda row: row["direction"],
                     lambda row: f"n {row['n']} d {row['d']} {row['mask']}")


PANELS: dict[str, Callable] = {
    "forward": grid_panels, "backward": grid_panels, "mma": mma_panels, "ladder": ladder_panels,
    "memory": memory_panels, "traffic": traffic_panels, "latency": latency_panels, "train": train_panels,
    "cpu": cpu_panels}


def digest(panels):
    """What tells two charts' figures apart."""
    return hashlib.sha256(json.dumps([asdict(panel) for panel in panels]).encode()).hexdigest()


def stored_digest(path):
    """The digest that a PNG carries."""
    from PIL import Image                       # which Matplotlib brings

    with Image.open(path) as image:
        return image.text[DIGEST]


# ---- drawing ---------------------------------------------------------------------------------------------------------

def save(name, result_path, path):
    """Draw the chart of a result into a PNG."""
    panels = PANELS[name](json.loads(Path(result_path).read_text()))
    draw(panels).savefig(path, dpi=90, metadata={DIGEST: digest(panels)})


def draw(panels):
    """A figure with all panels."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        columns = min(len(panels), 3)
        rows = -(-len(panels) // columns) if columns else 0
        figure = Figure(figsize=(4.4 * max(columns, 1), 3.4 * max(rows, 1)), layout="constrained")
        colours, shades = {}, matplotlib.colormaps["tab20"].colors
        palette = iter((*shades[::2], *shades[1::2]))
        for i, panel in enumerate(panels):
            colours |= {name: next(palette) for name in panel.series if name not in colours}
            draw_panel(figure.add_subplot(rows, columns, i + 1), panel, colours)
        figure.legend(handles=[matplotlib.patches.Patch(color=colour, label=label(name))
                               for name, colour in colours.items()],
                      loc="outside lower center", ncols=4, fontsize=9)
        return figure


def draw_panel(axes, panel, colours):
    """One panel; a name has the same colour in all of them."""
    axes.set_title(panel.title, fontsize=10)
    axes.set_ylabel(panel.unit)
    axes.set_xlabel(panel.across)
    axes.grid(alpha=0.3)
    places = list(dict.fromkeys(place for across, _ in panel.series.values() for place in across))
    for i, (name, (across, values)) in enumerate(panel.series.items()):
        colour = colours[name]
        if places and isinstance(places[0], str):
            width = 0.8 / len(panel.series)
            axes.bar([places.index(place) + (i + 0.5) * width - 0.4 for place in across], values, width, color=colour)
        else:
            width = 5 - 4 * i / len(panel.series)           # equal curves lie on one another
            axes.plot(across, values, marker="o", markersize=2 * width, linewidth=width, color=colour)
    if places and isinstance(places[0], str):
        axes.set_xticks(range(len(places)), places, rotation=25, ha="right", fontsize=8)
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place // 1024}k" if place >= 1024 else str(place) for place in places])
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.06 * max(value for _, values in panel.series.values() for value in values))


def stored():
    """The names of the benchmarks that have results."""
    return [name for name in PANELS if read(name)]


def main(root=ROOT):
    """Draw the charts of all results."""
    for name in stored():
        save(name, ROOT / RESULTS / f"{name}.json", Path(root) / RESULTS / f"{name}.png")
