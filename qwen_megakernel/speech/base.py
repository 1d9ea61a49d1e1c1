"""SpeechEngine: what sessions and servers need of an engine. It may be in this process or in another one.

Requests, texts and voices need a checkpoint's words and no device, so they are the same in both cases.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, Unpack

import torch

from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.errors import TextError, memory_told
from qwen_megakernel.model.prompt import PromptText
from qwen_megakernel.model.recording import RefAudio
from qwen_megakernel.model.turn_text import Turn
from qwen_megakernel.model.voice import Voice, VoiceEncoder
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.speech.rates import SpeechRates
from qwen_megakernel.speech.request import RequestChecker, SpeechRequest, check_begun
from spoken_text.front_end import Reading
from spoken_text.spoken_text import SpokenText, spoken_texts


class BegunUtterance(Protocol):
    """What `SpeechEngine.begin` returns. `Utterance` says what the methods do."""

    @property
    def done(self) -> bool: ...
    @property
    def tokens(self) -> list[int]: ...
    def push_text(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def end_text(self) -> None: ...
    def cancel(self) -> None: ...
    def result(self) -> Audio: ...


class AnySeat(Protocol):
    """What `SpeechEngine.seat` returns. `Seat` says what it does."""

    def leave(self) -> None: ...


class SpeechEngine(ABC):
    """Speaks with one checkpoint. `TTSEngine` lists the attributes."""

    def __init__(
        self,
        model: str,
        checkpoint: Checkpoint,
        prompts: PromptText,
        *,
        max_positions: int,
        allow_foreign_voice: bool = False,
    ):
        """`prompts`: of the checkpoint."""
        self.model = model
        self.config = checkpoint.config
        self.variant = self.config.variant
        self.speakers = prompts.speakers
        self.languages = prompts.languages
        self.tokens = prompts.tokens
        self.spelt = prompts.tokenizer.spelt
        self.rates = SpeechRates(checkpoint)
        self.sample_rate = self.config.codec.sample_rate
        self.max_positions = max_positions
        self._checkpoint = checkpoint
        self._texts = prompts
        self._requests = RequestChecker(checkpoint, prompts, allow_foreign_voice=allow_foreign_voice)
        self._voice_encoder = VoiceEncoder(checkpoint)
        self.made_of: dict[str, Any] = {  # as JSON, for another process
            "model": model,
            "folder": str(checkpoint.folder),
            "adapters": [str(adapter.folder) for adapter in checkpoint.adapters],
            "max_positions": max_positions,
            "allow_foreign_voice": allow_foreign_voice,
        }

    # ------------------------------------------------------------ the engine

    @property
    @abstractmethod
    def measures_words(self) -> bool:
        """Do utterances that begin now tell when their tokens are spoken (`Audio.token_s`)?"""

    @abstractmethod
    def check_open(self) -> None:
        """Raises EngineClosed: it takes no more utterances."""

    @abstractmethod
    def begin(
        self,
        text: str | SpokenText | None,
        request: SpeechRequest,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        seat: AnySeat | None = None,
    ) -> BegunUtterance:
        """As `TTSEngine.submit`, with a request of `request`. Text in pieces is spoken as it is, in the streaming
        layout.

        Args:
            seat: of this engine, for several utterances, one after the other. Only the first one needs a free place.
        """

    @abstractmethod
    def seat(self) -> AnySeat:
        """A seat that has no place yet."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """See `TTSEngine.health`."""

    @abstractmethod
    def metrics(self) -> dict[str, int]:
        """See `TTSEngine.metrics`."""

    @abstractmethod
    def count_retry(self) -> None:
        """For the counters: an utterance is said again."""

    @abstractmethod
    def close(self) -> None:
        """Take no more utterances, and cancel the open ones."""

    # ------------------------------------------------------------ requests, texts, voices

    @memory_told()
    def request(self, **options: Unpack[RequestOptions]) -> SpeechRequest:
        """How to speak, checked and with every default filled in. `begin`, `parts` and sessions take it. Raises
        RequestError: the request cannot be served; errors.py has the kinds."""
        return self._requests.check(options)

    def turn(self, request: SpeechRequest, reading: Reading | None = None) -> Turn:
        """What cuts a text that comes in pieces into parts that fit a slot. With `max_frames` it cuts at pauses alone.

        Args:
            reading: of the text that this one continues.
        """
        check_begun(request, reading)
        fits = self._texts.turn_text(request.conditioning, self.max_positions)
        return Turn(request.front_end, None if request.capped else fits, reading)

    @torch.inference_mode()
    @memory_told()
    def parts(self, text: str | SpokenText, request: SpeechRequest, reading: Reading | None = None) -> list[SpokenText]:
        """As `TTSEngine.pieces`, with a request of `request`.

        Args:
            reading: of the text that this one continues, as the next sentence of a turn. None: a text of its own.
        """
        check_begun(request, reading)
        parts = []
        for one in spoken_texts(request.front_end, whole_text(text), reading):
            cut = self._texts.pieces(
                one.text,
                request.conditioning,
                non_streaming_mode=request.non_streaming_mode,
                max_positions=self.max_positions,
            )
            parts += one.cut(cut)
        return parts

    def placeholder_voice(self) -> Voice | None:
        """A Base checkpoint's voice for speech that nobody hears, such as a warm-up. Others need none and get None."""
        if self.variant != "base":
            return None
        return Voice.nobody(self.config.talker.stack.hidden_size, self._checkpoint.fingerprint)

    @memory_told()
    def create_voice(
        self, ref_audio: RefAudio | list[RefAudio], ref_text: str | None | list[str | None] = None, *, trim: bool = True
    ) -> Voice:
        """Make a voice from reference audio; needs a Base checkpoint. Runs in the caller's thread.

        Args:
            ref_audio: path, or (samples [n] or [n, channels], rate in Hz); 0.5 to 60 seconds. Or a list of up to 10
                such recordings of one speaker, whose mean is the speaker vector.
            ref_text: what the audio says. With it the reference itself leads the prompt (in-context cloning: closer,
                but longer prompts); without it the speaker vector alone is used. With a list of recordings: what the
                first one says, or a list with the text of one of them, None for the others. A blank text is none.
            trim: cut silence from both ends of a recording. The reference implementation does not.

        Raises:
            AudioError: the audio cannot be used; says why.
            VoiceError: not a Base checkpoint, a ref_text that is too long, or more than one.
        """
        self.check_open()
        return self._voice_encoder.encode(ref_audio, ref_text, trim=trim)


def whole_text(text: str | SpokenText | None) -> str | SpokenText:
    """The text of a call that takes no pieces. Raises TextError: it is none."""
    if text is None:
        raise TextError("text must be a string; text that comes in pieces needs submit()")
    if not isinstance(text, str | SpokenText):
        raise TextError(f"text must be a string, got {type(text).__name__}")
    return text
