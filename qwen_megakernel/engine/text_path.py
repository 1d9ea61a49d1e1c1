"""When the tokens of a text are spoken: some heads of the talker attend to the text's token that is spoken next.

`TextPath` follows such a head through one utterance. `HeadFinder` looks for one in a checkpoint that names none.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from qwen_megakernel.backend.interfaces import Watch
from qwen_megakernel.checkpoint.config import TextHead
from qwen_megakernel.engine.audio import FRAME_S

_MOST = 3  # tokens that a frame may pass at most; speech takes two frames and more for one
_SOUNDLESS = 6  # by so much a row's different tokens may outnumber its frames: marks get none; 4 were seen
_LEAST_SHARE = 0.1  # of a frame's attention, that must be near the path; otherwise the path waits

_FRAMES, _TRIES = 150, 20  # of utterances that ended well, so many frames decide; most utterances that are looked at
_OFFSETS = 12  # utterances that tell an offset; one alone is 0.09 s off (standard deviation), the median of 12 0.03
_LOUD = 0.05  # of the loudest sample
_ONSET_LATE_S = 0.1  # what `_offset_s` would tell too much: 0.06 to 0.10 for four heads of the demo voice
_SHARE, _FORWARD = 0.9, 0.97  # of attention on the text's rows; of frames whose attention does not go back
_SHORTEST = 5  # tokens of an utterance that tells something


class TextPath(Watch):
    """A monotone path through the tokens of one utterance, one step a frame. What it has passed stays passed."""

    def __init__(self, text_at: int, text: Sequence[int], head: TextHead):
        """`text_at`, `text`: see `Watch`."""
        super().__init__(text_at, text, head)
        self.starts: list[float] = []
        """When the tokens that have begun did, in seconds of the model's sound, in order."""
        self._offset_s = head.offset_s
        self._frames_at: Counter[int] = Counter()  # by token: those in which it had the most attention
        self.reached: list[int] = []
        """How many different tokens had had the most of a frame's attention, by each frame that was seen. Where speech
        jumps ahead and comes back, the path waits, and this goes on."""
        self._before = 0, [0.0]  # of the frame before: see `see`

    @property
    def frames(self) -> int:
        return len(self.reached)

    @property
    def lost(self) -> list[int]:
        """Numbers of the tokens that speech leaves out if it ends here: those without attention, in rows that have too
        few frames to be said. A few frames in such a row are a mumble."""
        lost: list[int] = []
        begin, different, frames, most, end = 0, set[int](), 0, 0, 0
        for number, token in enumerate(self.text):
            different.add(token)
            frames += self._frames_at[number]
            if len(different) - frames >= most:
                most, end = len(different) - frames, number + 1
            if len(different) <= frames or number + 1 == len(self.text):
                if most > _SOUNDLESS:
                    lost += [one for one in range(begin, end) if not self._frames_at[one]]
                begin, different, frames, most = number + 1, set(), 0, 0
        return lost

    def see(self, told: np.ndarray) -> None:
        """The next frame: see `FrameDecoder.told`, of one head."""
        first, whole, most, *behind = told.ravel().tolist()  # `behind` begins with token `first`
        begins, at = int(first), self.first - int(first)
        near, far = behind[at : at + 1 + _MOST], behind[at + 1 + _MOST :][:1]
        if far and (near[0] - far[0] >= _LEAST_SHARE or far[0] > 0.5):
            # Tokens without sound, such as four marks in a row, may be left out all at once.
            each = [here - next_ for here, next_ in zip(near, [*near[1:], *far], strict=True)]
            to = self.first + (_MOST if far[0] > 0.5 else each.index(max(each)))
            for token in range(len(self.starts), to + 1):
                before = self._before[1][token - self._before[0] :][:1]
                # It begins where half of the attention has got to it, between the frame before and this one.
                reached = behind[token - begins]
                back = (reached - whole / 2) / max(1e-9, reached - sum(before))
                frame = max(0.0, self.frames - min(1.0, max(0.0, back)))
                self.starts.append(max(0.0, FRAME_S * frame + self._offset_s, *self.starts[-1:]))
            self.first = to
        self._frames_at[int(most)] += 1
        self.reached.append(len(self._frames_at))
        self._before = begins, behind


