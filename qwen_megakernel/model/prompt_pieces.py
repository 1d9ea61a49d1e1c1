"""Text that arrives in pieces -> a prompt in the streaming layout, then the text rows that trail it."""

import sys
import time
from dataclasses import replace

from torch import Tensor

from qwen_megakernel.errors import NoWordsError, TextTooLongError
from qwen_megakernel.model.conditioning import UNCONDITIONED, Conditioning
from qwen_megakernel.model.prompt import Prompt, PromptBuilder, no_room
from qwen_megakernel.model.text import PieceEncoder
from spoken_text.stage import has_words


class PromptPieces:
    """A prompt in the streaming layout whose text arrives in pieces. The prompt is there as soon as the first frame
    can be made; the text rows that trail it follow. Together they equal what `PromptBuilder.build` makes of the whole
    text (`text.PieceEncoder` names the one exception). Not thread-safe: one thread at a time pushes text."""

    def __init__(
        self, builder: PromptBuilder, conditioning: Conditioning = UNCONDITIONED, max_positions: int = sys.maxsize
    ):
        """`max_positions` is a slot's. Raises what `PromptBuilder.room` does."""
        self._builder = builder
        self._conditioning = conditioning
        self._max_positions = max_positions
        opening = builder.opening(conditioning)
        self._reference = opening.reference_ids
        self._frame_count = opening.frame_count
        self._fixed = opening.needed(0, non_streaming_mode=False)
        if self._fixed >= max_positions:
            raise no_room(self._fixed, max_positions)
        self._text = PieceEncoder(builder.tokenizer, "assistant\n")
        self._ids = [builder.config.im_start_id]  # the role's ids, three in all, then the text's
        self.tokens: list[int] = []  # the text's ids so far
        self._blank = True
        self._given = 0  # how many ids of reference and text already have rows, in the prompt or after it
        self.prompt: Prompt | None = None  # until the text is enough for it; its `trailing` is what was known then
        self.ended = False  # no more text will come
        self.tokenise_s = 0.0  # that `push` has spent on token ids so far

    @property
    def held(self) -> int:
        """How many characters wait, because the next one may change their ids."""
        return self._text.held

    def push(self, piece: str) -> Tensor:
        """Take a piece of the text. Returns [n, hidden], text rows that trail the rows so far; n is 0 while there is no
        prompt yet. Raises TextError: not valid Unicode; nothing was taken. TextTooLongError: the text no longer fits a
        slot."""
        start = time.perf_counter()
        ids = self._text.push(piece)
        self.tokenise_s += time.perf_counter() - start
        self._blank = self._blank and (not has_words(piece) or self._builder.tokenizer.is_blank(piece))
        return self._advance(ids)

    def flush(self) -> Tensor:
        """Take the characters that were held back, as if a boundary followed. Returns and raises what `push` does."""
        return self._advance(self._text.flush())

    def end(self) -> Tensor:
        """The text is complete. Returns rows as `push` does; the last one closes the text. Raises NoWordsError: no
        letter or digit has come. TextTooLongError: it does not fit a slot."""
        ids = self._text.flush()
        if self._blank or len(self._ids) + len(ids) < 4:
            raise NoWordsError("the text is blank or has no letter or digit: there is nothing to speak")
        self.ended = True
        return self._advance(ids)

    def _advance(self, ids: list[int]) -> Tensor:
        needed = self._fixed + len(self._ids) + len(ids) - 3
        if needed > self._max_positions:
            raise TextTooLongError(
                f"the text so far needs at least {needed} positions and a slot has {self._max_positions}: "
                "say the rest in another utterance, or raise max_positions"
            )
        self._ids += ids
        self.tokens += self._ids[3 + len(self.tokens) :]
        builder, ids = self._builder, self._reference + self._ids[3:]
        if self.prompt is None:
            if not self._blank and len(self._ids) > 3 and (self.ended or len(ids) > self._frame_count):
                self.prompt = self._make_prompt()
                self._given = len(ids)
            return builder.text_rows([], closed=False)
        fresh = ids[self._given :]
        self._given = len(ids)
        return builder.text_rows(fresh, closed=self.ended)

    def _make_prompt(self) -> Prompt:
        role, text = self._ids[:3], self._ids[3:]
        prompt = self._builder.assemble(self._builder.opening(self._conditioning, role), text, False)
        # `assemble` closes the text. While more may come, the closing row is left out.
        return prompt if self.ended else replace(prompt, trailing=prompt.trailing[:-1], text_open=True)
