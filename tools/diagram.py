"""The diagram "how a sentence becomes sound" of docs/architecture.md, as SVG for light pages and for dark ones."""

from html import escape
from pathlib import Path

from charts import SCHEMES

WIDTH, HEIGHT = 900, 520
FONT = "font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
TALL = 64  # of a box
CALLER, ENGINE, DEVICE = 78, 216, 382  # tops of the boxes in each lane


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

    def lane(y: float, height: float, name: str, name_at: float) -> str:
        shade = frame(8, y, 884, height, "none", f'fill="{soft}" fill-opacity="0.08"')
        return shade + words(24, name_at, name, 12, soft, "start")

    def arrow(path: str) -> str:
        return f'<path d="{path}" fill="none" stroke="{soft}" stroke-width="1.5" marker-end="url(#head)"/>'

    across, back, below = CALLER + TALL / 2, ENGINE + TALL / 2, DEVICE + TALL / 2
    parts = [
        lane(8, 150, "THE CALLER'S THREAD", 30),
        lane(166, 130, "THE ENGINE'S THREAD", 188),
        lane(304, 208, "THE DEVICE: backend/, csrc/", 498),
        # Text goes from left to right: from the entrance to the prompt.
        box(24, CALLER, 150, "1 entrance", "server/, pipecat/"),
        arrow(f"M174 {across}H200"),
        box(204, CALLER, 140, "2 request", "speech/options.py"),
        arrow(f"M344 {across}H370"),
        box(374, CALLER, 150, "3 SpeechSession", "speech/session.py"),
        arrow(f"M524 {across}H550"),
        box(554, CALLER, 150, "4 spoken text", "packages/spoken-text"),
        arrow(f"M704 {across}H730"),
        box(734, CALLER, 142, "5 prompt", "model/: tokens, rows"),
        # The engine gives it a slot, and decides what is computed next.
        arrow(f"M805 {CALLER + TALL}V{ENGINE - 4}"),
        box(734, ENGINE, 142, "6 queue, slot", "engine/admission.py"),
        arrow(f"M734 {back}H708"),
        box(554, ENGINE, 150, "7 scheduler", "engine/scheduler.py"),
        # The device computes from right to left: prompt, frames, sound.
        arrow(f"M805 {ENGINE + TALL}V{DEVICE - 4}"),
        box(734, DEVICE, 142, "8 prefill", "the prompt, once"),
        arrow(f"M734 {below}H708"),
        arrow(f"M629 {ENGINE + TALL}V324"),
        words(640, 321, "one launch for each frame", 12, soft, "start"),
        frame(206, 328, 498, 172, ours, f'fill="{ours}" fill-opacity="0.08" stroke-width="2"'),
        words(455, 350, "9 frame kernel: 80 ms of sound in one launch", 14, ink),
        words(455, 368, "for up to 16 streams at once"),
        box(586, DEVICE, 104, "talker", "28 layers"),
        arrow(f"M586 {below}H536"),
        words(561, below - 8, "code 0"),
        box(394, DEVICE, 138, "code predictor", "5 layers, 15 times"),
        arrow(f"M394 {below}H308"),
        words(351, below - 8, "codes 1 to 15"),
        *(
            f'<rect x="{254 + 12 * (code % 4)}" y="{below - 22 + 12 * (code // 4)}" width="9" height="9" rx="2" '
            f'fill="{mark if code else ours}"/>'
            for code in range(16)
        ),
        words(276, below + 42, "16 codes"),
        arrow(f"M276 {below + 48}V474H638V{DEVICE + TALL + 4}"),
        words(457, 490, "their embeddings and the next row of text"),
        arrow(f"M246 {below}H178"),
        box(24, DEVICE, 150, "10 vocoder", "1,920 samples"),
        # Sound goes back up.
        arrow(f"M99 {DEVICE}V{back}H370"),
        words(235, back - 8, "samples of each stream"),
        box(374, ENGINE, 150, "11 chunks", "engine/output.py"),
        arrow(f"M449 {ENGINE}V{CALLER + TALL + 4}"),
        arrow(f"M449 {CALLER}V54H99V{CALLER - 4}"),
        words(274, 48, "12 events: sound, word times, end"),
    ]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    marker = '<marker id="head" refX="5" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    marker += f'<path d="M0 0L6 4L0 8z" fill="{soft}"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{FONT}" role="img">'
    head += f"<title>How a sentence becomes sound</title><defs>{marker}</defs>"
    return "\n".join([head, *parts, "</svg>\n"])
