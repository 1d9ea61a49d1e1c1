"""SpokenText: a text that has passed the front end, and the silence around it."""

from qwen_megakernel.errors import NoWordsError, TextError
from qwen_megakernel.text.front_end import Reading, TextFrontEnd
from qwen_megakernel.text.pauses import Pause


class SpokenText(str):
    """Text to be spoken as it is.

    Attributes:
        before_s, after_s: seconds of silence before and after its speech.
        ends_at_pause: a pause follows, so the speech's own silence at its end is cut.
        begins_at_pause: the silence before it follows other speech.
    """

    before_s: float = 0.0
    after_s: float = 0.0
    ends_at_pause: bool = False
    begins_at_pause: bool = False


def spoken_text(front_end: TextFrontEnd, text: str) -> SpokenText:
    """The spoken form of a whole text that must be one utterance.

    Raises:
        TextError: as `spoken_texts`, or there are pauses between its words.
    """
    if isinstance(text, SpokenText):
        return text
    if front_end.leaves_alone(text):
        return SpokenText(text)
    first, *others = spoken_texts(front_end, text)
    if others:
        raise TextError(
            "this call speaks one utterance, so its text cannot have pauses inside: use TTSEngine.generate or "
            "TTSEngine.pieces"
        )
    return first


def spoken_texts(front_end: TextFrontEnd, text: str, reading: Reading | None = None) -> list[SpokenText]:
    """The spoken form of a whole text: one text, or several with pauses between.

    Args:
        reading: of the text that this one continues. None: a text of its own.

    Raises:
        NoWordsError: nothing is left to speak.
        TextError: a pause is malformed (`PauseStream`).
    """
    if isinstance(text, SpokenText):
        return [text]
    if not reading and front_end.leaves_alone(text):
        return [SpokenText(text)]
    parts = reading.sentence(front_end, text) if reading else front_end.whole(text)
    if said := _around_pauses(parts):
        return said
    told = "text must not be blank" if not text.strip() else f"the text has nothing to speak: {text[:60]!r}"
    raise NoWordsError(told)


def _around_pauses(parts: list[str | Pause]) -> list[SpokenText]:
    """What a front end made of a text, with the silence around each text. Empty if there is nothing to speak."""
    said: list[SpokenText] = []
    pause_s = 0.0
    for part in parts:
        if isinstance(part, Pause):
            pause_s += part.seconds
        elif part.strip():
            said.append(SpokenText(part))
            said[-1].before_s, pause_s = pause_s, 0.0
    if len(said) > 1 or pause_s or said and said[0].before_s:
        said = [_without_blanks(one) for one in said]
    if not said:
        return []
    for one, following in zip(said, said[1:], strict=False):
        one.ends_at_pause = following.begins_at_pause = following.before_s > 0
    said[-1].after_s, said[-1].ends_at_pause = pause_s, pause_s > 0
    return said


def _without_blanks(text: SpokenText) -> SpokenText:
    """Strip white space, which means nothing next to a pause."""
    stripped = SpokenText(text.strip())
    stripped.before_s = text.before_s
    return stripped
