"""A drawing as a list of plain shapes, written as SVG, or as PNG with matplotlib (`pip install p2pserve[plots]`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final, Literal

from ..errors import UsageError
from ..printing import printable

FONT: Final = "DejaVu Sans, Verdana, Arial, sans-serif"
_PNG_DPI: Final = 144.0
_POINTS: Final = 72.0
_PX: Final = 96.0
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A rectangle with round corners."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    stroke: str = "none"
    stroke_width: float = 1.0
    radius: float = 0.0
    dashed: bool = False
    title: str = ""  # shown where a pointer rests


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A line of text. `y` is where it stands on."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: str = "#14161a"
    anchor: Anchor = "start"
    bold: bool = False
    turned: bool = False  # from below to above


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A bent line from one point to another, with a head."""

    x1: float
    y1: float
    x2: float
    y2: float
    bend: float = 0.0  # how far its middle lies off the straight line
    stroke: str = "#14161a"
    width: float = 1.5
    opacity: float = 1.0
    title: str = ""

    @property
    def control(self) -> tuple[float, float]:
        """The control point of its quadratic curve."""
        dx, dy = self.x2 - self.x1, self.y2 - self.y1
        length = max(1e-9, (dx * dx + dy * dy) ** 0.5)
        middle = (self.x1 + self.x2) / 2, (self.y1 + self.y2) / 2
        return middle[0] - dy / length * self.bend * 2, middle[1] + dx / length * self.bend * 2


Shape = Rectangle | Words | Arrow


@dataclass(slots=True)
class Drawing:
    """Shapes on a page; later ones lie above earlier ones. Sizes are CSS pixels."""

    width: float
    height: float
    background: str = "#ffffff"
    title: str = ""
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Put these above what there is."""
        self.shapes += shapes


def to_svg(drawing: Drawing) -> str:
    """The drawing as a document that needs nothing else."""
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    rest = f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {rest}>',
        f"<title>{_text(drawing.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{drawing.background}"/>',
        *(_svg(shape) for shape in drawing.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def write_svg(drawing: Drawing, path: Path) -> None:
    """Raises UsageError for a file that cannot be written."""
    write_text("svg", to_svg(drawing), path)


def write_text(option: str, text: str, path: Path) -> None:
    """Write the file that an option names. Raises UsageError for one that cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {error.strerror}; name another file") from error


def write_png(drawing: Drawing, path: Path) -> None:
    """Raises UsageError for a file that cannot be written, or without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("png: matplotlib is not installed; pip install 'p2pserve[plots]', or use --svg") from None
    figure = Figure(figsize=(drawing.width / _PX, drawing.height / _PX), dpi=_PNG_DPI, facecolor=drawing.background)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for shape in drawing.shapes:
        _plot(axes, shape)
    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, format="png", dpi=_PNG_DPI)
    except OSError as error:
        raise UsageError(f"png: {path} cannot be written: {error.strerror}; name another file") from error


def _text(text: str) -> str:
    return escape(printable(text), quote=True)


def _svg(shape: Shape) -> str:
    match shape:
        case Rectangle():
            dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
            rest = f"><title>{_text(shape.title)}</title></rect>" if shape.title else "/>"
            return (
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
                f'rx="{shape.radius:.1f}" fill="{shape.fill}" stroke="{shape.stroke}" '
                f'stroke-width="{shape.stroke_width:.1f}"{dashes}{rest}'
            )
        case Words():
            weight = ' font-weight="bold"' if shape.bold else ""
            turn = f' transform="rotate(-90 {shape.x:.1f} {shape.y:.1f})"' if shape.turned else ""
            return (
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:.1f}" fill="{shape.fill}" '
                f'text-anchor="{shape.anchor}"{weight}{turn}>{_text(shape.text)}</text>'
            )
        case Arrow():
            cx, cy = shape.control
            (hx1, hy1), (hx2, hy2) = _head(shape)
            title = f"<title>{_text(shape.title)}</title>" if shape.title else ""
            return (
                f'<g fill="none" stroke="{shape.stroke}" stroke-width="{shape.width:.1f}" '
                f'stroke-opacity="{shape.opacity:.2f}" stroke-linecap="round">{title}'
                f'<path d="M{shape.x1:.1f} {shape.y1:.1f}Q{cx:.1f} {cy:.1f} {shape.x2:.1f} {shape.y2:.1f}'
                f'M{hx1:.1f} {hy1:.1f}L{shape.x2:.1f} {shape.y2:.1f}L{hx2:.1f} {hy2:.1f}"/></g>'
            )


def _head(arrow: Arrow) -> tuple[tuple[float, float], tuple[float, float]]:
    """The two ends of an arrow's head."""
    cx, cy = arrow.control
    dx, dy = arrow.x2 - cx, arrow.y2 - cy
    length = max(1e-9, (dx * dx + dy * dy) ** 0.5)
    ux, uy, size = dx / length, dy / length, 5.0 + 1.5 * arrow.width
    back = arrow.x2 - ux * size, arrow.y2 - uy * size
    return (back[0] - uy * size * 0.5, back[1] + ux * size * 0.5), (
        back[0] + uy * size * 0.5,
        back[1] - ux * size * 0.5,
    )


def _plot(axes: object, shape: Shape) -> None:
    """The same with matplotlib, whose types are not its strength."""
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path as Curve

    points = _POINTS / _PX
    match shape:
        case Rectangle():
            radius = min(shape.radius, shape.width / 2, shape.height / 2)
            patch = FancyBboxPatch(
                (shape.x + radius, shape.y + radius),
                max(0.0, shape.width - 2 * radius),
                max(0.0, shape.height - 2 * radius),
                boxstyle=f"round,pad={radius},rounding_size={radius}" if radius else "square,pad=0",
                facecolor=shape.fill,
                edgecolor=shape.stroke,
                linewidth=shape.stroke_width * points if shape.stroke != "none" else 0.0,
                linestyle="--" if shape.dashed else "-",
            )
            axes.add_patch(patch)  # type: ignore[attr-defined]
        case Words():
            align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            axes.text(  # type: ignore[attr-defined]
                shape.x,
                shape.y,
                printable(shape.text).replace("$", r"\$"),
                fontsize=shape.size * points,
                color=shape.fill,
                ha="left" if shape.turned else align,
                va="bottom" if shape.turned else "baseline",
                weight="bold" if shape.bold else "normal",
                rotation=90 if shape.turned else 0,
                rotation_mode="anchor",
                family="DejaVu Sans",
            )
        case Arrow():
            one, other = _head(shape)
            end = (shape.x2, shape.y2)
            curve = Curve(
                [(shape.x1, shape.y1), shape.control, end, one, end, other],
                [Curve.MOVETO, Curve.CURVE3, Curve.CURVE3, Curve.MOVETO, Curve.LINETO, Curve.LINETO],
            )
            axes.add_patch(  # type: ignore[attr-defined]
                PathPatch(
                    curve,
                    facecolor="none",
                    edgecolor=shape.stroke,
                    linewidth=shape.width * points,
                    alpha=shape.opacity,
                    capstyle="round",
                )
            )
