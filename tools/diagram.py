"""The diagram "how a sentence becomes sound" of docs/architecture.md, as SVG for light pages and for dark ones."""

from html import escape
from pathlib import Path

from charts import SCHEMES

WIDTH, HEIGHT = 900, 352
FONT = "font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
TOP, BOTTOM, TALL = 44, 226, 64  # of the boxes: the host's row, the GPU's row, height


def draw(target: str) -> None:
    """Write TARGET-light.svg and TARGET-dark.svg."""
    for scheme, colours in SCHEMES.items():
        Path(f"{target}-{scheme}.svg").write_text(diagram(colours), encoding="utf-8")


def diagram(colours: dict[str, str]) -> str:
    ink, soft, ours, mark = (colours[use] for use in ("ink", "soft", "ours", "mark"))

    def words(x: float, y: float, text: str, size: int = 12, fill: str = soft, anchor: str = "middle") -> str:
        weight = 600 if size > 12 else 400
        style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
        return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'

    def frame(x: float, y: float, width: float, height: float, colour: str, more: str) -> str:
        return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" stroke="{colour}" {more}/>'

    def box(x: float, y: float, width: float, name: str, detail: str) -> str:
        middle = x + width / 2
        edge = frame(x, y, width, TALL, soft, 'fill="none"')
        return edge + words(middle, y + 28, name, 14, ink) + words(middle, y + 48, detail)

    def arrow(path: str) -> str:
        return f'<path d="{path}" fill="none" stroke="{soft}" stroke-width="1.5" marker-end="url(#head)"/>'

    lane = f'fill="{soft}" fill-opacity="0.08"'
    across, below = TOP + TALL / 2, BOTTOM + TALL / 2
    parts = [
        # Where it runs.
        frame(8, 8, 884, 112, "none", lane),
        words(24, 30, "HOST", 12, soft, "start"),
        frame(8, 150, 884, 194, "none", lane),
        words(24, 172, "GPU", 12, soft, "start"),
        # The caller's thread: text to prompt rows.
        box(24, TOP, 120, "text", "whole or in pieces"),
        arrow(f"M144 {across}H160"),
        box(164, TOP, 112, "tokens", "caller's thread"),
        arrow(f"M220 {TOP + TALL}V{BOTTOM - 4}"),
        box(164, BOTTOM, 112, "prompt rows", "text + codec"),
        arrow(f"M276 {below}H340"),
        words(304, below - 8, "prefill"),
        # The engine's thread: one launch a frame.
        box(386, TOP, 200, "engine", "queues a launch for each frame"),
        arrow(f"M486 {TOP + TALL}V165"),
        frame(330, 170, 312, 166, ours, f'fill="{ours}" fill-opacity="0.08" stroke-width="2"'),
        words(486, 194, "one kernel launch = one frame", 14, ink),
        words(486, 212, "80 ms of sound, up to 16 streams at once"),
        box(344, BOTTOM, 94, "talker", "28 layers"),
        arrow(f"M438 {below}H490"),
        words(464, below - 8, "code 0"),
        box(494, BOTTOM, 134, "code predictor", "5 layers, 15 times"),
        arrow(f"M561 {BOTTOM + TALL}V308H391V{BOTTOM + TALL + 4}"),
        words(476, 325, "sum of 16 embeddings + next text row"),
        # Codes to sound.
        arrow(f"M628 {below}H660"),
        *(
            f'<rect x="{667 + 12 * (code % 4)}" y="{below - 22 + 12 * (code // 4)}" width="9" height="9" rx="2" '
            f'fill="{mark if code else ours}"/>'
            for code in range(16)
        ),
        words(689, below + 42, "16 codes"),
        arrow(f"M716 {below}H738"),
        box(742, BOTTOM, 134, "vocoder", "1,920 samples"),
        arrow(f"M752 {BOTTOM}V{TOP + TALL + 4}"),
        box(644, TOP, 118, "PCM chunks", "80 ms and longer"),
        arrow(f"M762 {across}H784"),
        box(788, TOP, 88, "listener", "hears it live"),
    ]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    marker = '<marker id="head" refX="5" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    marker += f'<path d="M0 0L6 4L0 8z" fill="{soft}"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{FONT}" role="img">'
    head += f"<title>How a sentence becomes sound</title><defs>{marker}</defs>"
    return "\n".join([head, *parts, "</svg>\n"])
