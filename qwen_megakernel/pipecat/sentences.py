"""Sentences: Pipecat's sentences, and what stands between them."""

from collections.abc import AsyncIterator

from pipecat.utils.text.base_text_aggregator import Aggregation
from pipecat.utils.text.simple_text_aggregator import SimpleTextAggregator


class Sentences(SimpleTextAggregator):
    """Pipecat hands sentences on without the blanks and line ends between them, by which numbers and lists are read.

    Attributes:
        gap: the blanks and line ends between the latest text and the one before it.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gap = " "
        self._came = ""  # text that waits to be a sentence, as it came

    def set_apart(self, text: str) -> None:
        """A text is spoken that did not come through `aggregate`."""
        self.gap = " " + _line_ends(text)

    def _take_gap(self, text: str) -> None:
        before, found, after = self._came.partition(text)
        if found and not before.strip():
            self.gap, self._came = before + _line_ends(text), after
        else:  # it was changed on its way
            self.set_apart(text)
            self._came = ""

    async def aggregate(self, text: str) -> AsyncIterator[Aggregation]:
        """Take text. Yields sentences that are complete; in TOKEN mode the text."""
        self._came += text
        async for one in super().aggregate(text):
            self._take_gap(one.text)
            yield one

    async def flush(self) -> Aggregation | None:
        """Take what waits to be a sentence, if any, for one."""
        came = self._came
        rest = await super().flush()  # which forgets what came
        self._came = came
        if rest and rest.text:
            self._take_gap(rest.text)
        return rest

    async def handle_interruption(self):
        """Forget what waits."""
        await super().handle_interruption()
        self._came = ""

    async def reset(self):
        """Forget what waits."""
        await super().reset()
        self._came = ""


def _line_ends(text: str) -> str:
    return text[: len(text) - len(text.lstrip("\n"))]
