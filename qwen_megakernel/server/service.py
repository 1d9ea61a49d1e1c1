"""EngineService: the engine that all protocols of a server share, in one event loop."""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, cast

from qwen_megakernel.backend.cpu_threads import prompt_threads
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.choices import OPENAI_MODELS, OPENAI_VOICES
from qwen_megakernel.errors import (
    CheckpointError,
    EngineClosed,
    EngineDied,
    InstructError,
    RequestError,
    SpeakerError,
    TTSError,
    VoiceError,
)
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.server.api_error import listed
from qwen_megakernel.server.clones import Clone, Clones
from qwen_megakernel.server.journal import Journal
from qwen_megakernel.server.keys import Keys
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.quotas import Quotas
from qwen_megakernel.server.records import CURRENT
from qwen_megakernel.server.tasks import cancelled, in_daemon, in_thread
from qwen_megakernel.server.traces import spans_of
from qwen_megakernel.server.watch import Watched, watch
from qwen_megakernel.speech.base import SpeechEngine
from qwen_megakernel.speech.engine import TTSEngine
from qwen_megakernel.speech.options import RequestOptions, idle
from qwen_megakernel.speech.request import SpeechRequest, foreign_hint
from qwen_megakernel.speech.saved_voices import DEFAULT_VOICE, SavedVoices
from qwen_megakernel.speech.session import SpeechSession
from qwen_megakernel.speech.shared import warm_up
from spoken_text import finder
from spoken_text.finder import Candidates
from spoken_text.lexicon import Lexicon

log = logging.getLogger(__name__)

_TASKS = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}  # as vLLM-Omni calls them

_SUBMIT_THREADS, _HEALTH_POLL_S = 4, 0.5  # the threads build prompts, so that the event loop does not
_SEED_BITS = 53  # of fresh seeds: JavaScript's numbers hold no more


