"""Markdown in text: keeps what a reader sees, and leaves out the signs."""

import re

from spoken_text.stage import LONGEST_HELD, Stage, is_mark

_RULE = re.compile(r"([-*_=])(?: *\1){2,} *")
_MAY_BE_RULE = re.compile(r"([-*_=])(?: *\1)* *")
_HEADING = re.compile(r"#{1,6} $")
_BULLET = re.compile(r"[-*+•‣◦] ")
_TASK = re.compile(r"\[[ xX]\] ")
_NUMBER = re.compile(r"\d{1,3}[.)] ")
_MAY_BE_HEAD = re.compile(r"\d{1,3}[.)]?|#{1,6}|[-+•‣◦*]|\[[ xX]?\]?")
_TABLE_LINE = re.compile(r"\|?[-:| ]*")
_NOTE = re.compile(r"\[\^[^\[\]\s]+\]: ")
_DEFINITION = re.compile(r"\[[^\[\]]+\]: +(?:<[^<>]*>|\S*://\S*|[#/.]\S*|mailto:\S+)(?: +[\"'(].*)? *")
_MAY_BE_DEFINITION = re.compile(r"\[(?:[^\[\]]+(?:\](?:: *(?:\S+(?: +(?:[\"'(].*)?)?)?)?)?)?")
_FENCE = re.compile(r"(`{3,}|~{3,})[^`]*")
_MAY_BE_FENCE = re.compile(r"`{1,2}|~{1,2}")
_NO_TARGET = re.compile(r"[(](?: |[^\"']*\S [^\"'(\s)])")
_LONGEST_DEFINITION = 300
_LONGEST_HEAD = 80  # most characters of a run of signs to hold back at a line's beginning
_ENDS = ".!?:;,。！？：；，、…"
_ESCAPED = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def _is_table_line(head: str) -> bool:
    return "|" in head and _TABLE_LINE.fullmatch(head) is not None


