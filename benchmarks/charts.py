"""How charts look: each is drawn twice, for light pages and for dark ones."""

from collections.abc import Callable

SCHEMES = {
    "light": {"ink": "#1f2328", "soft": "#59636e", "ours": "#2563eb", "other": "#7d8590", "mark": "#c2410c"},
    "dark": {"ink": "#e6edf3", "soft": "#9fa8b3", "ours": "#60a5fa", "other": "#8b949e", "mark": "#fb923c"},
}
"""Colours by their use. tools/tests/test_pictures.py checks their contrast with the pages of GitHub and of our site."""


def draw(target: str, paint: Callable) -> None:
    """Write TARGET-light.svg and TARGET-dark.svg, transparent, with text as text.

    Args:
        paint: is given matplotlib's pyplot and a scheme's colours, and returns a figure.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--draw needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for scheme, colours in SCHEMES.items():
        ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), "ink")
        lines = {"axes.edgecolor": "soft", "grid.color": "soft"}
        style = {name: colours[use] for name, use in (ink | lines).items()}
        # The salt and the missing date make the same file of the same figures.
        style |= {"svg.fonttype": "none", "svg.hashsalt": "chart", "savefig.transparent": True}
        style |= {"font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 9, "figure.titlesize": 10}
        with matplotlib.rc_context(style):
            figure = paint(pyplot, colours)
            figure.tight_layout()
            figure.savefig(f"{target}-{scheme}.svg", metadata={"Date": None})
            pyplot.close(figure)
