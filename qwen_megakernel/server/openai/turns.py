"""Several speakers in one text: "[ada] Hello. [max] Hi."."""

import re
from collections.abc import Callable

from qwen_megakernel.errors import SpeakerError, TextError
from spoken_text.stage import has_words

_NAME = re.compile(r"(?<!\\)\[(voice:)?[ \t]*([^\W\d][\w-]{0,63})[ \t]*\][ \t]*", re.I)
_PAUSES = re.compile(r"\[pause[^\]]*\]|<[^>]*>", re.I)
_MOST_TURNS = 200


def turns_of(text: str, is_voice: Callable[[str], bool], known: str) -> list[tuple[str | None, str]]:
    """The text, cut where the speaker changes: voices and what each says. None: the request's own voice.

    A voice's name in brackets changes the speaker from there on. "[voice:NAME]" is always meant so; "[NAME]" is if it
    begins a line or names a voice. A backslash before the bracket makes it text.

    Args:
        is_voice: tells whether a voice has this name.
        known: the voices, for a message.

    Raises:
        SpeakerError: there is no such voice.
        TextError: there are more than 200 changes.
    """
    turns: list[tuple[str | None, str]] = []
    name: str | None = None
    at = 0
    for found in _NAME.finditer(text):
        begins_line = not text[: found.start()].rpartition("\n")[2].strip()
        if not is_voice(found[2]):
            if not (found[1] or begins_line):
                continue
            words = f"the text names the voice {found[2]!r}, which is unknown; known: {known}"
            raise SpeakerError(f"{words}. Write \\[{found[2]}] if it is text", field="input")
        turns.append((name, text[at : found.start()]))
        name, at = found[2], found.end()
        if len(turns) > _MOST_TURNS:
            raise TextError(f"the speaker changes more than {_MOST_TURNS} times: send several requests", field="input")
    turns.append((name, text[at:]))
    return _joined(turns)


def _joined(turns: list[tuple[str | None, str]]) -> list[tuple[str | None, str]]:
    """Without turns that say nothing. A pause that stands alone goes to the speaker behind it, or before it."""
    said: list[tuple[str | None, str]] = []
    silence = ""
    for name, text in turns:
        if not has_words(_PAUSES.sub("", text)):
            silence += text
            continue
        if said and said[-1][0] == name and not silence:
            said[-1] = name, said[-1][1] + text
        else:
            said.append((name, silence + text))
        silence = ""
    if silence.strip() and said:
        said[-1] = said[-1][0], said[-1][1] + silence
    return said or turns[:1]
