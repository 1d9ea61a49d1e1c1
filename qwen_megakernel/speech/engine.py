"""TTSEngine: text in, PCM out, many voices at once.

options -> request -> submit -> prompt -> [the engine's thread: queue, slot, frames, vocoder] -> chunks -> result
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack, cast

import torch

from qwen_megakernel.backend.select import Backend
from qwen_megakernel.checkpoint.fp8 import name_of
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.audio import Audio, Chunk, joined
from qwen_megakernel.engine.core import EngineCore
from qwen_megakernel.engine.input import Request
from qwen_megakernel.engine.memory import Need, memory_of, pages_of_slot, shared_pages, told_of_memory
from qwen_megakernel.engine.options import EngineArguments, EngineOptions
from qwen_megakernel.engine.seat import Seat
from qwen_megakernel.engine.sequence import SpeechSequence
from qwen_megakernel.engine.snapshot import Snapshot, snapshot_of
from qwen_megakernel.engine.utterance import ChunkStream, Utterance
from qwen_megakernel.engine.warm_up import first_words, sustained
from qwen_megakernel.errors import BackendError, RequestError, TextError, TextTooLongError, memory_told
from qwen_megakernel.model.prompt import Prompt, PromptBuilder, Tokens
from qwen_megakernel.model.prompt_pieces import PromptPieces
from qwen_megakernel.model.text import TextTokenizer
from qwen_megakernel.speech.base import AnySeat, SpeechEngine, whole_text
from qwen_megakernel.speech.mapping import Mapped, map_requests
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.speech.request import SpeechRequest, check_begun
from qwen_megakernel.speech.retries import say_well
from qwen_megakernel.trust import text_heads
from qwen_megakernel.trust.selection import resolve
from spoken_text.spoken_text import SpokenText, spoken_text, spoken_texts


class TTSEngine(SpeechEngine):
    """Speaks with one checkpoint. Make it with `TTSEngine.load`; a context manager; thread-safe.

    Attributes:
        model: what it was loaded from: a folder, a hub id, or "demo".
        config: the checkpoint's; variant: its "base", "custom_voice" or "voice_design".
        tokens: text -> its ids, as `Tokens`; raises TextError. spelt: ids -> the text of each. Thread-safe.
        speakers: what `speaker` may be (CustomVoice), in the checkpoint's order.
        languages: names that `language` may have, "auto" first.
        rates: the paces of its voices, for word times.
        sample_rate: of everything it returns, in Hz.
        max_positions: rows of one slot: the prompt's and one per frame.
        backend: "torch" or "megakernel".
        weights: as `load` takes them; "bf16" if none is FP8, whatever `dtype` is.
        memory: bytes on the device by part; the text's embeddings are on the host.
        threads: CPU threads that PyTorch computes with; None on a GPU.
    """

    def __init__(self, model: str, checkpoint: Checkpoint, backend: Backend, options: EngineOptions | None = None):
        """An engine over a checkpoint and a backend of one's own. `load` is the usual way.

        Args:
            model: its name, for messages.
            backend: its `load` and `spare` are called; also its `void`, if not None, once the kernels are given up.
            options: None: `EngineOptions()`. With `fallback`, `backend.spare()` takes over once the kernels are given
                up (failures.py).
        """
        options, config = options or EngineOptions(), checkpoint.config
        tokenizer = TextTokenizer(checkpoint.folder, config.talker.text_vocab_size)
        self._backend = backend.name
        pages = shared_pages(options, config.talker.stack, backend)
        need = Need.of(config, backend.dtype, backend.fp8, options)
        self._told_of_memory = partial(told_of_memory, model, backend.device, need, options)
        with self._told_of_memory():
            loaded = backend.load(options.max_streams, options.max_positions, pages)
            spare = backend.spare() if options.fallback else None
            self._prompts = PromptBuilder(config, tokenizer, loaded.embeddings, kept_voices=options.kept_voices)
        super().__init__(
            model,
            checkpoint,
            self._prompts,
            max_positions=options.max_positions,
            allow_foreign_voice=options.allow_foreign_voice,
        )
        self.weights = name_of(backend.fp8)
        self.memory = memory_of(loaded, config.talker.stack, backend.dtype, options)
        self.threads = loaded.cpu.threads if loaded.cpu else None
        self._at_once = max(3 * loaded.decoder.narrow, loaded.decoder.width) if loaded.decoder.width > 1 else 0
        self._has_spare = spare is not None
        # PyTorch's slots share no memory, so the spare has fewer.
        full_slots = options.max_streams if pages is None else pages // pages_of_slot(options)
        self._core = EngineCore(
            loaded,
            sample_rate=self.sample_rate,
            device=backend.device,
            limits=options,
            spare=partial(spare.load, full_slots, options.max_positions) if spare else None,
            void=backend.void,
            finder=text_heads.finder_of(model, checkpoint),
        )
        self._core.start()
        weakref.finalize(self, self._core.stop).atexit = False  # dropped without close(): the threads end too

    @classmethod
    @memory_told()
    def load(cls, model: str | Path, options: EngineOptions | None = None, **changes: Unpack[EngineArguments]) -> Self:
        """Load a checkpoint and start the engine's threads.

        Args:
            model: a folder, a hub id (downloaded), or "demo" (bundled, a tiny English voice).
            options: None: `EngineOptions()`.
            **changes: fields of `EngineOptions`, such as `max_streams=32`; they replace those of `options`.

        Raises:
            CheckpointError: see `Checkpoint.open`.
            BackendError: backend, device, dtype or sizes cannot be used here.
            OutOfMemoryError: model and slots do not fit; the message names the setting to lower.
            TypeError: there is no such option.
        """
        if not isinstance(options, EngineOptions | None):
            raise BackendError(f"options must be EngineOptions, got {type(options).__name__}")
        options = replace(options or EngineOptions(), **changes)
        plan = resolve(model, options)
        if options.backend == "auto" and plan.void is not None:
            options = replace(options, fallback="torch")
        engine = cls(str(model), plan.checkpoint, plan, options)
        if plan.device.type == "cuda":
            engine._warm_up()
        return engine

    def _warm_up(self) -> None:
        """Say a short utterance, so that the first caller does not pay for what is made at first use. Keep no trace."""
        request: dict[str, Any] = {"voice": self.placeholder_voice(), "runaway_guard": False}
        self._core.finder.looks = False  # most of what is said here is cut, so it tells of no head
        try:
            with self._told_of_memory(), contextlib.suppress(TextTooLongError):
                first_words(self.generate, request, again=self._has_spare)  # too long for the smallest slots
                if at_once := min(self._core.slots, self._at_once):
                    self._core.admission.sustain(sustained(self.submit, request, at_once))
        except BaseException:
            self.close()
            raise
        self._prompts.forget()
        self._core.forget()
        self._core.finder.looks = True
        torch.cuda.empty_cache()  # what only loading needed

    # ------------------------------------------------------------ what it tells about itself

    @property
    def backend(self) -> str:
        """ "megakernel" or "torch"."""
        return "torch" if self._core.loop.fell_back else self._backend

    @property
    def measures_words(self) -> bool:
        """Do utterances that begin now tell when their tokens are spoken (`Audio.token_s`)?"""
        return self._core.finder.head is not None

    @property
    def slots(self) -> int:
        """How many utterances are spoken at once: `max_streams`, or fewer if the device sustains fewer."""
        return self._core.admission.running_limit

    def health(self) -> dict[str, Any]:
        """The engine's state. `status` is "ok", "draining", "closed" or "dead" (then with `error`). Of `max_streams`,
        `sustained` run at once for live listeners. `streams` utterances are open: of these, `running` have a slot and
        `queued` wait for one. Of `pages` of keys and values (64 positions each; 0: slots share none), those that run
        have `pages_reserved`, and have filled `pages_filled`. `backend` is the attribute."""
        admission, slots = self._core.admission, self._core.loop.slots
        status = (
            "dead" if admission.fault else "closed" if admission.closed else "draining" if admission.draining else "ok"
        )
        health = {
            "status": status,
            "backend": self.backend,
            "streams": len(admission.open),
            "running": len(slots.running),
            "queued": len(slots.waiting),
            "max_streams": self._core.slots,
            "sustained": admission.running_limit,
            "pages": slots.pages,
            "pages_reserved": slots.reserved_pages,
            "pages_filled": slots.filled_pages,
        }
        return health | ({"error": repr(admission.fault)} if admission.fault else {})

    def metrics(self) -> dict[str, int]:
        """Counters since load and warm-up: utterances and frames. Utterances are counted by their end (eos, length,
        runaway, cancelled, failed), runaways by their kind (runaway_repeats, _silence, _standstill, _babble).
        Further: ended with text left out (lost), said again (retries), refused by a full engine (busy), failed in the
        queue (timed_out), kernel_faults."""
        return self._core.admission.counts

    def reset_metrics(self) -> None:
        """Set the counters of `metrics()` to 0, as after a warm-up. No utterance may be open."""
        self._core.admission.forget()

    def snapshot(self) -> Snapshot:
        """What the engine holds at this moment, for tests and for finding leaks."""
        return snapshot_of(self._core, self._prompts.kept_openings)

    def seat(self) -> Seat:
        return self._core.admission.seat()

    def count_retry(self) -> None:
        self._core.admission.tally("retries")

    def check_open(self) -> None:
        self._core.admission.check_open()

    # ------------------------------------------------------------ what callers use

    @memory_told()
    def generate(self, text: str | SpokenText, **options: Unpack[RequestOptions]) -> Audio:
        """Speak `text` and return the whole utterance. Takes what `submit` takes; the joined chunks of
        `stream` are the same samples. With `retries`, what ends by "runaway" or "length", or has `lost` text, is said
        again."""
        self._core.admission.check_open()
        request = self.request(**options)
        texts = spoken_texts(request.front_end, whole_text(text))
        seat = self.seat()
        try:
            return joined([say_well(partial(self._say, seat, one), request, self.count_retry) for one in texts])
        finally:
            seat.leave()

    def _say(self, seat: Seat, text: SpokenText, request: SpeechRequest) -> Audio:
        utterance = self.begin(text, request, seat=seat)
        try:
            return utterance.result()
        finally:
            utterance.cancel()  # changes nothing once it has ended; an interrupted wait leaves nothing running

    def stream(self, text: str | SpokenText, **options: Unpack[RequestOptions]) -> ChunkStream:
        """Speak `text` and iterate over its chunks as they are made. Takes what `submit` takes."""
        return ChunkStream(self.submit(whole_text(text), **options))

    def map(
        self,
        requests: Iterable[str | Mapping[str, Any]],
        *,
        ordered: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Mapped]:
        """Speak many texts, as many at once as the engine has slots. It reads at most two requests a slot ahead.
        Closing the iterator cancels open utterances.

        Args:
            requests: texts, or mappings with "text" and options.
            ordered: results come in the order of the requests; otherwise as they are made.
            **options: for requests that do not have them. Here `reproducible` is True by default.

        Yields:
            One `Mapped` a request. A request that failed yields its error; the others are spoken.

        Raises:
            EngineClosed: the engine was closed.
        """
        return map_requests(self, requests, options, ordered=ordered)

    def submit(
        self,
        text: str | SpokenText | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        *,
        on_end: Callable[[], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Utterance:
        """Queue an utterance and return at once. The prompt is built here, in the caller's thread. So a text that
        cannot be spoken is refused before it takes a place.

        Args:
            text: what to say; None: it comes through `Utterance.push_text` and `end_text`.
            on_chunk: called with every chunk, from this utterance's own thread: a slow callback delays no other
                utterance. If it raises, or does not return within 30 s, this utterance alone fails with that error.
            on_end: called once, after the last chunk, when `result()` has its answer. If it raises, that is logged.
            **options: `RequestOptions` lists them; docs/options.md says more of each.

        Raises:
            RequestError: the request cannot be served; errors.py has the kinds. Running utterances go on.
            TextTooLongError: the text needs more rows than a slot has; the message says how many, `pieces` cuts it.
            EngineBusy: all slots and all places in the queue are taken.
            EngineClosed: the engine was closed.
        """
        self._core.admission.check()  # a full engine refuses before any work is done
        request = self.request(**options)
        if request.retries:
            raise RequestError("retries needs generate or map: what a listener has heard cannot be said again")
        if text is None:
            request = request.in_pieces()
            if request.front_end.changes_text:
                raise RequestError(
                    "text in pieces is spoken as it is: leave normalize and lexicon out with text=None, and push what "
                    "TextFrontEnd.stream() makes of the text"
                )
        return self.begin(text, request, on_chunk, on_end)

    @torch.inference_mode()
    @memory_told()
    def begin(
        self,
        text: str | SpokenText | None,
        request: SpeechRequest,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        seat: AnySeat | None = None,
    ) -> Utterance:
        arrived = time.monotonic()
        kept = cast(Seat | None, seat)
        self._core.admission.check(kept)
        check_begun(request)
        if not isinstance(text, str | SpokenText | None):
            raise TextError(f"text must be a string, got {type(text).__name__}")
        for name, callback in (("on_chunk", on_chunk), ("on_end", on_end)):
            if callback is not None and not callable(callback):
                raise RequestError(f"{name} must be callable, got {type(callback).__name__}")
        with self._core.in_turn(None if text is None else str(text)):
            spoken = None if text is None else spoken_text(request.front_end, text)
            sequence = self._core.new_sequence(request.around(spoken or SpokenText()), on_chunk, on_end)
            sequence.seat, callbacks = kept, sequence.result.callbacks
            # If this thread is interrupted from here on, an utterance with open text is dropped, which frees its place.
            utterance = Utterance(sequence, self._core, self)
            if spoken is None:
                self._begin_pieces(sequence)
            else:
                self._begin_whole(sequence, spoken.text, arrived)
            self._core.start_callbacks(sequence, callbacks)
            sequence.input.text_open = spoken is None
        return utterance

    def _begin_whole(self, sequence: SpeechSequence, text: str, arrived: float) -> None:
        sequence.stopwatch.arrived = sequence.stopwatch.begin(arrived)
        sequence.add_text(text)
        tokens = self._prompts.tokens(text)
        sequence.input.tokens = tokens.text
        sequence.stopwatch.mark("tokenise")
        prompt = self._prompt(tokens, sequence.request)
        sequence.stopwatch.mark("prompt")
        self._core.admission.admit(sequence)
        self._core.hand_over(sequence, prompt, text_complete=True)

    def _prompt(self, tokens: Tokens | str, request: Request) -> Prompt:
        layout, most = request.non_streaming_mode, self.max_positions
        with self._core.in_order():
            return self._prompts.build(tokens, request.conditioning, non_streaming_mode=layout, max_positions=most)

    def _begin_pieces(self, sequence: SpeechSequence) -> None:
        with self._core.in_order():
            pieces = PromptPieces(self._prompts, sequence.request.conditioning, self.max_positions)
        sequence.input.pieces, sequence.input.tokens = pieces, pieces.tokens
        self._core.admission.admit(sequence)

    def pieces(self, text: str | SpokenText, **options: Unpack[RequestOptions]) -> list[SpokenText]:
        """Cut `text` at its pauses, and at sentence ends into pieces that each fit a slot with room for their speech.
        What fits comes back whole, without white space around it. Takes what `submit` takes. `submit` speaks a piece as
        it is, with the silence that belongs to it.

        Raises:
            RequestError: as `submit` would. TextTooLongError: instruct and reference leave no room for any text.
                NoWordsError: there is nothing to speak.
        """
        return self.parts(text, self.request(**options))

    @torch.inference_mode()
    @memory_told()
    def prompt(self, text: str, **options: Unpack[RequestOptions]) -> Prompt:
        """The prompt that `text` would be spoken from, for comparisons; nothing is spoken. Takes what `submit` takes.
        Raises RequestError, EngineClosed: as `submit` would."""
        self._core.admission.check_open()
        request = self.request(**options)
        return self._prompt(spoken_text(request.front_end, whole_text(text)).text, request)

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more utterances, wait up to `drain_s` seconds for the open ones, cancel the rest, end the threads.
        Safe to call twice, and from a handler of SIGTERM. Raises RequestError: `drain_s` is no number."""
        if not isinstance(drain_s, int | float):
            raise RequestError(f"drain_s must be seconds, got {type(drain_s).__name__}")
        if drain_s > 0:
            self._core.drain(drain_s)
        self._core.stop()
        self._core.join()

    def __enter__(self) -> "TTSEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
