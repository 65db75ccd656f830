"""Draws an SVG that is legible on light and on dark pages.

An image on a page cannot use the page's colors. Therefore each drawing has its own background, and uses light
or dark colors according to the reader's system.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

# Light and dark. Replicas have the colors of Okabe and Ito, which color-blind people can distinguish.
COLORS = {
    "ground": ("#ffffff", "#1b1e26"),
    "ink": ("#1f2733", "#e6e9ef"),
    "soft": ("#566072", "#aab3c2"),
    "box": ("#f1f4fa", "#262c3a"),
    "line": ("#8794b4", "#7b89ab"),
    "replica0": ("#9fcdea", "#155f8a"),
    "replica1": ("#f6d28a", "#8a6210"),
    "replica2": ("#8fd6bd", "#0f6a50"),
    "replica3": ("#eab6a0", "#8e4326"),
    "model": ("#d9c7ea", "#5b3d7c"),
}
_FONTS = "ui-sans-serif,system-ui,-apple-system,'Segoe UI','Liberation Sans',Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,'Liberation Mono',Consolas,monospace"


class Drawing:
    """A drawing whose later parts cover earlier parts.

    Args:
        width: In pixels, at most the width of a page.
        height: In pixels.
        title: The alternative text for readers who cannot see the picture.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, color: str = "box", dashed: bool = False
    ) -> None:
        """Draws a rectangle with round corners."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="b {color}"{dash}/>'
        )

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> None:
        """Draws a line of text. Styles are `bold`, `soft`, `mono` and `small`, or several of them."""
        kinds = f' class="{style}"' if style else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" xml:space="preserve"{kinds}>{escape(words)}</text>'
        )

    def arrow(self, *points: tuple[float, float], head: bool = True) -> None:
        """Draws a line through some points, with a head at the last point."""
        way = "L".join(f"{x:g} {y:g}" for x, y in points)
        end = ' marker-end="url(#head)"' if head else ""
        self._parts.append(f'<path d="M{way}" class="a"{end}/>')

    def rows(self, x: float, y: float, colors: list[str], size: float = 16) -> None:
        """Draws the rows of a batch side by side, each in its color."""
        for number, color in enumerate(colors):
            self.box(x + number * (size + 2), y, size, size, color)

    def svg(self) -> str:
        """Returns the picture."""

        def rules(dark: bool) -> str:
            colors = {name: both[dark] for name, both in COLORS.items()}
            fills = "".join(f".{name}{{fill:{color}}}" for name, color in colors.items())
            lines = f".b,.a{{stroke:{colors['line']}}}marker path{{fill:{colors['line']}}}"
            return f"{fills}text{{fill:{colors['ink']}}}text.soft{{fill:{colors['soft']}}}{lines}"

        style = (
            f"text{{font:14px {_FONTS}}}.bold{{font-weight:600}}.small{{font-size:12px}}"
            f".mono{{font-family:{_MONO};font-size:13px}}.b{{stroke-width:1}}.a{{fill:none;stroke-width:1.6}}"
            f"{rules(False)}@media (prefers-color-scheme: dark){{{rules(True)}}}"
        )
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker>'
        )
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{style}</style>",
            f"<defs>{head}</defs>",
            f'<rect class="ground" width="{self.width}" height="{self.height}" rx="6"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(parts) + "\n"
