"""When the tokens of a text are spoken: some heads of the talker attend to the text's token that is spoken next.

`TextPath` follows such a head through one utterance. `HeadFinder` looks for one in a checkpoint that names none.
"""

import logging

import numpy as np

from qwen_megakernel.checkpoint.config import TextHead
from qwen_megakernel.engine.audio import FRAME_S

log = logging.getLogger(__name__)

_MOST = 3  # tokens that a frame may pass at most; speech takes two frames and more for one
_LEAST_SHARE = 0.1  # of a frame's attention, that must be near the path; otherwise the path waits

OFFSET_S = 0.08  # of a head that was found; it is the demo voice's
_FRAMES, _TRIES = 150, 20  # of utterances that ended well, so many frames decide; most utterances that are looked at
_SHARE, _FORWARD = 0.9, 0.97  # of attention on the text's rows; of frames whose attention does not go back
_SHORTEST = 5  # tokens of an utterance that tells something


class TextPath:
    """A monotone path through the tokens of one utterance, one step a frame. What it has passed stays passed."""

    def __init__(self, text_at: int, head: TextHead):
        """`text_at`: see `Prompt.text_at`."""
        self.text_at = text_at
        self.layers = slice(head.layer, head.layer + 1)
        self.starts: list[float] = []
        """When the tokens that have begun did, in seconds of the model's sound, in order."""
        self._head = head
        self._frames = 0
        self._behind = np.zeros(0, np.float32)  # of the frame before: the attention to each token and those behind it

    def see(self, attention: np.ndarray) -> None:
        """The next frame's attention to the text's tokens so far: fp32 [1, heads, tokens]."""
        attention = attention[0, self._head.head]
        behind = attention[::-1].cumsum()[::-1]
        at = max(0, len(self.starts) - 1)
        near, far = attention[at : at + 1 + _MOST], behind[at + 1 + _MOST :]
        if near.sum() >= _LEAST_SHARE or len(far) and far[0] > 0.5:
            # Tokens without sound, such as four marks in a row, may be left out all at once.
            to = at + (_MOST if len(far) and far[0] > 0.5 else int(near.argmax()))
            for token in range(len(self.starts), to + 1):
                before = self._behind[token] if token < len(self._behind) else 0.0
                # It begins where half of the attention has got to it, between the frame before and this one.
                back = (behind[token] - behind[0] / 2) / max(1e-9, behind[token] - before)
                frame = max(0.0, self._frames - min(1.0, max(0.0, float(back))))
                self.starts.append(max(0.0, FRAME_S * frame + self._head.offset_s, *self.starts[-1:]))
        self._frames += 1
        self._behind = behind


class HeadTrial:
    """How all heads attended to the tokens of one utterance."""

    layers = slice(None)

    def __init__(self, text_at: int):
        self.text_at = text_at
        self._shares: list[np.ndarray] = []  # of each frame: [layers, heads]
        self._argmax: list[np.ndarray] = []

    @property
    def frames(self) -> int:
        return len(self._shares)

    def see(self, attention: np.ndarray) -> None:
        """The next frame: fp32 [layers, heads, tokens so far]."""
        self._shares.append(attention.sum(-1))
        self._argmax.append(attention.argmax(-1))

    def scores(self, tokens: int) -> np.ndarray:
        """How well each head follows a text of so many tokens: [layers, heads]; 0: it does not."""
        share, path = np.mean(self._shares, 0), np.stack(self._argmax)
        forward = np.mean(np.diff(path, axis=0) >= 0, 0)
        scores: np.ndarray = share * forward * ((share >= _SHARE) & (forward >= _FORWARD) & (path.max(0) >= tokens - 2))
        return scores


class HeadFinder:
    """Knows the head that an engine follows. It looks for one in the first utterances, if the checkpoint names none.
    The engine's thread owns it; others may read `head`."""

    def __init__(self, told: bool, known: TextHead | None):
        """`told`: does the frame decoder tell its `attention`? `known`: the checkpoint's."""
        self.head = known if told else None
        self._tries = _TRIES if told and not known else 0  # that are left
        self._frames = 0  # of utterances that ended well
        self._scores: np.ndarray | float = 1.0  # the lowest of them

    def path(self, text_at: int) -> TextPath | HeadTrial | None:
        """What shall see the attention of an utterance that begins."""
        if self.head:
            return TextPath(text_at, self.head)
        self._tries -= 1
        return HeadTrial(text_at) if self._tries >= 0 else None

    def judge(self, trial: HeadTrial, tokens: int) -> None:
        """The model has said end of speech."""
        if self._frames >= _FRAMES or trial.frames < 2 or tokens < _SHORTEST:
            return
        self._frames += trial.frames
        self._scores = np.minimum(self._scores, trial.scores(tokens))
        if self._frames >= _FRAMES:
            self._tries = 0
            layer, head = map(int, np.unravel_index(np.argmax(self._scores), np.shape(self._scores)))
            if np.max(self._scores) > 0:
                self.head = TextHead(layer, head, OFFSET_S)
            log.info("the head whose attention follows the text: %s", self.head or "none, so word times are estimates")
