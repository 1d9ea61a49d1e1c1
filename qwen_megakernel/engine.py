"""TTSEngine: text in, PCM out. One thread owns the model, the vocoder and every slot.

    submit -> [slot] -> prompt -> prefill -> (frame -> ... -> vocoder -> chunk)* -> result

`generate` and `stream` are `submit` seen from the caller's side. Callers never touch tensors of the owner
thread: commands go in through a queue, chunks come out through the utterance.
"""

import atexit
import logging
import numbers
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.build import why_no_gpu, why_untried
from qwen_megakernel.checkpoint import DEMO, DEMO_NOTICE, Checkpoint
from qwen_megakernel.config import ModelConfig, SamplingParams
from qwen_megakernel.errors import BackendError, EngineBusyError, EngineClosedError, KernelFault, RequestError
from qwen_megakernel.frame_decoder import FrameDecoder, TorchFrameDecoder
from qwen_megakernel.megakernel import MegakernelFrameDecoder, why_no_megakernel
from qwen_megakernel.prompt import Prompt, PromptBuilder, PromptPieces
from qwen_megakernel.text import TextTokenizer, check_unicode
from qwen_megakernel.transformer import Embeddings
from qwen_megakernel.vocoder import Vocoder
from qwen_megakernel.voice import RefAudio, Voice, VoiceEncoder

log = logging.getLogger(__name__)

BACKENDS = ("auto", "megakernel", "torch")
VOCODER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHUNK_SCHEDULE = (1, 2, 4, 8)
"""Frames per chunk: the first sound after one frame, then larger portions; the last size repeats."""

_LOOP_PERIODS, _LOOP_FRAMES = range(1, 5), 12
_CONTEXT_FRAMES = 25  # of a reference that the vocoder hears in one turn, so that others get theirs