class Markdown(Stage):
    """Leaves out signs of headings, emphasis, lists, quotes and inline code, targets of links and images, rules, and
    whole code fences. Headings, list items and table rows end with a mark. A table's row is read cell by cell, with
    a comma between cells."""

    def __init__(self):
        self._begin_line()
        self._rows = False  # do a table's rows follow?
        self._inside = ""  # what the line before was in: "prose", "list", or nothing
        self._fence = ""  # the open one
        self._fence_line = ""  # the line that may close it
        self._run = ""  # signs that wait
        self._target = ""  # of a link
        self._waits = ""  # a sign whose meaning depends on the next character
        self._line_end = ""  # of prose without a mark, until the next line begins

    def _begin_line(self) -> None:
        self._at_head = True
        self._head = ""  # its beginning, while it may be a sign
        self._task = False
        self._item = self._table = self._comma = self._heading = False
        self._left = "\n"  # the character before the signs that wait
        self._last = ""  # the last visible one
        self._brackets = 0

    def feed(self, character: str) -> str:
        if self._fence:
            return self._in_fence(character)
        if self._target:
            return self._in_target(character)
        if not self._at_head:
            return self._inline(character)
        given = self._in_head(character)
        if not self._line_end or (self._at_head and not given and not self._item):
            return given
        mark, self._line_end = self._line_end, ""
        return (":" if self._item and not self._heading else "") + mark + given

    def end(self) -> str:
        return "" if self._fence else self.feed("\n").removesuffix("\n")

    @property
    def silent(self) -> bool:
        """Is the text left out here, up to the end of a code fence?"""
        return bool(self._fence)

    @property
    def at_rest(self) -> bool:
        """Plain text may come here without a look at its signs."""
        return not (self._fence or self._target or self._head or self._run or self._waits or self._item or self._rows)

    def pass_over(self, text: str) -> None:
        """Plain text came meanwhile: a line begins behind it, or does not."""
        self.push("\n" if text.endswith("\n") else "a")

    def settle(self) -> str:
        if self._fence or self._target or self._head.startswith(("```", "~~~")):
            return ""
        if head := self._head:
            if _RULE.fullmatch(head) or _is_table_line(head) or _DEFINITION.fullmatch(head):
                return self._end_head()
            return self._begin_text(head) + self.settle()
        given = self._end_run(" ") if self._run else ""
        waits, self._waits = self._waits, ""
        if waits == "]":
            self._brackets = max(0, self._brackets - 1)
        elif waits in ("\\", "!"):
            given += self._give(waits)
        return given + self._end_item()

    def _in_head(self, character: str) -> str:
        if character == "\n":
            return self._end_head()
        if not self._head and (character == " " or is_mark(character)):
            return character.strip(" ")
        head = self._head = self._head + character
        if head[0] == "[" and not self._task:
            return self._in_definition(head)
        if _MAY_BE_RULE.fullmatch(head) or _TABLE_LINE.fullmatch(head) or _FENCE.fullmatch(head):
            self._head = head[:_LONGEST_HEAD]
            return ""
        if _HEADING.fullmatch(head):
            self._item = self._heading = True
            self._head = ""
        elif head == ">":
            self._head = ""
        elif self._task and (task := _TASK.match(head)):
            self._head = head[task.end() :]
            self._task = False
        elif bullet := _BULLET.match(head):
            self._item = self._task = True
            self._head = ""
            return self.push(head[bullet.end() :])  # a line's beginning too
        elif not (_MAY_BE_HEAD.fullmatch(head) or _MAY_BE_FENCE.fullmatch(head)) or ("[" in head and not self._task):
            return self._begin_text(head)
        return ""

    def _in_definition(self, head: str) -> str:
        """A line such as `[1]: https://example.com` says where links point, and is left out. Of a footnote the text is
        read."""
        if _NOTE.fullmatch(head):
            self._head = ""
        elif len(head) > _LONGEST_DEFINITION or is_mark(head[-1]) or not _MAY_BE_DEFINITION.fullmatch(head):
            return self._begin_text(head)
        return ""

    def _begin_text(self, head: str) -> str:
        """The line's signs have ended. `head`: what was held back, which is text."""
        self._head = ""
        self._at_head = False
        self._table = head[0] == "|" or self._rows
        number = _NUMBER.match(head)
        # As in CommonMark, only a list's first number ends a paragraph: "on\n3. Oktober" is prose.
        if self._table or (number and (self._inside != "prose" or head[0] == "1" and not head[1].isdigit())):
            self._item = True
        return self.push(head)

    def _end_head(self) -> str:
        head, self._head = self._head, ""
        if (fence := _FENCE.fullmatch(head)) is not None:
            self._fence = fence[1]
            self._fence_line = ""
            return "\n"
        if not head:
            self._inside = ""
        signs = _RULE.fullmatch(head) or _is_table_line(head) or not head.strip(" -*+•‣◦#[]")
        if signs or _DEFINITION.fullmatch(head):
            self._begin_line()
            self._rows = _is_table_line(head)
            return "\n"
        return self._begin_text(head + "\n")

    def _in_fence(self, character: str) -> str:
        if character != "\n":
            self._fence_line = (self._fence_line + character)[:_LONGEST_HEAD]
            return ""
        line, self._fence_line = self._fence_line.strip(" "), ""
        if line.startswith(self._fence) and not line.strip(self._fence[0]):
            self._fence = ""
            self._begin_line()
        return ""

    def _inline(self, character: str) -> str:
        if self._waits:
            waits, self._waits = self._waits, ""
            return self._settle(waits, character)
        if self._run:
            if character == self._run[0]:
                self._run = (self._run + character)[:_LONGEST_HEAD]
                return ""
            return self._end_run(character) + self._inline(character)
        if character in "*_~`":
            self._run = character
            return ""
        if character == "|" and self._table:
            self._comma = bool(self._last)
            self._left = " "
            return ""
        if character in "\\![]" or (character == " " and self._item):
            self._waits = character
            return ""
        if character == "\n":
            if self._item or self._inside != "list":
                self._inside = "list" if self._item else "prose"
            mark = self._end_item()
            if self._inside == "prose" and self._last and self._last not in _ENDS:  # a list may follow
                self._line_end = "\n"
            self._begin_line()
            return "" if self._line_end else mark + "\n"
        self._left = character
        return self._give(character)

    def _settle(self, waits: str, character: str) -> str:
        if waits == "\\":
            if character in _ESCAPED:
                self._left = character
                return self._give(character)
            return self._give("" if character == "\n" else "\\") + self._inline(character)
        if waits == " ":
            self._left = " "
            if character == "#" and self._heading:
                self._run = character
                return ""
            return ("" if character in " \n|" else self._give(" ")) + self._inline(character)
        if waits == "[":
            if character == "^":  # a footnote's number
                self._target = "[^"
                return ""
            given = self._give(" ") if self._left.isalnum() else ""
            self._brackets += 1
            self._left = "["
            return given + self._inline(character)
        if waits == "]":
            opened = self._brackets > 0
            self._left = "]"
            self._brackets = max(0, self._brackets - 1)
            if opened and character in "([":
                self._target = character
                return ""
            return self._inline(character)
        self._left = "!"
        return ("" if character == "[" else self._give("!")) + self._inline(character)

    def _end_run(self, right: str) -> str:
        run, self._run = self._run, ""
        left = self._left
        both_blank = (left.isspace() or left == "\n") and (right.isspace() or is_mark(right))
        keep = {
            "*": both_blank and len(run) == 1 or left.isdigit() and right.isdigit(),
            "_": both_blank and len(run) == 1 or left.isalnum() and right.isalnum(),
            "~": len(run) == 1,
            "#": right != "\n",
            "`": False,
        }[run[0]]
        if not keep:
            return ""
        self._left = run[-1]
        return self._give(f" {run}" if run[0] == "#" else run)

    def _end_item(self) -> str:
        """The mark that ends a heading, a list's item or a table's row; empty if it has one."""
        mark = "." if self._item and self._last and self._last not in _ENDS else ""
        self._last = mark or self._last
        return mark

    def _give(self, text: str) -> str:
        if text.strip():
            if self._comma:
                text = ", " + text.lstrip()
                self._comma = False
            self._last = text.strip()[-1]
        elif self._table:
            return text if not self._comma else ""
        return text

    def _in_target(self, character: str) -> str:
        self._target += character
        target = self._target
        if character == (")" if target[0] == "(" else "]") and target.count("(") <= target.count(")"):
            self._target = ""
            self._left = ")"
            return ""
        if character == "\n" or is_mark(character):
            self._target = target[:-1]
            return self._give_target() + self._inline(character)
        if len(target) > LONGEST_HELD or (target[0] == "(" and _NO_TARGET.match(target)):
            return self._give_target()
        return ""

    def _give_target(self) -> str:
        """Give out the held text, because it was not a link's target."""
        text, self._target = self._target, ""
        self._left = text[-1]
        return self._give(text)
