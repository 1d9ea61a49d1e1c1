"""SpokenText: a text that has passed the front end, and the silence around it."""

from dataclasses import dataclass, replace

from spoken_text.errors import NoWordsError, TextError
from spoken_text.front_end import Reading, TextFrontEnd
from spoken_text.pauses import Part, Pause


@dataclass(frozen=True)
class SpokenText:
    """Text to be spoken as it is."""

    text: str = ""
    before_s: float = 0.0  # seconds of silence before its speech
    after_s: float = 0.0  # and after it
    ends_at_pause: bool = False  # a pause follows, so the speech's own silence at its end is cut
    begins_at_pause: bool = False  # the silence before it follows other speech

    def cut(self, pieces: list[str]) -> list["SpokenText"]:
        """The pieces of this text. The first and the last have the silence at its ends."""
        parts = [SpokenText(piece) for piece in pieces]
        parts[0] = replace(parts[0], before_s=self.before_s, begins_at_pause=self.begins_at_pause)
        parts[-1] = replace(parts[-1], after_s=self.after_s, ends_at_pause=self.ends_at_pause)
        return parts

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.text)


def spoken_text(front_end: TextFrontEnd, text: str | SpokenText) -> SpokenText:
    """The spoken form of a whole text that must be one utterance. Raises TextError: as `spoken_texts`, or there are
    pauses between its words."""
    if isinstance(text, SpokenText):
        return text
    if front_end.leaves_alone(text):
        return SpokenText(text)
    first, *others = spoken_texts(front_end, text)
    if others:
        why = "this call speaks one utterance, so its text cannot have pauses inside"
        raise TextError(f"{why}: use TTSEngine.generate or TTSEngine.pieces")
    return first


def spoken_texts(front_end: TextFrontEnd, text: str | SpokenText, reading: Reading | None = None) -> list[SpokenText]:
    """The spoken form of a whole text: one text, or several with pauses between. `reading`: of the text that this one
    continues. None: a text of its own. Raises NoWordsError: nothing is left to speak. Raises TextError: a pause is
    malformed (`PauseStream`)."""
    if isinstance(text, SpokenText):
        return [text]
    if not reading and front_end.leaves_alone(text):
        return [SpokenText(text)]
    parts = reading.sentence(front_end, text) if reading else front_end.whole(text)
    if said := _around_pauses(parts):
        return said
    told = "text must not be blank" if not text.strip() else f"the text has nothing to speak: {text[:60]!r}"
    raise NoWordsError(told)


def _around_pauses(parts: list[Part]) -> list[SpokenText]:
    """What a front end made of a text, with the silence around each text. Empty if there is nothing to speak."""
    texts, gaps = [], [0.0]  # the pauses before the texts and behind the last one
    for part in parts:
        if isinstance(part, Pause):
            gaps[-1] += part.seconds
        elif part.strip():
            texts.append(part)
            gaps.append(0.0)
    if len(texts) > 1 or any(gaps):  # white space means nothing next to a pause
        texts = [text.strip() for text in texts]
    said = [
        SpokenText(text, before_s, ends_at_pause=after_s > 0, begins_at_pause=n > 0 and before_s > 0)
        for n, (text, before_s, after_s) in enumerate(zip(texts, gaps, gaps[1:], strict=False))
    ]
    return [*said[:-1], replace(said[-1], after_s=gaps[-1])] if said else []
