"""TTSEngine: text in, PCM out, many voices at once.

    submit -> tokens -> prompt -> [the engine's thread: queue, slot, frames, vocoder] -> chunks -> result

`generate` and `stream` call `submit`.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from qwen_megakernel.backend.select import Backend
from qwen_megakernel.checkpoint.fp8 import name_of
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.audio import Audio, Chunk, joined
from qwen_megakernel.engine.core import EngineCore
from qwen_megakernel.engine.mapping import Mapped, map_requests
from qwen_megakernel.engine.observed import Observed
from qwen_megakernel.engine.options import Limits, Need, memory_of, told_of_memory
from qwen_megakernel.engine.request import RequestChecker, RequestOptions, check_call, whole_text
from qwen_megakernel.engine.retries import say_well
from qwen_megakernel.engine.sequence import Sequence as EngineSequence
from qwen_megakernel.engine.utterance import ChunkStream, Utterance
from qwen_megakernel.engine.warm_up import first_words, sustained
from qwen_megakernel.errors import BackendError, TextTooLongError
from qwen_megakernel.model.prompt import KEPT_VOICES, Prompt, PromptBuilder
from qwen_megakernel.model.prompt_pieces import PromptPieces
from qwen_megakernel.model.text import TextTokenizer
from qwen_megakernel.model.turn_text import Turn
from qwen_megakernel.model.voice import RefAudio, Voice, VoiceEncoder
from qwen_megakernel.text.front_end import Reading
from qwen_megakernel.text.spoken_text import SpokenText, spoken_text, spoken_texts
from qwen_megakernel.trust.selection import Selection


class TTSEngine(Observed):
    """Speaks with one checkpoint. Make it with `TTSEngine.load`; a context manager; thread-safe.

    Attributes:
        model: what it was loaded from: a folder, a hub id, or "demo".
        config: the checkpoint's; variant: its "base", "custom_voice" or "voice_design".
        tokens: text -> its ids, as `Tokens`; raises TextError. Any thread may call it.
        speakers: what `speaker` may be (CustomVoice), in the checkpoint's order.
        languages: names that `language` may have, "auto" first.
        sample_rate: of everything it returns, in Hz.
        max_positions: rows of one slot: the prompt's and one per frame.
        backend: "torch" or "megakernel".
        weights: as `load` takes them; "bf16" if none is FP8, whatever `dtype` is.
        memory: bytes on the device by part; the text's embeddings are on the host.
        threads: CPU threads that PyTorch computes with; None on a GPU.
    """

    def __init__(
        self,
        model: str,
        checkpoint: Checkpoint,
        backend: Backend,
        limits: Limits | None = None,
        *,
        fallback: bool = False,
        allow_foreign_voice: bool = False,
    ):
        """An engine over a checkpoint and a backend of one's own. `load` is the usual way.

        Args:
            model: its name, for messages.
            backend: its `load` and `spare` are called; also its `void`, if not None, once the kernels are given up.
            limits: None: `Limits()`.
            fallback: `backend.spare()` takes over once the kernels are given up (failures.py).
            allow_foreign_voice: as `load` takes it.
        """
        limits, config = limits or Limits(), checkpoint.config
        tokenizer = TextTokenizer(checkpoint.folder, config.talker.text_vocab_size)
        self._limits, self._checkpoint, self.config = limits, checkpoint, config
        self.model, self._backend, self.variant = model, backend.name, config.variant
        self._need = Need.of(config, backend.dtype, backend.fp8, limits)
        with told_of_memory(model, backend.device, self._need, limits):
            loaded = backend.load(limits.max_streams, limits.max_positions)
            self._prompts = PromptBuilder(config, tokenizer, loaded.embeddings, kept_voices=limits.kept_voices)
        self._requests = RequestChecker(checkpoint, self._prompts, allow_foreign_voice=allow_foreign_voice)
        self.speakers, self.languages = self._prompts.speakers, self._prompts.languages
        self.tokens = self._prompts.tokens
        self.sample_rate, self.max_positions = config.codec.sample_rate, limits.max_positions
        self.weights, self.memory = name_of(backend.fp8), memory_of(loaded, config.talker.stack, backend.dtype, limits)
        self._width, self.threads = loaded.decoder.width, loaded.cpu.threads if loaded.cpu else None
        self._voice_encoder = VoiceEncoder(checkpoint)
        spare = backend.spare() if fallback else None
        spare = spare and partial(spare.load, limits.max_streams, limits.max_positions)
        options = {"sample_rate": self.sample_rate, "device": backend.device, "limits": limits, "void": backend.void}
        self._core, self._has_spare = EngineCore(loaded, spare=spare, **options), spare is not None
        self._core.start()
        weakref.finalize(self, self._core.stop).atexit = False  # dropped without close(): the threads end too

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        backend: str = "auto",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        weights: str | Collection[str] | None = None,
        adapters: Collection[str | Path] = (),
        max_streams: int = 8,
        max_positions: int = 2048,
        max_queue: int = 8,
        queue_timeout: float = 5.0,
        kept_voices: int = KEPT_VOICES,
        vocoder_dtype: str | torch.dtype = "float32",
        threads: int | None = None,
        fallback: str | None = None,
        allow_foreign_voice: bool = False,
    ) -> "TTSEngine":
        """Load a checkpoint and start the engine's threads.

        Args:
            model: a folder, a hub id (downloaded), or "demo" (bundled, a tiny English voice).
            backend: "torch", "megakernel" (published dims, bfloat16, a GPU of targets.py's TARGETS) or "auto", which
                takes the megakernel where it is known to be right and faster. An untried card is checked once, for up
                to a minute. A log line says what was taken and why.
            device: None takes a CUDA GPU if there is one, else the CPU.
            dtype: of talker and code predictor: "float32", "bfloat16" or the torch.dtype of that name; None is bfloat16
                on a GPU and float32 on a CPU.
            weights: which weights are E4M3: "bf16" (none), "fp8", "fp8-predictor", or a list of some of fp8.PARTS. They
                are quantised now unless the checkpoint has them so; the rest has `dtype`. None: as the checkpoint has
                them. PyTorch computes with the same weights, dequantised, and saves no memory. More: docs/fp8.md.
            adapters: folders of LoRA adapters in PEFT's format, merged in this order, before anything is quantised.
            max_streams: utterances at once, each in its own slot. Fewer run if the device sustains fewer for live
                listeners, which is measured (`health()["sustained"]`).
            max_positions: rows of one slot: the prompt's and one per frame.
            max_queue: further utterances that may wait for a slot; any more fail at once with `EngineBusy`.
            queue_timeout: seconds that an utterance waits for a slot before it fails with `EngineBusy`.
            kept_voices: how many voices (with language and instruct) are kept, the latest used: keys and values of the
                prompt's opening, and the vocoder's state after the reference. For 0.6B a voice takes about 8 MB; with
                a transcribed reference of 10 s about 30 MB for each text layout.
            fallback: "torch": PyTorch takes over, many times slower, after three faults of our kernels in a row (two on
                a card that was only checked). None: the engine then dies. On such a card backend="auto" implies
                "torch".
            vocoder_dtype: "float32", "tf32" (GPU only), "bfloat16" (slow: not through our kernels), or the
                torch.dtype of such a name.
            threads: CPU threads to compute with. None measures now and takes the fewest that are about as fast as any,
                at most `torch.get_num_threads()`. That number itself stays as it is.
            allow_foreign_voice: an experiment: a Base checkpoint's voice speaks on CustomVoice (docs/voices.md).

        Raises:
            CheckpointError: see `Checkpoint.open`.
            BackendError: backend, device, dtype or sizes cannot be used here.
            OutOfMemoryError: model and slots do not fit; the message names the setting to lower.
        """
        if fallback not in (None, "torch"):
            raise BackendError(f"fallback must be None or 'torch', got {fallback!r}")
        limits = Limits(max_streams, max_positions, max_queue, queue_timeout, kept_voices)
        selection = Selection(backend, device, dtype, weights, vocoder_dtype, threads)
        checkpoint = Checkpoint.open(model, adapters)
        chosen = selection.choose(checkpoint)
        fallback = fallback is not None or (backend == "auto" and chosen.void is not None)
        engine = cls(str(model), checkpoint, chosen, limits, fallback=fallback, allow_foreign_voice=allow_foreign_voice)
        if chosen.device.type == "cuda":
            engine._warm_up(chosen.device)
        return engine

    def _warm_up(self, device: torch.device) -> None:
        """Say a short utterance, so that the first caller does not pay for what is made at first use. Keep no trace."""
        request = {"voice": self.placeholder_voice(), "runaway_guard": False}
        try:
            with told_of_memory(self.model, device, self._need, self._limits), contextlib.suppress(TextTooLongError):
                first_words(self.generate, request, again=self._has_spare)  # too long for the smallest slots
                if self._width > 1:
                    at_once = min(self._core.slots, 3 * self._width)
                    self._core.admission.sustain(sustained(self.submit, request, at_once))
        except BaseException:
            self.close()
            raise
        self._prompts.forget()
        self._core.forget()
        torch.cuda.empty_cache()  # what only loading needed

    def placeholder_voice(self) -> Voice | None:
        """A Base checkpoint's voice for speech that nobody hears, such as a warm-up. Others need none and get None."""
        if self.variant != "base":
            return None
        return Voice.nobody(self.config.talker.stack.hidden_size, self._checkpoint.fingerprint)

    @property
    def backend(self) -> str:
        """ "megakernel" or "torch"."""
        return "torch" if self._core.fell_back else self._backend

    # ------------------------------------------------------------ what callers use

    def generate(self, text: str, *, retries: int = 0, **request: Unpack[RequestOptions]) -> Audio:
        """Speak `text` and return the whole utterance. Takes what `submit` takes; the joined chunks of
        `stream` are the same samples.

        Args:
            retries: 0 to 100, how often at most speech that ends by "runaway" or "length" is said again (retries.py).
        """
        checked = self._requests.check(whole=True, **request)
        texts = spoken_texts(checked.front_end, whole_text(text))
        return joined([say_well(partial(self._say, one), request, retries, self.count_retry) for one in texts])

    def _say(self, text: str, request: RequestOptions) -> Audio:
        utterance = self.submit(text, **request)
        try:
            return utterance.result()
        finally:
            utterance.cancel()  # changes nothing once it has ended; an interrupted wait leaves nothing running

    def stream(self, text: str, **request: Unpack[RequestOptions]) -> ChunkStream:
        """Speak `text` and iterate over its chunks as they are made. Takes what `submit` takes."""
        return ChunkStream(self.submit(whole_text(text), **request))

    def map(
        self,
        requests: Iterable[str | Mapping[str, Any]],
        *,
        ordered: bool = True,
        retries: int = 0,
        **request: Unpack[RequestOptions],
    ) -> Iterator[Mapped]:
        """Speak many texts, as many at once as the engine has slots. It reads at most two requests a slot ahead.
        Closing the iterator cancels open utterances.

        Args:
            requests: texts, or mappings with "text" and what `generate` takes.
            ordered: results come in the order of the requests; otherwise as they are made.
            **request: what `submit` takes, as defaults for the requests. Here `reproducible` is True by default.

        Yields:
            One `Mapped` a request. A request that failed yields its error; the others are spoken.

        Raises:
            EngineClosed: the engine was closed.
        """
        how = {"retries": retries, "count_retry": self.count_retry, "slots": self.slots, "ordered": ordered}
        return map_requests(self.submit, requests, request, **how)

    @torch.inference_mode()
    def submit(
        self,
        text: str | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        chunk_frames: int | Sequence[int] | None = None,
        *,
        on_end: Callable[[], None] | None = None,
        **request: Unpack[RequestOptions],
    ) -> Utterance:
        """Queue an utterance and return at once. The prompt is built here, in the caller's thread. So a text that
        cannot be spoken is refused before it takes a place.

        Args:
            text: what to say; None: it comes through `Utterance.push_text` and `end_text`.
            on_chunk: called with every chunk, from this utterance's own thread: a slow callback delays no other
                utterance. If it raises, or does not return within 30 s, this utterance alone fails with that error.
            on_end: called once, after the last chunk, when `result()` has its answer. If it raises, that is logged.
            chunk_frames: frames per chunk, one number or a schedule whose last number repeats; None is
                1, 2, 4, 8, 8, ...
            speaker: CustomVoice: a name of `speakers`; None takes the first, "" none at all.
            language: a name of `languages` or its code, such as "en" or "en-US"; None is "auto".
            instruct: how to say it. A checkpoint that ignores it (0.6B CustomVoice, Base) logs a warning.
            voice: Base, or with `allow_foreign_voice` CustomVoice: whose voice, from `create_voice` or `Voice.load`.
            non_streaming_mode: True puts the whole text before the first frame, False feeds it beside the
                frames. None is the reference's default: True, but False with a voice or with pushed text.
            sampling: None fields come from the checkpoint's generation_config.json.
            max_frames: at most this many frames; None is what the checkpoint allows and the slot holds.
            runaway_guard: end with "runaway" after three seconds that are near-silent or repeat with a period of 1 to 4
                frames, or when speech is several times too long. It judges once the text is used up (runaway.py).
            speed: 0.25 to 4.0 times as fast as the model speaks, at its pitch (time_stretch.py). At 1.0 samples are
                the model's own.
            trim: "none", "start", "end" or "both": where silence below -50 dBFS is cut to `silence_s` seconds, 0 to 2.
            normalize: "auto" turns digits, Markdown, links and emojis into words, or leaves them out (docs/text.md).
            lexicon: words that are read by another spelling.
            lenient: a language model wrote the text. Tags that cannot be followed are left out with a warning, and so
                are lone surrogates; otherwise they are a TextError.
            pause_s: seconds of silence before the speech, 0 to 10; the speech's own silence there is cut.
            reproducible: samples too, not only codes, depend on nothing but the request, to the bit. With our kernels
                they always do. PyTorch's vocoder then takes this utterance's frames alone, in whole chunks.

        Raises:
            RequestError: the request cannot be served; errors.py has the kinds. Running utterances go on.
            TextTooLongError: the text needs more rows than a slot has; the message says how many, `pieces` cuts it.
            EngineBusy: all slots and all places in the queue are taken.
            EngineClosed: the engine was closed.
        """
        arrived = time.monotonic()
        self._core.admission.check()  # a full engine refuses before any work is done
        check_call(text, on_chunk, on_end)
        with self._core.in_turn(text):
            checked = self._requests.check(whole=text is not None, chunk_frames=chunk_frames, **request)
            text = None if text is None else spoken_text(checked.front_end, text)
            checked = checked.around(text or SpokenText())
            sequence = self._core.new_sequence(checked, on_chunk, on_end)
            # If this thread is interrupted from here on, an utterance with open text is dropped, which frees its place.
            utterance = Utterance(sequence, self._core, self)
            if text is None:
                self._begin_pieces(sequence)
            else:
                self._begin_whole(sequence, text, arrived)
            self._core.start_callbacks(sequence)
            sequence.text_open = text is None
        return utterance

    def _begin_whole(self, sequence: EngineSequence, text: str, arrived: float) -> None:
        sequence.arrived = sequence.stage_began = arrived
        sequence.add_text(text)
        tokens = self._prompts.tokens(text)
        sequence.mark("tokenise")
        request = sequence.request
        with self._core.in_order():
            prompt = self._prompts.build(
                tokens,
                request.conditioning,
                non_streaming_mode=request.non_streaming_mode,
                max_positions=self.max_positions,
            )
        sequence.mark("prompt")
        self._core.admission.admit(sequence)
        self._core.hand_over(sequence, prompt, text_complete=True)

    def _begin_pieces(self, sequence: EngineSequence) -> None:
        with self._core.in_order():
            sequence.pieces = PromptPieces(self._prompts, sequence.request.conditioning, self.max_positions)
        self._core.admission.admit(sequence)

    def check(self, **request: Unpack[RequestOptions]) -> None:
        """Could a text be spoken like this?

        Raises:
            RequestError: as `submit` would.
        """
        self._requests.check(whole=True, **request)

    def turn(self, reading: Reading | None = None, **request: Unpack[RequestOptions]) -> Turn:
        """What cuts a text that comes in pieces into parts that fit a slot. With `max_frames` it cuts at pauses alone.
        Raises RequestError as `submit` would.

        Args:
            reading: of the text that this one continues.
        """
        checked = self._requests.check(whole=True, **request)
        fits = self._prompts.turn_text(checked.conditioning, self.max_positions)
        return Turn(checked.front_end, fits if request.get("max_frames") is None else None, reading)

    @torch.inference_mode()
    def pieces(self, text: str, reading: Reading | None = None, **request: Unpack[RequestOptions]) -> list[SpokenText]:
        """Cut `text` at its pauses, and at sentence ends into pieces that each fit a slot with room for their speech.
        What fits comes back whole, without white space around it. Takes what `submit` takes. `submit` speaks a piece as
        it is, with the silence that belongs to it.

        Args:
            reading: of the text that this one continues, as the next sentence of a turn. None: a text of its own.

        Raises:
            RequestError: as `submit` would. TextTooLongError: instruct and reference leave no room for any text.
                NoWordsError: there is nothing to speak.
        """
        checked = self._requests.check(whole=True, **request)
        how = {"non_streaming_mode": checked.non_streaming_mode, "max_positions": self.max_positions}
        pieces = []
        for one in spoken_texts(checked.front_end, whole_text(text), reading):
            cut = [SpokenText(piece) for piece in self._prompts.pieces(one, checked.conditioning, **how)]
            cut[0].before_s, cut[0].begins_at_pause = one.before_s, one.begins_at_pause
            cut[-1].after_s, cut[-1].ends_at_pause = one.after_s, one.ends_at_pause
            pieces += cut
        return pieces

    @torch.inference_mode()
    def prompt(self, text: str, **request: Unpack[RequestOptions]) -> Prompt:
        """The prompt that `text` would be spoken from, for comparisons; nothing is spoken. Takes what `submit` takes.

        Raises:
            RequestError: as `submit` would.
        """
        checked = self._requests.check(whole=True, **request)
        with self._core.in_order():
            return self._prompts.build(
                text,
                checked.conditioning,
                non_streaming_mode=checked.non_streaming_mode,
                max_positions=self.max_positions,
            )

    def create_voice(
        self, ref_audio: RefAudio | list[RefAudio], ref_text: str | None | list[str | None] = None, *, trim: bool = True
    ) -> Voice:
        """Make a voice from reference audio; needs a Base checkpoint. Runs in the caller's thread.

        Args:
            ref_audio: path, or (samples [n] or [n, channels], rate in Hz); 0.5 to 60 seconds. Or a list of up to 10
                such recordings of one speaker, whose mean is the speaker vector.
            ref_text: what the audio says. With it the reference itself leads the prompt (in-context cloning: closer,
                but longer prompts); without it the speaker vector alone is used. With a list of recordings: what the
                first one says, or a list with the text of one of them, None for the others.
            trim: cut silence from both ends of a recording. The reference implementation does not.

        Raises:
            AudioError: the audio cannot be used; says why.
            VoiceError: not a Base checkpoint, a blank ref_text, or more than one.
        """
        self._core.admission.check_open()
        return self._voice_encoder.encode(ref_audio, ref_text, trim=trim)

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more utterances, wait up to `drain_s` seconds for the open ones, and cancel the rest. Then stop the
        threads and wait for them. Safe to call twice, and from a handler of SIGTERM."""
        if drain_s > 0:
            self._core.drain(drain_s)
        self._core.stop()
        self._core.join()

    def __enter__(self) -> "TTSEngine":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
