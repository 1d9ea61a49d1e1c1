"""What is written about options a second time: `python tools/options_table.py` writes it.

The tables of docs/options.md come from qwen_megakernel/speech/options.py and server/fields.py. Type checkers derive no
class from another one's fields, so classes get theirs here too.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.server.fields import FIELDS, KOKORO, OMNI, OPENAI
from qwen_megakernel.speech.options import ENTRANCES, Option, RequestOptions, options_of, table

ROOT = Path(__file__).parents[1]
COLUMNS = {
    "python": "Python",
    "speak": "`speak`",
    "batch": "`batch`",
    "demo": "demo",
    "line": "line of `batch`",
    "http": "HTTP",
    "socket": "socket",
    "stream": "vLLM-Omni's socket",
    "serve": "`serve`",
    "wyoming": "`wyoming`",
    "pipecat": "Pipecat",
    "remote": "Pipecat, server",
}


def cell(row: Option, entrance: str) -> str:
    """ "yes", the option's name there, or "no"."""
    if entrance in row.without:
        return "no"
    name = row.names.get(entrance)
    return f"`{name}`" if name else "yes"


def table_of_options() -> str:
    """Options by entrances in Markdown, and why some do not take some."""
    names = " | ".join(COLUMNS[entrance] for entrance in ENTRANCES)
    lines = [f"| option | {names} |", f"|---|{'---|' * len(ENTRANCES)}"]
    lines += [f"| `{name}` | {' | '.join(cell(row, e) for e in ENTRANCES)} |" for name, row in table().items()]
    lines += ["", "| option | what it says | refused, because |", "|---|---|---|"]
    for name, row in table().items():
        lines.append(f"| `{name}` | {about(row)} | {'; '.join(dict.fromkeys(row.without.values()))} |")
    return "\n".join(lines)


def about(row: Option) -> str:
    """What an option says, its range and its default."""
    default = "" if row.default is None or "default" in row.about else f"; default: {str(row.default).lower()}"
    wanted = f" ({row.wanted})" if row.choices or row.least is not None and not row.check else ""
    return f"{row.about}{wanted}{default}"


def table_of_fields() -> str:
    """Fields of other servers in Markdown: who documents them, and what happens."""
    of = (OPENAI, OMNI, KOKORO)
    lines = [f"| field | {' | '.join(of)} | what happens |", f"|---|{'---|' * len(of)}---|"]
    for name, field in FIELDS.items():
        said = f"ignored, and named: {field.about}" if field.ignored else field.about
        lines.append(f"| `{name}` | {' | '.join('yes' if one in field.of else '' for one in of)} | {said} |")
    return "\n".join(lines)


def types_of(fields: type) -> Iterator[tuple[str, str, ast.expr]]:
    """A class's annotated fields: name, type as it is written, and what stands beside the type."""
    (body,) = ast.parse(inspect.getsource(fields)).body
    for field in body.body:
        if isinstance(field, ast.AnnAssign):
            kind, beside = field.annotation.slice.elts
            yield field.target.id, ast.unparse(kind), beside


def fields_of_settings() -> str:
    """The options of Pipecat's services that Pipecat's own settings do not have."""
    rows = {name: row for name, row in options_of("pipecat").items() if name not in ("voice", "language")}
    fields = {name: kind for name, kind, _ in types_of(RequestOptions) if name in rows}
    return _fields({f"{name}: {kind} | NotGiven = NOT_GIVEN": about(rows[name]) for name, kind in fields.items()})


def fields_of_engine() -> str:
    """The fields of `EngineOptions`."""
    return _fields({f"{name}: {kind}": ast.literal_eval(help) for name, kind, help in types_of(EngineOptions)})


def _fields(fields: dict[str, str]) -> str:
    texts = [(field, textwrap.wrap(f'"""{text}"""', 116)) for field, text in fields.items()]
    return textwrap.indent("\n".join(line for field, text in texts for line in (field, *text)), " " * 4)


_MADE = "# fields: `python tools/options_table.py` writes them"
PARTS = {
    "docs/options.md": [("<!-- table -->", table_of_options), ("<!-- fields -->", table_of_fields)],
    "qwen_megakernel/pipecat/settings.py": [(_MADE, fields_of_settings)],
    "qwen_megakernel/engine/options.py": [(_MADE, fields_of_engine)],
}
"""File -> its marks, each with what stands between it and the next "end"."""


def renewed(path: str) -> str:
    """A file of `PARTS` with these parts made anew."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for mark, made in PARTS[path]:
        before, rest = text.split(f"{mark}\n", 1)
        _, end, after = re.split(r"^( *(?:<!-- end -->|# end)$)", rest, maxsplit=1, flags=re.M)
        text = f"{before}{mark}\n{made()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for path in PARTS:
        (ROOT / path).write_text(renewed(path), encoding="utf-8")
