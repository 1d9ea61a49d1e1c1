"""What every step over text in pieces has in common: it reads character by character, so that cuts cannot matter."""

LONGEST_HELD = 2000
"""How many characters a construct that is open (a link, a tag) holds back at most. A longer one is given out
as it is."""

FIRST_MARK = "\U00100000"
"""Private-use characters from here on stand for something that is no text, such as a pause. Steps let them through."""


class Stage:
    """Text in, text out. A step sees one character at a time and never where a piece ended."""

    def feed(self, character: str) -> str:
        """Take one character; what is final now comes back."""
        raise NotImplementedError

    def end(self) -> str:
        """The text is over; what was held back comes back."""
        raise NotImplementedError

    def push(self, piece: str) -> str:
        """Take a piece of any length; what is final now comes back."""
        return "".join(map(self.feed, piece))


def is_mark(character: str) -> bool:
    """Does the character stand for something that is no text?"""
    return character >= FIRST_MARK


def is_cjk(character: str) -> bool:
    """Is it a Chinese or Japanese letter or mark? No blanks stand between these."""
    return (
        "\u3001" <= character <= "\u30ff"
        or "\u3400" <= character <= "\u4dbf"
        or "\u4e00" <= character <= "\u9fff"
        or "\uf900" <= character <= "\ufaff"
        or "\uff01" <= character <= "\uff9f"
        or "\U00020000" <= character <= "\U000323af"
    )