class EngineService:
    """Loads its engine in the background; everything else runs in the event loop.

    Attributes:
        model: the model's own name.
        models: every name by which clients may call it, its own first.
        saved_voices: the voices besides the checkpoint's speakers.
        state: "loading", "ready", "draining", "failed" (it could not be loaded) or "dead".
        serves: requests are taken: it is ready, or in the grace after SIGTERM.
        keys: who may use it.
        quotas: what each key may use.
        journal: what is told of each request.
        watched: files that are read again once they have changed.
        error: why it is failed or dead.
        gone: set when it is failed or dead.
        sessions: those that are being spoken.
        defaults: options of speech for clients that leave them out.
        wrong_default: why the checkpoint cannot speak by them.
        unsent_sockets: sockets with messages that are not sent yet.
    """

    def __init__(
        self,
        load: Callable[[], SpeechEngine],
        options: ServerOptions,
        *,
        model: str,
        config: ModelConfig | None = None,
    ):
        """
        Args:
            load: makes the engine; called in a thread.
            config: the checkpoint's config, if it is already known (`check_model`).

        Raises:
            VoiceError: a file in `voices` is no voice, or this checkpoint takes no voices. Or an alias names an unknown
                voice, or is itself a voice's name.
            CheckpointError: the checkpoint needs voices, and there can be none.
        """
        self.model = model
        self.options = options
        self.limits = options.limits
        self.defaults = options.defaults
        self._load = load
        self.models = list(dict.fromkeys([model, *options.served_names, *OPENAI_MODELS]))
        self._aliases = {alias.lower(): voice.lower() for alias, voice in options.voice_aliases.items()}
        self._openai_voices = OPENAI_VOICES if options.openai_voices else ()
        self.wrong_default: RequestError | None = None
        self._engine: SpeechEngine | None = None
        self.saved_voices = SavedVoices(options.voices)
        self._clones = Clones(self.saved_voices, self.limits) if options.allow_clone else None
        if config:
            self._check_voices(config.variant, tuple(config.talker.speakers))
        self.state = "loading"
        self.keys = Keys(options.token, options.keys_file)
        reread = {"keys": self.keys.reread, "voices": self._reread_voices, "lexicon": self._reread_lexicon}
        paths = {"keys": options.keys_file, "voices": options.voices, "lexicon": options.lexicon_file}
        self.watched = [Watched(what, [path], reread[what]) for what, path in paths.items() if path]
        self.journal = Journal(spans_of(options.otlp_endpoint), log_texts=options.log_texts)
        self.quotas = Quotas(self.keys)
        self._grace: asyncio.Event | None = None  # set once it is over
        self.error = ""
        self.gone = asyncio.Event()
        self.sessions: set[SpeechSession] = set()
        self.unsent_sockets: set[object] = set()
        self._executor = prompt_threads(_SUBMIT_THREADS)
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to load the engine. Call it in the event loop."""
        self._tasks = [asyncio.create_task(self._run_engine()), asyncio.create_task(watch(self.watched))]

    async def _run_engine(self) -> None:
        """Load the engine and watch it. It is ready once it has spoken a real utterance, so the first caller does not
        wait for a warm-up."""
        try:
            self._engine = await in_daemon(self._load)
            self._check_voices(self.engine.variant, self.engine.speakers)
            if not self.can_clone and not self.clones and (self.options.allow_upload or self._clones):
                log.warning("no client can make or bring voices: %s is no Base checkpoint", self.model)
            await in_daemon(self._warm_up)
        except Exception as error:
            self.give_up("failed", error, None if isinstance(error, TTSError) else error)
            return
        try:
            if self.saved_voices.by_name or self.engine.variant != "base":
                self.request({})
        except Exception as error:
            self.wrong_default = error if isinstance(error, RequestError) else None
            self.give_up("failed", error, None if isinstance(error, TTSError) else error)
            return
        if self.state == "loading":
            self.state = "ready"
            log.info("ready: %s, %d voices", self.model, len(self.voice_names()))
        while (health := self.engine.health())["status"] != "dead":
            await asyncio.sleep(_HEALTH_POLL_S)
        self.give_up("dead", health.get("error", ""))

    def give_up(self, state: str, why: object, bug: Exception | None = None) -> None:
        """Serve nobody any more. `state`: "failed" or "dead". `bug`: an unexpected exception; its traceback is told."""
        self.state, self.error = state, str(why)
        if not self.wrong_default:  # else the process ends with that error
            log.error("the engine is %s: %s", state, why, exc_info=bug)
        self.gone.set()

    @property
    def serves(self) -> bool:
        return self.state == "ready" or self.state == "draining" and self._grace is not None

    async def grace(self) -> None:
        """Not ready any more, but take requests for `grace_seconds`: whoever routes them learns of it only now."""
        self._grace, self.state = asyncio.Event() if self.state == "ready" else None, "draining"
        if self._grace:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._grace.wait(), self.options.grace_seconds)
            self._grace = None

    async def drain(self) -> None:
        """After the grace take no more requests, and wait up to `drain_seconds` for running utterances."""
        if self.state in ("loading", "ready"):
            await self.grace()
        end = asyncio.get_running_loop().time() + self.options.drain_seconds
        while (self.sessions or self.unsent_sockets) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Close the engine and cancel running utterances."""
        await cancelled(self._tasks)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.saved_voices.close()
        for each in (self._engine, self.journal):
            if each:
                await in_thread(each.close)

    def _check_voices(self, variant: str, speakers: Collection[str]) -> None:
        """
        Raises:
            CheckpointError, VoiceError: this variant cannot speak with the saved voices, or an alias leads nowhere.
        """
        if variant == "base" and not (self.saved_voices.by_name or self.options.allow_upload or self._clones):
            raise CheckpointError(
                f"{self.model} is a Base checkpoint and needs saved voices: name a folder of them with --voices, or "
                "let clients make them with serve --allow-upload, or bring them along with serve --allow-clone"
            )
        if self.saved_voices.by_name and variant != "base":
            if not (variant == "custom_voice" and self.options.allow_foreign_voice):
                hint = foreign_hint(variant)
                raise VoiceError(f"saved voices need a Base checkpoint; {self.model} is {variant}{hint}")
            for name in self.saved_voices.by_name:
                self._refuse_speaker(name, speakers)
        known = [*speakers, *self.saved_voices.by_name, DEFAULT_VOICE]
        for alias, voice in self._aliases.items():
            if alias in known:
                raise VoiceError(f"the alias {alias!r} of {voice!r} is a voice's name already: choose another alias")
            if voice not in known:
                told = listed(known)
                raise VoiceError(f"the alias {alias!r} names {voice!r}, which is not a voice here; known: {told}")

    def _warm_up(self) -> None:
        """
        Raises:
            VoiceError: another checkpoint made one of the saved voices.
        """
        voices = list(self.saved_voices.by_name.values())
        for voice in voices:
            self.engine.request(voice=voice)
        finder.load(Candidates.of(self.engine.languages))  # any client may ask for it
        self._say_first(voices[0] if voices else None)

    def _say_first(self, voice: Voice | None) -> None:
        """A real utterance, so that no caller pays for what is made at first use."""
        warm_up(cast(TTSEngine, self.engine), voice)

    @property
    def loaded(self) -> bool:
        """There is an engine."""
        return self._engine is not None

    @property
    def engine(self) -> SpeechEngine:
        """
        Raises:
            EngineClosed: it is not loaded.
        """
        if self._engine is None:
            raise EngineClosed(f"the server is {self.state}")
        return self._engine

    def _reread_lexicon(self) -> None:
        assert self.options.lexicon_file
        self.defaults = {**self.defaults, "lexicon": Lexicon.load(self.options.lexicon_file)}

    def _reread_voices(self) -> None:
        def check(name: str, voice: Voice) -> None:
            self._refuse_speaker(name, self.engine.speakers)
            self.engine.request(voice=voice)

        self.saved_voices.reread(check)

    def _refuse_speaker(self, name: str, speakers: Collection[str]) -> None:
        if name in map(str.lower, speakers):
            raise VoiceError(f"{self.model} has a speaker {name!r} already: rename the voice's file")

    def voice_names(self) -> list[str]:
        """The names that a client may use: the checkpoint's speakers, then the saved voices by the alphabet."""
        return [*(self._engine.speakers if self._engine else ()), *sorted(self.saved_voices.by_name)]

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of voices -> the voices."""
        if not self._openai_voices:  # every request asks
            return self._aliases
        voices = self.voice_names()
        free = [name for name in self._openai_voices if name not in voices]
        return dict(zip(free, itertools.cycle(voices), strict=False)) | self._aliases

    def known_voices(self) -> str:
        """Voices and their aliases, for a message."""
        return listed([*self.voice_names(), *self.aliases]) or DEFAULT_VOICE

    def is_voice(self, name: str) -> bool:
        """May a client use this name, in upper or lower case?"""
        return name.lower() in (*self.voice_names(), *self.aliases, DEFAULT_VOICE)

    @property
    def can_clone(self) -> bool:
        """Clients may make voices, and the model can speak with them."""
        return self.options.allow_upload and self.loaded and self.engine.variant == "base"

    @property
    def clones(self) -> bool:
        """A request may bring its voice along, and the model can speak with it."""
        return self._clones is not None and self.loaded and self.engine.variant == "base"

    @property
    def takes_instructions(self) -> bool:
        return self.loaded and self.engine.config.honours_instruct

    # ------------------------------------------------------------ speaking

    def check_ready(self) -> SpeechEngine:
        """The engine.

        Raises:
            EngineClosed: the engine is not ready, or no longer.
        """
        if self.engine is None or not self.serves:
            raise (EngineDied if self.state in ("dead", "failed") else EngineClosed)(f"the server is {self.state}")
        return self.engine

    def check_task(self, task: str | None) -> None:
        """
        Args:
            task: what vLLM-Omni's clients call a checkpoint's kind; None: the client does not say it.

        Raises:
            RequestError: the served checkpoint is of another kind.
        """
        served = _TASKS[self.engine.variant]
        if task not in (None, served):
            words = f"this server's model {self.model!r} is a {served} checkpoint, got task_type {str(task)[:40]!r}"
            words += f": set task_type to {served!r}, or start a server with another model"
            raise RequestError(words, field="task_type")

    def request(self, options: RequestOptions, *, lenient: bool = False) -> SpeechRequest:
        """A client's options as a request of the engine, always with a seed.

        Args:
            options: checked by `read_options`. `voice` is one of `voice_names` or `aliases`, in upper or lower case, or
                "default".
            lenient: a language model wrote the text.

        Raises:
            RequestError: an unknown voice or language, or an instruct that would be ignored: a client does not see the
                log's warning.
        """
        asked: dict[str, Any] = {"seed": secrets.randbits(_SEED_BITS)}
        asked |= {**self.defaults, **options, "lenient": lenient}
        if asked.get("instruct") and not self.takes_instructions:
            raise InstructError(
                f"{self.model} would ignore instructions: leave them out. VoiceDesign and 1.7B CustomVoice take them"
            )
        who = self._voice(self.engine, named := asked.pop("voice", None))
        if record := CURRENT.get():
            record.fields["voice"] = named if isinstance(named, str) else "its own" if named else DEFAULT_VOICE
        return self.engine.request(**cast(RequestOptions, asked | who))

    def fixes_attempts(self, options: RequestOptions) -> bool:
        """Does the client or the operator say with which seeds, or for how long, speech may be made?"""
        return any(name in options or name in self.defaults for name in ("seed", "retries", "max_frames"))

    def idle(self, options: RequestOptions) -> list[str]:
        """Those of a client's options that change nothing beside the others and the server's."""
        return [name for name in idle({**self.defaults, **options}) if name in options]

    def _voice(self, engine: SpeechEngine, asked: Voice | str | None) -> RequestOptions:
        """A voice by its name, or the one that a request brought along."""
        if isinstance(asked, Voice):
            return {"voice": asked}
        voices = self.saved_voices.by_name
        if engine.variant == "base" and not voices:
            raise SpeakerError("there are no voices yet: POST /v1/voices makes one from a recording")
        name = DEFAULT_VOICE if asked is None else asked.lower()
        name = self.aliases.get(name, name)
        if name in voices:
            return {"voice": voices[name]}
        if name in engine.speakers:
            return {"speaker": name}
        if "+" in name or "(" in name:
            words = "a mean of speakers is none that the model was trained with"
            raise SpeakerError(f"voice must be one name, got {name[:80]!r}: {words}; known: {self.known_voices()}")
        if name != DEFAULT_VOICE:
            raise SpeakerError(f"unknown voice {str(asked)[:80]!r}; known: {self.known_voices()}")
        return {"voice": min(voices.items())[1]} if engine.variant == "base" else {}

    async def cloned(self, options: RequestOptions, clone: Clone | None) -> RequestOptions:
        """The options with the voice that a request brings along, if it does. It takes the place of a named one.

        Raises:
            RequestError: this server makes no such voices, or not of this.
            EngineBusy: too many were asked for.
        """
        if clone is None:
            return options
        if self._clones is None:
            field = "speaker_embedding" if clone.vector else "ref_audio"
            raise SpeakerError(f"{field} is not served here: start the server with --allow-clone", field=field)
        return options | {"voice": await self._clones.voice(self.check_ready(), clone)}

    async def add_voice(self, name: str, recording: str | bytes, text: str | None) -> None:
        """Make a saved voice, as `SavedVoices.add`. Raises RequestError: the name is an alias, or what that raises."""
        if name.lower() in self.aliases:
            raise VoiceError(f"{name!r} is an alias of a voice: choose another name", field="name")
        await self.saved_voices.add(self.engine, name, recording, text)

    async def count_tokens(self, *texts: str | None) -> int:
        """The texts' total number of the model's tokens. A text of None counts as 0.

        Raises:
            TextError: a text cannot be spoken.
        """

        tokens = self.engine.tokens

        def count() -> int:
            return sum(len(tokens(text).text) for text in texts if text)

        return await asyncio.get_running_loop().run_in_executor(self._executor, count)

    @contextlib.asynccontextmanager
    async def speak(
        self,
        text: str | None,
        request: SpeechRequest,
        opening: str = "",
        *,
        ended: bool = False,
        words: bool = False,
        **how: Any,
    ) -> AsyncIterator[SpeechSession]:
        """Begin a session. At the end of the block, cancel it if it still runs.

        Args:
            text, opening, ended: as `SpeechSession.begin` takes them.
            request: what `request` returned.
            words: tell words and when they are spoken.
            **how: further arguments of `SpeechSession`.

        Raises:
            TTSError: the text cannot be spoken, or not now.
        """
        rate = self.engine.rates.of(request.conditioning) if words else None
        record = CURRENT.get()
        async with self.quotas.stream(record.key if record else "", patient=how.get("patient", False)):
            session = SpeechSession(self.engine, self._executor, request, rate=rate, **how)
            self.sessions.add(session)
            with self.journal.speech(session, request.seed):
                try:
                    await self.take_text(opening if text is None else text)
                    await session.begin(text, opening, ended=ended)
                    yield session
                finally:
                    try:
                        await session.close()
                    finally:  # the task may be cancelled once more, as by a client that leaves
                        self.sessions.discard(session)

    async def take_text(self, text: str) -> None:
        """Take text that will be spoken: count it, and log it if the operator asked for that. Texts are private. Raises
        Refused: the client's key has had its characters of this minute."""
        if record := CURRENT.get():
            await self.quotas.take_characters(record.key, len(text))
            record.characters += len(text)
        if self.options.log_texts and text:
            log.info("text %r", text)
