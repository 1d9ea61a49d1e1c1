"""Written text to spoken text, in eleven languages, also while it is written.

`TextFrontEnd(language, normalize="auto").whole(text)` reads a whole text; `.stream()` reads one in pieces. A `Lexicon`
says how to read words. Pauses come out as `Pause`. `split_sentences` cuts long text where a voice may rest. All but the
errors is imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from spoken_text.errors import LanguageError as LanguageError
from spoken_text.errors import NoWordsError as NoWordsError
from spoken_text.errors import RequestError as RequestError
from spoken_text.errors import TextError as TextError
from spoken_text.errors import TextTooLongError as TextTooLongError
from spoken_text.errors import TTSError as TTSError

__version__ = "0.4.0"

if TYPE_CHECKING:
    from spoken_text.cutting import split_sentences as split_sentences
    from spoken_text.cutting import split_to_fit as split_to_fit
    from spoken_text.front_end import Reading as Reading
    from spoken_text.front_end import TextFrontEnd as TextFrontEnd
    from spoken_text.front_end import TextFrontEndStream as TextFrontEndStream
    from spoken_text.lexicon import Lexicon as Lexicon
    from spoken_text.pauses import Pause as Pause
    from spoken_text.sentence import ends_sentence as ends_sentence
    from spoken_text.spoken import LANGUAGES as LANGUAGES
else:
    _MODULES = {"split_sentences": "cutting", "split_to_fit": "cutting", "Reading": "front_end", "Lexicon": "lexicon"}
    _MODULES |= {"TextFrontEnd": "front_end", "TextFrontEndStream": "front_end", "Pause": "pauses"}
    _MODULES |= {"ends_sentence": "sentence", "LANGUAGES": "spoken"}

    def __getattr__(name: str):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"spoken_text.{_MODULES[name]}"), name)
