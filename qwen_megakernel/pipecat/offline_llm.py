"""OfflineLLM: answers by rules, token by token, so that you can try a bot without a key or a network."""

import asyncio
import re
from datetime import datetime

from pipecat.frames.frames import (
    Frame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
)
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor

_NUMBERS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
_STORY = (
    "There was once a lighthouse keeper who counted the ships. Every evening he wrote a number into a small blue book. "
    "One night no ship came, and he wrote down the stars instead. In the morning the book was full, and he began a new "
    "one."
)
_ASIDE = "I am only a few rules, so ask me to count, to tell the time, or to tell a story."


def answer(text: str) -> str:
    """The rules' answer to a user's words. An empty text gets a greeting."""
    said = text.lower().strip()
    if not said or re.search(r"\b(hello|hi|hey)\b", said):
        return "Hello! What would you like to hear? " + _ASIDE
    if count := re.search(r"\bcount\b(?:.*?\bto (\w+))?", said):
        last = count.group(1) or "ten"
        upto = int(last) if last.isdigit() else _NUMBERS.index(last) + 1 if last in _NUMBERS else 10
        return ", ".join(_NUMBERS[: max(1, min(upto, len(_NUMBERS)))]).capitalize() + "."
    if re.search(r"\btime\b", said):
        return datetime.now().strftime("It is %H:%M.")
    if re.search(r"\bstory\b", said):
        return _STORY
    if re.search(r"\b(thanks|thank you|bye|goodbye)\b", said):
        return "You are welcome. Goodbye!"
    return f"You said: {text.strip()} {_ASIDE}"


class OfflineLLM(FrameProcessor):
    """Takes the place of an LLM service in a pipeline and pushes the same frames."""

    def __init__(self, *, token_s: float = 0.03, **kwargs):
        """`token_s`: seconds between two tokens. `**kwargs`: for `FrameProcessor`."""
        super().__init__(**kwargs)
        self._token_s = token_s

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        """Answer a context. An interruption cancels the task that runs this, which ends the answer."""
        await super().process_frame(frame, direction)
        if not isinstance(frame, LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        await self.push_frame(LLMFullResponseStartFrame())
        for token in re.findall(r"\s*\S+", answer(last_user_text(frame.context))):
            await self.push_frame(LLMTextFrame(token))
            await asyncio.sleep(self._token_s)
        await self.push_frame(LLMFullResponseEndFrame())


def last_user_text(context: LLMContext) -> str:
    """What the user said last; empty if nothing was said yet."""
    for message in reversed(context.get_messages()):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content") or ""
            return content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)
    return ""
