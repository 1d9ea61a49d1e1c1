"""The tables of docs/options.md, from qwen_megakernel/speech/options.py and server/fields.py: `python
tools/options_table.py` writes them."""

from pathlib import Path

from qwen_megakernel.server.fields import FIELDS, KOKORO, OMNI, OPENAI
from qwen_megakernel.speech.options import ENTRANCES, Option, table

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
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
        default = "" if row.default is None or "default" in row.about else f"; default: {str(row.default).lower()}"
        wanted = f" ({row.wanted})" if row.choices or row.least is not None and not row.check else ""
        lines.append(f"| `{name}` | {row.about}{wanted}{default} | {'; '.join(dict.fromkeys(row.without.values()))} |")
    return "\n".join(lines)


def table_of_fields() -> str:
    """Fields of other servers in Markdown: who documents them, and what happens."""
    of = (OPENAI, OMNI, KOKORO)
    lines = [f"| field | {' | '.join(of)} | what happens |", f"|---|{'---|' * len(of)}---|"]
    for name, field in FIELDS.items():
        said = f"ignored, and named: {field.about}" if field.ignored else field.about
        lines.append(f"| `{name}` | {' | '.join('yes' if one in field.of else '' for one in of)} | {said} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its tables made anew."""
    for mark, table_of in (("table", table_of_options), ("fields", table_of_fields)):
        before, rest = text.split(f"<!-- {mark} -->\n", 1)
        _, after = rest.split("<!-- end -->", 1)
        text = f"{before}<!-- {mark} -->\n{table_of()}\n<!-- end -->{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
