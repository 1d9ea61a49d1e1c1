"""Silence: which characters of a written text are left out together."""

from qwen_megakernel.text.cleaning import Clean
from qwen_megakernel.text.markdown import Markdown
from qwen_megakernel.text.tags import Tags


class Silence:
    """Tells which characters the normalizer leaves out together, as in `<think>` or a code block."""

    def __init__(self) -> None:
        self._clean, self._tags, self._markdown = Clean(), Tags(), Markdown()

    def push(self, character: str) -> bool:
        """Take the text's next character. Is it left out?"""
        before = self._is_open()
        self._markdown.push(self._tags.push(self._clean.push(character)))
        return before and self._is_open()

    def _is_open(self) -> bool:
        return self._tags.silent or self._markdown.silent