def select_backend(
    backend: str, device: torch.device, dtype: torch.dtype | None = None, config: ModelConfig | None = None
) -> tuple[str, str]:
    """(backend to use, reason) for a backend name; "auto" takes the megakernel where it can run and has been run.

    Raises:
        BackendError: an unknown name, or a megakernel that cannot run like this.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return "torch", "asked for"
    obstacle = why_no_megakernel(device, dtype, config)
    if obstacle is None and backend == "auto":
        obstacle = why_untried(device)
    if obstacle is None:
        return "megakernel", "asked for" if backend == "megakernel" else "this GPU and checkpoint can run it"
    if backend == "megakernel":
        raise BackendError(f"the megakernel cannot run here: {obstacle}; use backend='torch'")
    return "torch", f"no megakernel: {obstacle}"


@dataclass(frozen=True, eq=False)
class Chunk:
    """PCM handed out at once.

    Attributes:
        samples: fp32 [frames * 1920], -1..1.
        codes: int64 [frames, 16].
        sample_rate: in Hz.
    """

    samples: np.ndarray
    codes: np.ndarray
    sample_rate: int


@dataclass(frozen=True, eq=False)
class Audio:
    """A whole utterance.

    Attributes:
        samples: fp32 [n], -1..1; equals the joined chunks.
        codes: int64 [frames, 16].
        finish_reason: "eos" (the model ended), "length" (frame limit), "runaway" (the model fell into a
            loop) or "cancelled".
        seed: that was used; the same request with it gives the same codes.
        sample_rate: in Hz.
        ttfc_s: seconds from the text's arrival to the first chunk; None if there was no chunk.
        compute_s: seconds from the text's arrival to the last chunk.
    """

    samples: np.ndarray
    codes: np.ndarray
    finish_reason: str
    seed: int
    sample_rate: int
    ttfc_s: float | None
    compute_s: float

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate

    @property
    def rtf(self) -> float:
        """Compute time / audio time; lower is better."""
        return self.compute_s / self.duration_s if len(self.samples) else float("inf")


@dataclass
class _Request:
    """What was asked for, checked as far as it can be without the text."""

    speaker: str | None
    language: str | None
    instruct: str | None
    voice: Voice | None
    non_streaming_mode: bool
    sampling: SamplingParams
    max_frames: int | None
    runaway_guard: bool
    chunk_frames: tuple[int, ...]


class Utterance:
    """One request on its way through an engine; made by `TTSEngine.submit`. Thread-safe."""

    def __init__(self, engine: "TTSEngine", request: _Request, on_chunk: Callable[[Chunk], None] | None):
        self._engine, self._request, self._on_chunk = engine, request, on_chunk
        self._pieces: PromptPieces | None = None  # where the text does not come whole
        self._active: _Active | None = None  # of such a text, once its first frame can be made
        self._text_open = True
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._done = threading.Event()
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._audio: Audio | None = None
        self._error: BaseException | None = None
        self.seed = request.sampling.seed

    def push_text(self, text: str) -> None:
        """Append a piece of the text, cut anywhere. Speech starts as soon as a first word is whole, and waits, silent,
        where the text has run out and was not ended.

        Raises:
            RequestError: the text was ended or the utterance cancelled, or `text` is not a string of valid Unicode.
            TextTooLongError: the text no longer fits a slot; the utterance has then failed.
        """
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, got {type(text).__name__}")
        check_unicode(text)
        with self._lock:
            self._refuse_closed_text("push_text")
            self._engine._advance(self, lambda pieces: pieces.push(text))

    def flush(self) -> None:
        """That is all for now: also speak what `push_text` holds back because the next character could change it.

        Raises:
            RequestError: the text was ended or the utterance cancelled.
        """
        with self._lock:
            self._refuse_closed_text("flush")
            self._engine._advance(self, lambda pieces: pieces.flush())

    def end_text(self) -> None:
        """The text is complete; calling it again changes nothing.

        Raises:
            RequestError: the whole text cannot be spoken (blank, too long); the utterance has then failed.
        """
        with self._lock:
            if self._text_open:
                self._text_open = False
                self._engine._advance(self, lambda pieces: pieces.end())

    def _refuse_closed_text(self, call: str) -> None:
        if not self._text_open:
            why = "the utterance was cancelled" if self._cancelled.is_set() else "its text is complete"
            raise RequestError(f"{call} after the end: {why}")

    def cancel(self) -> None:
        """Stop before the next frame; what was made so far stays. Safe at any time, from any thread."""
        self._cancelled.set()
        with self._lock:
            never_began = self._text_open and self._active is None
            self._text_open = False
        if never_began:
            self._engine._finish(self, audio=self._engine._assemble(_Active(self), "cancelled"))
        self._engine._inbox.put(_NEWS)  # it may be waiting for text

    def result(self, timeout: float | None = None) -> Audio:
        """Wait for the whole utterance.

        Raises:
            RequestError: called from a callback, which would wait for its own thread.
            TimeoutError: not done within `timeout` seconds; the utterance goes on.
            TTSError: why it failed.
        """
        self._engine._refuse_owner(self)
        if not self._done.wait(timeout):
            raise TimeoutError(f"the utterance was not done within {timeout} s")
        if self._error:
            raise self._error
        return self._audio

    @property
    def done(self) -> bool:
        return self._done.is_set()


class ChunkStream:
    """Iterator over an utterance's chunks. Dropping it, or `close`, cancels the utterance.

    Attributes:
        utterance: for `result()` behind the last chunk.
    """

    def __init__(self, utterance: Utterance):
        self.utterance = utterance
        self._ended = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        self.utterance._engine._refuse_owner(self.utterance)
        chunk = self.utterance._chunks.get()
        if chunk is not None:
            return chunk
        self._ended = True
        self.utterance.result()  # raises what went wrong, if anything did
        raise StopIteration

    def close(self) -> None:
        self._ended = True
        self.utterance.cancel()

    __del__ = close


@dataclass
class _Active:
    """An utterance that the owner thread works on."""

    utterance: Utterance
    prompt: Prompt | None = None
    text_rows: int = 0  # trailing ones that the decoder has
    text_open: bool = False
    incoming: "queue.SimpleQueue[tuple[Tensor, bool]]" = field(
        default_factory=queue.SimpleQueue
    )  # rows; text is complete
    max_frames: int = 0
    slot: int = -1
    context: list[Tensor] | None = None  # reference codes the vocoder has yet to hear; None before prefill
    arrived: float = field(default_factory=time.monotonic)
    first_chunk: float | None = None
    codes: list[Tensor] = field(default_factory=list)  # int64 [groups] each
    spoken: int = 0  # frames that went through the vocoder
    samples: list[np.ndarray] = field(default_factory=list)

    @property
    def starved(self) -> bool:
        """Its next frame needs a text row that has not come: nothing is spoken in its place."""
        prefilled = self.context is not None and not self.context
        return prefilled and self.text_open and len(self.codes) >= self.text_rows

    @property
    def idle(self) -> bool:
        return self.starved and self.incoming.empty() and not self.utterance._cancelled.is_set()


_NEWS = object()
"""In the owner's inbox: look again at those that wait for text."""