class HeadTrial(Watch):
    """How all heads attended to the tokens of one utterance."""

    def __init__(self, text_at: int, text: Sequence[int]):
        super().__init__(text_at, text, None)
        self._shares: list[np.ndarray] = []  # of each frame: [layers, heads]
        self._argmax: list[np.ndarray] = []

    @property
    def frames(self) -> int:
        return len(self._shares)

    def see(self, told: np.ndarray) -> None:
        """The next frame: see `FrameDecoder.told`."""
        self._shares.append(told[..., 1])
        self._argmax.append(told[..., 2])

    def scores(self, tokens: int) -> np.ndarray:
        """How well each head follows a text of so many tokens: [layers, heads]; 0: it does not."""
        share, path = np.mean(self._shares, 0), np.stack(self._argmax)
        forward = np.mean(np.diff(path, axis=0) >= 0, 0)
        scores: np.ndarray = share * forward * ((share >= _SHARE) & (forward >= _FORWARD) & (path.max(0) >= tokens - 2))
        return scores


class HeadFinder:
    """Knows the head that an engine follows. If nobody told it, it looks for one in the first utterances, and then
    learns its offset in the next ones. The engine's thread owns it; others may read `head`, and set `looks`."""

    def __init__(self, head: TextHead | None = None, keep: Callable[[TextHead | None], None] | None = None):
        """`head`: a known one. `keep`: takes what was found, None for no head; without it nothing is looked for."""
        self.head = head
        self.looks = True  # False: for none in utterances that begin
        self.judges = head is not None
        """Is what a path tells of the speech a reason to end or to repeat it? Not with a head that was found since: the
        same request must end alike, whoever spoke before."""
        self._keep = keep
        self._tries = _TRIES if keep and not head else 0  # that are left
        self._frames = 0  # of utterances that ended well
        self._scores: np.ndarray | float = 1.0  # the lowest of them
        self._found: TextHead | None = None  # its offset is not known yet
        self._offsets: list[float] = []  # each from one utterance

    def path(self, text_at: int, text: Sequence[int]) -> TextPath | HeadTrial | None:
        """What shall see the attention of an utterance that begins. `text_at`, `text`: see `Watch`."""
        if head := self.head or self._found:
            return TextPath(text_at, text, head)
        if not self.looks:
            return None
        self._tries -= 1
        return HeadTrial(text_at, text) if self._tries >= 0 else None

    def judge(self, path: TextPath | HeadTrial, sound: Sequence[np.ndarray]) -> None:
        """The model has said end of speech. `sound`: fp32 [1920] of each frame that was made so far."""
        tokens = len(path.text)
        if self.head or path.frames < 2 or tokens < _SHORTEST:
            return
        if isinstance(path, TextPath):
            if sound and len(path.starts) > _SHORTEST:
                self._offsets.append(_offset_s(path.starts, np.concatenate(sound)))
            if self._found and len(self._offsets) == _OFFSETS:
                self._end(replace(self._found, offset_s=round(float(np.median(self._offsets)), 3)))
        elif self._frames < _FRAMES:
            self._frames += path.frames
            self._scores = np.minimum(self._scores, path.scores(tokens))
            if self._frames >= _FRAMES:
                layer, head = map(int, np.unravel_index(np.argmax(self._scores), np.shape(self._scores)))
                if np.max(self._scores) > 0:
                    self._found = TextHead(layer, head, 0.0)
                else:
                    self._end(None)

    def _end(self, head: TextHead | None) -> None:
        self.head, self._tries = head, 0
        assert self._keep
        self._keep(head)


def _offset_s(starts: list[float], sound: np.ndarray) -> float:
    """By how much tokens are heard later than they start, as one utterance tells: the second and the third one begin
    one and two tokens' time behind the sound's first sample that is loud."""
    loud = np.abs(sound) > _LOUD * np.abs(sound).max()
    onset_s, token_s = FRAME_S / 1920 * int(loud.argmax()), float(np.median(np.diff(starts[1:])))
    return onset_s + 1.5 * token_s - (starts[1] + starts[2]) / 2 - _ONSET_LATE_S
