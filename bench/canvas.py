"""What the course's pictures are drawn with: colours, and a figure in inches."""

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

# Colours of Okabe and Ito, which colour-blind readers tell apart; and paler ones as backgrounds of text.
INK, GREY, PALE, PAPER = "#222222", "#707070", "#e6e6e6", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_PURPLE = "#bfdcec", "#f9e3b4", "#b8e2d5", "#f0d9e6"
# The same file from the same Matplotlib: no random ids. Text stays text, which is smaller and can be searched.
RC = {"svg.hashsalt": "numba_flash", "svg.fonttype": "none", "hatch.linewidth": 0.6,
      "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"]}


class Canvas:
    """A figure whose coordinates are inches from its upper left corner."""

    def __init__(self, width, height):
        self.figure = Figure((width, height), facecolor=PAPER)      # opaque: the page may be dark
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        self.axes.set_axis_off()

    def text(self, x, y, words, size=10, align="center", color=INK, **options):
        self.axes.text(x, y, words, fontsize=size, ha=align, va="center", color=color, **options)

    def paragraph(self, x, y, *lines):
        for row, words in enumerate(lines):
            self.text(x, y + 0.21 * row, words, 9.5, "left")

    def box(self, x, y, width, height, face=PAPER, words="", size=9, edge=INK, line=0.8, color=INK, bold=False, **more):
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=line, **more))
        if words:
            self.text(x + width / 2, y + height / 2, words, size, color=color, weight="bold" if bold else "normal")

    def card(self, x, y, width, height, face, words="", size=9):
        """A box with round corners."""
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.05",
                                           facecolor=face, edgecolor=INK, linewidth=0.8))
        self.text(x + width / 2, y + height / 2, words, size)

    def line(self, *points, color=INK, width=0.8, style="-", z=1):
        self.axes.plot(*zip(*points), color=color, linewidth=width, linestyle=style, zorder=z)

    def arrow(self, start, stop, color=INK, bend=0.0):
        self.axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=9, color=color, linewidth=1,
                                            shrinkA=0, shrinkB=0, connectionstyle=f"arc3,rad={bend}", zorder=3))
