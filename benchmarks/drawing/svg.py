"""Writes small SVG pictures that follow the reader's light or dark theme."""

from __future__ import annotations

from html import escape
from pathlib import Path

#: Colours by class: of a light page, and of a dark one.
COLORS = {
    "ink": ("#1f2328", "#e6edf3"),
    "pale": ("#8c959f", "#7d8590"),
    "grid": ("#d0d7de", "#3d444d"),
    "one": ("#3b6fb6", "#6ca4ef"),
    "two": ("#d9822b", "#f0a95b"),
    "three": ("#2a9d6f", "#4fcf9c"),
    "soft": ("#b9cde8", "#2f4a6d"),
    "page": ("#ffffff", "#0d1117"),
}


class Picture:
    """An SVG of one size, to which shapes are added. Colours are names of :data:`COLORS`."""

    def __init__(self, width: float, height: float, words: str) -> None:
        """``words`` describe the picture to those who do not see it."""
        self.width, self.height, self.words = width, height, words
        self.shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = "page", line: str = "") -> None:
        colors = f'class="fill-{fill}{f" line-{line}" if line else ""}"'
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" {colors}/>')

    def circle(self, x: float, y: float, radius: float, fill: str, line: str = "", thick: float = 1.5) -> None:
        colors = f'class="fill-{fill}{f" line-{line}" if line else ""}"'
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" stroke-width="{thick}" {colors}/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, color: str = "grid", arrow: bool = False) -> None:
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.shapes.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="line-{color}"{end}/>'
        )

    def text(self, x: float, y: float, words: str, color: str = "ink", anchor: str = "start", size: float = 13) -> None:
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" class="fill-{color}">{escape(words)}</text>'
        )

    def save(self, path: Path) -> None:
        path.write_text(self.svg())

    def svg(self) -> str:
        def rules(dark: int) -> str:
            colors = ((name, pair[dark]) for name, pair in COLORS.items())
            return "".join(f".fill-{name}{{fill:{color}}}.line-{name}{{stroke:{color}}}" for name, color in colors)

        style = f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
            f'role="img" aria-label="{escape(self.words)}" font-family="sans-serif">'
        )
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
            '<path d="M0,0 L6,3 L0,6 z" class="fill-pale"/></marker></defs>'
        )
        return "\n".join([head, f"<style>{style}</style>", arrow, *self.shapes, "</svg>", ""])
