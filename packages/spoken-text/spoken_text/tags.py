"""HTML in text: tags, comments and entities."""

import html
import re
import unicodedata

from spoken_text.stage import LONGEST_HELD, Stage, is_mark
from spoken_text.tables import shared_words

_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'=<>`]+)"
_NAME = r"[A-Za-z][\w:-]*"
_TAG = re.compile(rf"<(/?)({_NAME})(?:\s+[\w:.@-]+\s*=\s*{_VALUE})*\s*(/?)>")
_OPEN_VALUE = r"(?:\"[^\"]*\"?|'[^']*'?|[^\s\"'=<>`]*)"
_MAY_BE_TAG = re.compile(
    rf"</?(?:{_NAME}(?:\s+[\w:.@-]+\s*=\s*{_VALUE})*(?:\s+(?:[\w:.@-]+\s*(?:=\s*{_OPEN_VALUE})?)?)?\s*/?>?)?"
    r"|<[^\s<>]*>?"  # an address such as <https://example.com>
    r"|<!(?:-|--|[A-Za-z][^<>]*>?)?|<\?[^<>]*>?"
)
_BEGINS_TAG = re.compile("<[/!?A-Za-z]")
_ADDRESS = re.compile(r"<((?:[a-z][a-z0-9+.-]+:|[^\s<>@]+@)[^\s<>]+)>", re.I)
_NO_BLANK = re.compile(r"<[^\s<>]*>")
_DECLARATION = re.compile(r"<[!?][^<>]*>")
_ENTITY = re.compile(r"&(?:#?[A-Za-z0-9]{0,31};?)?")

SILENT = frozenset({"think", "thinking", "script", "style"})  # elements whose content is left out
_LINES = {name: "\n" for name in ("br", "p", "div", "tr", "ul", "ol", "table", "blockquote", "hr")}
_LINES |= {"li": "\n- "} | {f"h{level}": "\n# " for level in range(1, 7)}


_ELEMENTS = shared_words("elements")
_PLACEHOLDER = re.compile(r"<[A-Z]\w*>")


class Tags(Stage):
    """Leaves out tags, comments, and the whole content of `<think>`, `<thinking>`, `<script>` and `<style>`. Entities
    such as "&amp;" become what they mean. A "<" that begins no tag stays. The word of a key such as `<Enter>`, of a
    type such as `vector<int>` and of a tag in inline code stays, too."""

    def __init__(self):
        self._code = False  # within inline code
        self._keys = ""  # the names in the tags before the one that is held: <Ctrl><Tab>
        self._gap = False  # does an empty element part two words, as in go<noise/>home?
        self._left = self._behind = ""  # the character before this one, and before the tag
        self._until: re.Pattern | None = None  # matches the end of the part that is left out
        self._tail = ""  # the end of that part so far

    def feed(self, character: str) -> str:
        if self._until:
            self._tail = (self._tail + character)[-32:]
            if self._until.search(self._tail):
                self._until = None
                self._tail = ""
            return ""
        if self._held[-1:] == ">" and _PLACEHOLDER.fullmatch(self._held):  # <Enter> is a key, but <Tool>x an element
            keys, self._keys = self._keys + self._named(), ""
            if character == "<":  # the next tag tells
                self._keys, keys = f"{keys} ", ""
            self._held = ""
            return ("" if character.isascii() and character.isalnum() else keys) + self.feed(character)
        left, self._left = self._left, character
        gap, self._gap = " " if self._gap and character.isalnum() else "", False
        if character in "`\n":
            self._code = character == "`" and not self._code
        begins = character == "<" or (character == "&" and not self._held.startswith("<"))
        if begins or not self._held or is_mark(character):
            given, self._held = self._held, character if begins else ""
            if begins:
                self._behind = left
            return given if begins else gap + given + character
        self._held += character
        return self._in_tag() if self._held[0] == "<" else self._in_entity()

    def _in_tag(self) -> str:
        held = self._held
        if held == "<!--":
            self._held = ""
            self._until = re.compile("-->$")
        elif len(held) > LONGEST_HELD or not _MAY_BE_TAG.fullmatch(held):
            return self.end()
        elif held[-1] == ">":
            if tag := _TAG.fullmatch(held):
                if (
                    (tag[2].lower() not in _ELEMENTS or tag[2] == "Del")
                    and not self._code
                    and _PLACEHOLDER.fullmatch(held)
                ):
                    return ""  # the next character tells
                self._held = ""
                if self._is_named(held, tag[2].lower()):
                    return f"{' ' if self._behind.isalnum() else ''}{tag[2]}"
                self._gap = bool(tag[3]) and tag[2].lower() not in _ELEMENTS and self._behind.isalnum()
                self._keys = ""
                return self._leave_out(bool(tag[1]), tag[2].lower(), bool(tag[3]))
            if address := _ADDRESS.fullmatch(held):
                self._held = ""
                return address[1]
            if _DECLARATION.fullmatch(held):
                self._held = ""
            elif _NO_BLANK.fullmatch(held):
                return self.end()
        return ""

    def _named(self) -> str:
        """The name in the tag that is held."""
        return f"{' ' if self._behind.isascii() and self._behind.isalnum() else ''}{self._held[1:-1]}"

    def end(self) -> str:
        if _PLACEHOLDER.fullmatch(self._held):
            self._held = self._named()
        keys, self._keys = self._keys, ""
        return keys + super().end()

    def _is_named(self, tag: str, name: str) -> bool:
        """Does the text speak of what stands in the brackets?"""
        is_type = self._behind.isascii() and self._behind.isalnum() and "/" not in tag
        return self._code or (is_type and name not in _ELEMENTS)

    def _leave_out(self, closes: bool, name: str, is_empty: bool) -> str:
        if name in SILENT and not closes and not is_empty:
            self._until = re.compile(rf"</{name}\s*>$", re.I)
            return ""
        text = _LINES.get(name, "")
        return "\n" if text and closes else text

    def _in_entity(self) -> str:
        if not _ENTITY.fullmatch(self._held):
            return self.end()
        if self._held[-1] != ";":
            return ""
        held, self._held = self._held, ""
        text = html.unescape(held)
        return " " if text == "\xa0" else "".join(c for c in text if unicodedata.category(c)[0] != "C")

    @property
    def silent(self) -> bool:
        """Is the text left out here, up to the end of an element or a comment?"""
        return self._until is not None

    @property
    def at_rest(self) -> bool:
        """No tag may have begun, and nothing is left out."""
        return super().at_rest and not self.silent

    def settle(self) -> str:
        is_open = _BEGINS_TAG.match(self._held) and not _PLACEHOLDER.fullmatch(self._held)
        return "" if is_open else self.end()