class TTSEngine:
    """Speaks with one checkpoint. Make it with `TTSEngine.load`; a context manager; thread-safe.

    Attributes:
        speakers: what `speaker` may be (CustomVoice), in the checkpoint's order.
        languages: what `language` may be, "auto" first.
        sample_rate: of everything it returns, in Hz.
        backend: "torch" or "megakernel".
    """

    def __init__(
        self, checkpoint: Checkpoint, prompts: PromptBuilder, decoder: FrameDecoder, vocoder: Vocoder, backend: str
    ):
        self._checkpoint, self._prompts, self._decoder, self._vocoder = checkpoint, prompts, decoder, vocoder
        self.backend = backend
        self.speakers, self.languages = prompts.speakers, prompts.languages
        self.sample_rate = checkpoint.config.codec.sample_rate
        self._voice_encoder: VoiceEncoder | None = None
        self._voice_lock = threading.Lock()
        self._lock = threading.Lock()
        # Weak: an utterance whose text never ended and that nobody holds any more gives its slot back.
        self._open: weakref.WeakSet[Utterance] = weakref.WeakSet()
        self._closed = False
        self._fault: BaseException | None = None
        self._counts = {"utterances": 0, "frames": 0, "failed": 0, "cancelled": 0, "busy": 0}
        self._inbox: queue.SimpleQueue[_Active | None] = queue.SimpleQueue()
        # Idle, the owner thread holds the engine weakly, so that an engine that is dropped without close() ends too.
        name = "qwen_megakernel owner"
        self._thread = threading.Thread(target=_own, args=(weakref.ref(self), self._inbox), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._inbox.put, None).atexit = False
        _ENGINES.add(self)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        backend: str = "auto",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        max_streams: int = 8,
        max_positions: int = 2048,
        vocoder_dtype: str = "float32",
    ) -> "TTSEngine":
        """Load a checkpoint and start the owner thread.

        Args:
            model: a folder, a hub id (downloaded), or "demo" (bundled, a tiny English voice).
            backend: "torch", "megakernel" (published dims, bfloat16, a GPU of build.py's TARGETS) or "auto", which
                takes the megakernel on Hopper, where it has been run; a log line says what was taken and why.
            device: None takes a CUDA GPU if there is one, else the CPU.
            dtype: of talker and code predictor; None is bfloat16 on a GPU and float32 on a CPU.
            max_streams: utterances at once.
            max_positions: rows of one slot: the prompt's and one per frame.
            vocoder_dtype: "float32" or "bfloat16".

        Raises:
            CheckpointError: see `Checkpoint.open`.
            BackendError: backend, device or dtype cannot be had here.
        """
        device = select_device(device)
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        if dtype not in (torch.float32, torch.bfloat16):
            raise BackendError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
        if vocoder_dtype not in VOCODER_DTYPES:
            raise BackendError(f"vocoder_dtype must be one of {', '.join(VOCODER_DTYPES)}, got {vocoder_dtype!r}")
        if max_streams < 1 or max_positions < 16:
            raise BackendError(
                f"max_streams must be at least 1 and max_positions at least 16, got {max_streams}, {max_positions}"
            )
        select_backend(backend, device, dtype)  # what cannot run is refused before a checkpoint is looked for
        checkpoint = Checkpoint.open(model)
        config = checkpoint.config
        name, reason = select_backend(backend, device, dtype, config)
        log.info("backend %s on %s, %s (%s)", name, device, str(dtype).removeprefix("torch."), reason)
        if str(model) == DEMO:
            log.info("the demo voice is %s", DEMO_NOTICE)
        tokenizer = TextTokenizer(checkpoint.folder, config.talker.text_vocab_size)
        with torch.inference_mode():
            tensors = checkpoint.talker(device, dtype)
            embeddings = Embeddings(config.talker, tensors)
            prompts = PromptBuilder(config, tokenizer, embeddings)
            slots = {"slots": max_streams, "max_positions": max_positions}
            if name == "torch":
                decoder = TorchFrameDecoder(config, tensors, embeddings, **slots)
            else:
                decoder = MegakernelFrameDecoder(config, tensors, **slots)
            vocoder = Vocoder(
                config.codec.vocoder,
                checkpoint.vocoder(device, torch.float32),
                slots=max_streams,
                dtype=VOCODER_DTYPES[vocoder_dtype],
            )
        return cls(checkpoint, prompts, decoder, vocoder, name)

    # ------------------------------------------------------------ what callers use

    def generate(self, text: str, **request) -> Audio:
        """Speak `text` and return the whole utterance. Takes what `submit` takes; the joined chunks of
        `stream` are the same samples."""
        utterance = self.submit(_whole(text), **request)
        try:
            return utterance.result()
        finally:
            utterance.cancel()  # changes nothing once it has ended; an interrupted wait leaves nothing running

    def stream(self, text: str, **request) -> ChunkStream:
        """Speak `text` and iterate over its chunks as they are made. Takes what `submit` takes."""
        return ChunkStream(self.submit(_whole(text), **request))

    def submit(
        self,
        text: str | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        chunk_frames: int | Sequence[int] | None = None,
        *,
        speaker: str | None = None,
        language: str | None = None,
        instruct: str | None = None,
        voice: Voice | None = None,
        non_streaming_mode: bool | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        max_frames: int | None = None,
        runaway_guard: bool = True,
    ) -> Utterance:
        """Queue an utterance and return at once.

        Args:
            text: what to say; None: it comes through `Utterance.push_text` and `end_text`.
            on_chunk: called from the owner thread with every chunk; should return quickly. If it raises, its
                utterance fails with that error and no other is touched.
            chunk_frames: frames per chunk, one number or a schedule whose last number repeats; None is
                1, 2, 4, 8, 8, ...
            speaker: CustomVoice: a name of `speakers`; None takes the first, "" none at all.
            language: a name of `languages`; None is "auto".
            instruct: how to say it. A checkpoint that ignores it (0.6B CustomVoice, Base) logs a warning.
            voice: Base: whose voice, from `create_voice` or `Voice.load`.
            non_streaming_mode: True puts the whole text before the first frame, False feeds it beside the
                frames. None is the reference's default: True, but False with a voice or with pushed text.
            sampling: None fields come from the checkpoint's generation_config.json.
            max_frames: at most this many frames; None is what the checkpoint allows and the slot holds.
            runaway_guard: end with "runaway" once the text is used up and the last 12 frames (one second)
                repeat those before them exactly, with a period of 1 to 4 frames.

        Raises:
            RequestError: anything about the request that cannot be served; nothing running is harmed.
            TextTooLongError: the text needs more rows than a slot has; the message says how many.
            EngineBusyError: all slots are taken.
            EngineClosedError: the engine was closed.
        """
        whole = text is not None
        if whole and not isinstance(text, str):
            raise RequestError(f"text must be a string, got {type(text).__name__}")
        if non_streaming_mode and not whole:
            raise RequestError("text in pieces needs the streaming layout: leave non_streaming_mode out with text=None")
        if on_chunk is not None and not callable(on_chunk):
            raise RequestError(f"on_chunk must be callable, got {type(on_chunk).__name__}")
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling must be a SamplingParams, got {type(sampling).__name__}")
        config = self._checkpoint.config
        request = _Request(
            speaker=self._check_speaker(speaker),
            language=self._prompts.known_language(language),
            instruct=self._check_instruct(instruct),
            voice=self._check_voice(voice),
            non_streaming_mode=whole and voice is None if non_streaming_mode is None else bool(non_streaming_mode),
            sampling=_with_seed(sampling.over(config.sampling)),
            max_frames=_check_count(max_frames, "max_frames"),
            runaway_guard=runaway_guard,
            chunk_frames=_check_schedule(chunk_frames),
        )
        utterance = Utterance(self, request, on_chunk)
        active = None
        if whole:
            active = self._prepare(utterance, text)
            utterance._text_open = False
        else:
            utterance._pieces = self._begin(request)
        with self._lock:
            self._check_open()
            if len(self._open) >= self._decoder.slots:
                self._counts["busy"] += 1
                raise EngineBusyError(f"all {self._decoder.slots} streams are taken; raise max_streams or try later")
            self._open.add(utterance)
            self._counts["utterances"] += 1
        if active:
            self._inbox.put(active)
        return utterance

    def create_voice(self, ref_audio: RefAudio, ref_text: str | None = None) -> Voice:
        """Make a voice from reference audio; needs a Base checkpoint. Runs in the caller's thread.

        Args:
            ref_audio: path, or (samples [n] or [n, channels], rate in Hz); 0.5 to 60 seconds.
            ref_text: what the audio says. With it the reference itself leads the prompt (in-context cloning:
                closer, but longer prompts); without it the speaker vector alone is used.

        Raises:
            AudioError: the audio cannot be used; says why.
            RequestError: not a Base checkpoint, or a blank ref_text.
        """
        with self._lock:
            self._check_open()
        with self._voice_lock:
            if self._voice_encoder is None:
                self._voice_encoder = VoiceEncoder(self._checkpoint)
            return self._voice_encoder.encode(ref_audio, ref_text)

    def health(self) -> dict:
        """`status` ("ok", "closed" or "dead", then with `error`), backend, active and maximum streams."""
        with self._lock:
            status = "dead" if self._fault else "closed" if self._closed else "ok"
            health = {
                "status": status,
                "backend": self.backend,
                "streams": len(self._open),
                "max_streams": self._decoder.slots,
            }
            return health | ({"error": repr(self._fault)} if self._fault else {})

    def metrics(self) -> dict[str, int]:
        """Counters since load: utterances, frames, failed, cancelled, busy."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Cancel what runs, stop the owner thread, wait for it. Safe to call twice."""
        with self._lock:
            self._closed = True
            open_utterances = list(self._open)
        for utterance in open_utterances:
            utterance.cancel()
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "TTSEngine":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # ------------------------------------------------------------ the border

    def _refuse_owner(self, utterance: Utterance) -> None:
        if threading.current_thread() is self._thread and not utterance.done:
            raise RequestError("a callback cannot wait for an utterance: it would wait for its own thread")

    def _check_open(self) -> None:
        if self._fault:
            raise EngineClosedError(f"the engine's owner thread died: {self._fault!r}; load a new engine")
        if self._closed:
            raise EngineClosedError("the engine is closed; load a new one")

    def _check_speaker(self, speaker: str | None) -> str | None:
        if self._checkpoint.config.variant != "custom_voice":
            if speaker:
                raise RequestError(
                    f"this checkpoint ({self._checkpoint.config.variant}) has no named speakers, got {speaker!r}"
                )
            return None
        if speaker is None and self.speakers:
            return self.speakers[0]
        return self._prompts.known_speaker(speaker) if speaker else None

    def _check_instruct(self, instruct: str | None) -> str | None:
        if instruct is not None and not isinstance(instruct, str):
            raise RequestError(f"instruct must be a string, got {type(instruct).__name__}")
        if instruct and not self._checkpoint.config.honours_instruct:
            config = self._checkpoint.config
            log.warning("instruct is ignored: this checkpoint (%s, %s) does not take it", config.variant, config.size)
            return None
        return instruct

    def _check_voice(self, voice: Voice | None) -> Voice | None:
        config = self._checkpoint.config
        if voice is None:
            if config.variant == "base":
                raise RequestError(
                    "a Base checkpoint speaks with a voice: pass voice=engine.create_voice(ref_audio), "
                    "on the command line --ref-audio"
                )
            return None
        if config.variant != "base":
            raise RequestError(f"voice= needs a Base checkpoint; this one is {config.variant}")
        if not isinstance(voice, Voice):
            raise RequestError(f"voice must be a Voice (create_voice or Voice.load), got {type(voice).__name__}")
        if voice.fingerprint != self._checkpoint.fingerprint:
            raise RequestError(
                f"this voice was made by another checkpoint ({voice.fingerprint or 'unknown'}, "
                f"this one is {self._checkpoint.fingerprint}); make it again from its reference audio"
            )
        _check_voice_tensors(voice, config)
        return voice

    @torch.inference_mode()
    def _prepare(self, utterance: Utterance, text: str) -> _Active:
        """Build the prompt, in the caller's thread: a text that cannot be spoken fails there."""
        r = utterance._request
        voice = {"language": r.language, "speaker": r.speaker, "instruct": r.instruct, "voice": r.voice}
        whole = {"non_streaming_mode": r.non_streaming_mode, "max_positions": self._decoder.max_positions}
        return self._activate(utterance, self._prompts.build(text, **voice, **whole))

    @torch.inference_mode()
    def _begin(self, r: _Request) -> PromptPieces:
        return self._prompts.begin(
            language=r.language,
            speaker=r.speaker,
            instruct=r.instruct,
            voice=r.voice,
            max_positions=self._decoder.max_positions,
        )

    def _activate(self, utterance: Utterance, prompt: Prompt, text_open: bool = False) -> _Active:
        asked = utterance._request.max_frames
        limit = self._checkpoint.config.max_frames if asked is None else asked
        return _Active(
            utterance,
            prompt=prompt,
            text_rows=len(prompt.trailing),
            text_open=text_open,
            max_frames=min(limit, self._decoder.max_positions - len(prompt.rows) + 1),
        )

    @torch.inference_mode()
    def _advance(self, utterance: Utterance, step: Callable[[PromptPieces], Tensor]) -> None:
        """A piece of text, in the caller's thread and under the utterance's lock: hand on the rows that it settles."""
        pieces = utterance._pieces
        try:
            rows = step(pieces)
            if utterance._active is None and pieces.prompt is not None:
                utterance._active = self._activate(utterance, pieces.prompt, text_open=not pieces.ended)
                self._inbox.put(utterance._active)
            elif utterance._active is not None and (len(rows) or pieces.ended):
                utterance._active.incoming.put((rows, pieces.ended))
                self._inbox.put(_NEWS)
        except BaseException as error:  # also an interrupt: nobody else would free the slot
            utterance._text_open = False
            utterance._cancelled.set()
            self._finish(utterance, error=error)
            self._inbox.put(_NEWS)
            raise

    def _finish(self, utterance: Utterance, audio: Audio | None = None, error: BaseException | None = None) -> None:
        """Settle an utterance once: whoever waits on it wakes up."""
        with self._lock:
            if utterance not in self._open:
                return
            self._open.discard(utterance)
            self._counts["failed"] += error is not None
            self._counts["cancelled"] += audio is not None and audio.finish_reason == "cancelled"
        utterance._audio, utterance._error = audio, error
        utterance._chunks.put(None)
        utterance._done.set()

    def _assemble(self, active: _Active, reason: str) -> Audio:
        groups = self._checkpoint.config.talker.num_code_groups
        codes = torch.stack(active.codes[: active.spoken]).numpy() if active.spoken else np.zeros((0, groups), np.int64)
        return Audio(
            samples=np.concatenate(active.samples) if active.samples else np.zeros(0, np.float32),
            codes=codes,
            finish_reason=reason,
            seed=active.utterance.seed,
            sample_rate=self.sample_rate,
            ttfc_s=active.first_chunk and active.first_chunk - active.arrived,
            compute_s=time.monotonic() - active.arrived,
        )

    # ------------------------------------------------------------ the owner thread

    def _abandon(self) -> None:
        """The owner thread has ended: whoever still waits is told why."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        why = f"the engine's owner thread died: {self._fault!r}" if self._fault else "the engine was closed"
        for utterance in left:
            self._finish(utterance, error=EngineClosedError(f"{why} before this utterance ended"))

    def _round(self, running: list[_Active]) -> list[_Active]:
        """One frame of every utterance, as many in a launch as the backend computes together; those that have ended."""
        ended = [active for active in running if self._settle(active, lambda a=active: self._before_frame(a))]
        ready = [active for active in running if active not in ended and not active.context and not active.starved]
        for first in range(0, len(ready), self._decoder.width):
            together = ready[first : first + self._decoder.width]
            try:
                self._decoder.launch([active.slot for active in together])
                frames = self._decoder.collect()
            except KernelFault as error:  # every slot's state is suspect
                log.exception("the kernel gave up; all %d running utterances end, the engine goes on", len(running))
                self._decoder.recover()
                for active in running:
                    self._finish(active.utterance, error=error)
                return running
            except Exception as error:
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # a device that is lost raises here as well, and ends the engine
                log.exception("a frame failed")
                for active in together:
                    self._finish(active.utterance, error=error)
                ended += together
                continue
            for active, codes in zip(together, frames, strict=True):
                if self._settle(active, lambda a=active, c=codes: self._after_frame(a, c)):
                    ended.append(active)
        return ended

    def _settle(self, active: _Active, step: Callable[[], str | None]) -> bool:
        """One step of an utterance; True when it has ended. What it raises, sys.exit() from a callback too, ends it
        alone."""
        try:
            reason = step()
            if reason is None:
                return False
            self._finish(active.utterance, audio=self._assemble(active, reason))
        except BaseException as error:
            log.exception("an utterance failed")
            self._finish(active.utterance, error=error)
        return True

    def _before_frame(self, active: _Active) -> str | None:
        """What comes before a frame: prefill first, then the reference as context for the vocoder."""
        if active.utterance._cancelled.is_set():
            return "cancelled"
        request = active.utterance._request
        if active.context is None:
            self._vocoder.reset(active.slot)
            self._decoder.start(active.slot, active.prompt, request.sampling)
            codes = None if request.voice is None else request.voice.ref_codes
            active.context = [] if codes is None else list(codes.split(_CONTEXT_FRAMES))
        elif active.context:  # its own audio is dropped, exactly as many frames
            self._vocoder.push([active.slot], active.context.pop(0)[None])
        while not active.incoming.empty():
            rows, complete = active.incoming.get()
            self._decoder.extend(active.slot, rows)
            active.text_rows += len(rows)
            active.text_open = not complete
        return None

    def _after_frame(self, active: _Active, codes: torch.Tensor | None) -> str | None:
        """One more frame, or the end of speech; hand out a chunk when one is due."""
        reason = None
        if codes is None:
            reason = "eos"
        else:
            active.codes.append(codes)
            self._counts["frames"] += 1
            if len(active.codes) == active.max_frames:
                reason = "length"
            elif active.utterance._request.runaway_guard and _is_loop(active):
                reason = "runaway"
        due = len(active.codes) - active.spoken
        if due and (reason or due >= self._chunk_size(active)):
            self._speak(active)
        return reason

    def _chunk_size(self, active: _Active) -> int:
        """Frames of the chunk that is being gathered."""
        schedule = active.utterance._request.chunk_frames
        return schedule[min(len(active.samples), len(schedule) - 1)]

    def _speak(self, active: _Active) -> None:
        codes = torch.stack(active.codes[active.spoken :])
        samples = self._vocoder.push([active.slot], codes[None])[0].float().cpu().numpy()
        active.spoken += len(codes)
        active.samples.append(samples.copy())  # what a listener does to its chunk stays there
        if active.first_chunk is None:
            active.first_chunk = time.monotonic()
        chunk = Chunk(samples, codes.numpy(), self.sample_rate)
        active.utterance._chunks.put(chunk)
        if active.utterance._on_chunk:
            active.utterance._on_chunk(chunk)


@torch.inference_mode()
def _own(ref: "weakref.ref[TTSEngine]", inbox: "queue.SimpleQueue[_Active | object | None]") -> None:
    """The owner thread: admits what comes, gives every running utterance a frame a round, ends on None."""
    engine, active, running = ref(), None, []
    free = list(range(engine._decoder.slots))
    try:
        while True:
            while not inbox.empty() or all(waiting.idle for waiting in running):
                if not running:
                    engine = active = None  # idle: hold nothing that would keep engine or utterance alive
                active = inbox.get()
                if active is _NEWS:
                    continue
                engine = ref()
                if active is None or engine is None:  # close() has cancelled every utterance by now
                    engine._round(running)
                    return
                active.slot = free.pop()
                running.append(active)
            for active in engine._round(running):
                running.remove(active)
                free.append(active.slot)
    except BaseException as error:
        log.exception("the engine's owner thread died")
        if engine:
            engine._fault = error
    finally:
        if engine:
            engine._abandon()


_ENGINES: "weakref.WeakSet[TTSEngine]" = weakref.WeakSet()


@atexit.register
def _close_engines() -> None:
    """An owner thread inside torch while the interpreter goes away would abort the process."""
    for engine in list(_ENGINES):
        engine.close()


def _whole(text: str) -> str:
    if text is None:
        raise RequestError("text must be a string; text that comes in pieces needs submit()")
    return text


def _is_loop(active: _Active) -> bool:
    """The text is used up, and the last second repeats itself exactly."""
    codes = active.codes
    if active.text_open or len(codes) < max(_LOOP_FRAMES + _LOOP_PERIODS[-1], active.text_rows):
        return False
    last = torch.stack(codes[-_LOOP_FRAMES - _LOOP_PERIODS[-1] :])
    return any(torch.equal(last[-_LOOP_FRAMES:], last[-_LOOP_FRAMES - p : -p]) for p in _LOOP_PERIODS)


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(63))


def _check_count(value: int | None, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise RequestError(f"{name} must be an integer of at least 1, got {value!r}")
    return int(value)


def _check_schedule(chunk_frames: int | Sequence[int] | None) -> tuple[int, ...]:
    if chunk_frames is None:
        return CHUNK_SCHEDULE
    schedule = tuple(chunk_frames) if isinstance(chunk_frames, (list, tuple)) else (chunk_frames,)
    if not schedule:
        raise RequestError("chunk_frames must name at least one size")
    return tuple(_check_count(n, "chunk_frames") for n in schedule)


def _check_voice_tensors(voice: Voice, config) -> None:
    hidden, groups = config.talker.stack.hidden_size, config.talker.num_code_groups
    ok = tuple(voice.speaker_embedding.shape) == (hidden,)
    if voice.ref_codes is not None:
        ok = ok and voice.ref_codes.ndim == 2 and voice.ref_codes.shape[1] == groups
        ok = ok and 0 <= int(voice.ref_codes.min()) and int(voice.ref_codes.max()) < config.codec.vocoder.codebook_size
    if not ok:
        raise RequestError(f"broken voice: expected a vector of {hidden} and codes [frames, {groups}]")


def select_device(device: str | torch.device | None) -> torch.device:
    """The device to run on; None takes a CUDA GPU if there is one.

    Raises:
        BackendError: no such device here.
    """
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise BackendError(f"device {device!r}: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"device must be 'cpu' or 'cuda[:n]', got {str(device)!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device {device} was asked for, but torch can use no CUDA GPU: {why_no_gpu()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendError(f"device {device} was asked for, but torch sees {torch.cuda.device_count()} CUDA GPUs")
    return device
