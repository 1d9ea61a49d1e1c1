"""Errors that are raised on purpose.

    TTSError
    └── RequestError (ValueError)  what the caller asked for is refused
        ├── TextError              not a string, not valid Unicode, blank; a tag or a lexicon that cannot be used
        │   ├── NoWordsError       blank, or nothing but signs that are not spoken
        │   └── TextTooLongError   the text cannot be cut into pieces that are small enough
        └── LanguageError          unknown

Messages say what was expected, what came, and what to do. A package that builds on this one may go on from these
classes, so that its users catch all by one name.
"""


class TTSError(Exception):
    """Base of every error of this package."""


class RequestError(TTSError, ValueError):
    """A request that is refused. It uses no resources and harms no other request.

    Attributes:
        field: the wrong option, as the caller named it; None: it is not known, or there are several.
    """

    def __init__(self, *words: object, field: str | None = None):
        super().__init__(*words)
        self.field = field


class TextError(RequestError):
    """Text that cannot be spoken."""


class NoWordsError(TextError):
    """Text that has nothing to speak."""


class TextTooLongError(TextError):
    """Text that cannot be cut into pieces that are small enough."""


class LanguageError(RequestError):
    """A language that is not known."""
