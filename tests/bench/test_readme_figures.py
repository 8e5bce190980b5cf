"""The README's figures are those of the stored results."""

from bench.readme import ROOT, figures


def test_the_readme_has_the_stored_figures():
    assert figures() in (ROOT / "README.md").read_text(encoding="utf-8")
