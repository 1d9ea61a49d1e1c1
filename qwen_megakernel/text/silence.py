"""Silence: which characters of a written text are left out together."""

from qwen_megakernel.text.cleaning import Clean
from qwen_megakernel.text.markdown import Markdown
from qwen_megakernel.text.tags import Tags

_BEGINS = frozenset("<`~")
"""With these begins what is left out."""


class Silence:
    """Tells which characters the normalizer leaves out together, as in `<think>` or a code block."""

    def __init__(self) -> None:
        self._clean = Clean()
        self._tags = Tags()
        self._markdown = Markdown()

    def push(self, text: str) -> list[bool]:
        """Take the text's next piece. Is each of its characters left out?"""
        if self._tags.at_rest and self._markdown.at_rest and _BEGINS.isdisjoint(text):
            self._markdown.pass_over(text)  # quick for most texts
            return [False] * len(text)
        return list(map(self._push, text))

    def _push(self, character: str) -> bool:
        before = self._is_open()
        self._markdown.push(self._tags.push(self._clean.push(character)))
        return before and self._is_open()

    def _is_open(self) -> bool:
        return self._tags.silent or self._markdown.silent
