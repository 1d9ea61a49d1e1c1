"""The table of options: each entrance takes what the table says, and refuses the rest with its reason."""

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from entrances import ENTRANCES as PROTOCOLS
from options_table import PARTS, ROOT, renewed
from probes import probed
from serving import ready
from waiting import slow_case

import demo_pipeline
from qwen_megakernel import Lexicon, RequestError, SamplingParams, TTSEngine, cli
from qwen_megakernel.checkpoint.config import TalkerConfig
from qwen_megakernel.commands import batch
from qwen_megakernel.commands.options import server_options
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.server.fields import told_apart
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech import shared
from qwen_megakernel.speech.options import CLIENTS, COMMANDS, ENTRANCES, SERVERS, table
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

TEXT = "Say **SQL**."
GIVEN: dict[str, Any] = {
    "speaker": "max",
    "voice": "max",
    "language": "english",
    "instruct": "Slowly.",
    "seed": 7,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "repetition_penalty": 1.5,
    "sampling": SamplingParams(temperature=0.3),
    "speed": 1.5,
    "trim": "both",
    "silence_s": 0.2,
    "normalize": "auto",
    "lexicon": Lexicon({"sql": "sequel"}),
    "non_streaming_mode": False,
    "max_frames": 3,
    "chunk_frames": [2, 3],
    "retries": 1,
    "pause_s": 0.5,
    "lenient": True,
    "runaway_guard": False,
    "reproducible": True,
}
"""A value of each option that is not its default."""

UNHEEDED = {"instruct": "would ignore|ignored", "voice": "Base checkpoint"}
"""What this checkpoint does not heed is refused, or a warning says so."""


class Asked(contextlib.ExitStack):
    """What the engine is asked to say, by every entrance."""

    def __init__(self, engine: TTSEngine, folder, monkeypatch):
        super().__init__()
        self.engine, self.folder, self.said, self.server, self.text = engine, folder, [], None, TEXT
        begin = TTSEngine.begin

        def noted(engine, text, request, *listeners, **more):
            if str(text) != "Hello there.":  # a warm-up
                self.said.append(self.told(str(text or ""), request))
            return begin(engine, text, request, *listeners, **more)

        def pushed(utterance, piece):
            self.said[-1]["text"] += piece
            push(utterance, piece)

        push = Utterance.push_text
        monkeypatch.setattr(Utterance, "push_text", pushed)
        monkeypatch.setattr(TTSEngine, "begin", noted)
        monkeypatch.setattr(TTSEngine, "load", lambda *_args, **_options: engine)
        monkeypatch.setattr(TTSEngine, "close", lambda *_args: None)
        nothing = dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: None)  # full collections take a second each
        monkeypatch.setattr(shared, "gc", SimpleNamespace(**nothing))
        monkeypatch.setattr(batch, "load_for_good", lambda *_args: engine)

    @staticmethod
    def told(text: str, request) -> dict[str, Any]:
        told = vars(request) | vars(request.front_end) | {"text": text}
        return {name: value for name, value in told.items() if name != "front_end"}

    def _told(self, request) -> dict[str, Any]:
        return self.told("".join(map(str, request.front_end.whole(self.text))), request)

    def by(self, entrance: str, name: str | None, value: Any) -> Any:
        """What an entrance makes of one option, or of none; raises RequestError or SystemExit if it refuses it."""
        self.said.clear()
        given = {} if name is None else {name: value}
        alone = given if name == "sampling" else {"seed": 5} | given
        if entrance == "python":
            self.engine.generate(self.text, **alone)
        elif entrance in PROTOCOLS:
            flac = {"response_format": "flac"} if name == "retries" else {}
            self.server = self.server or self.enter_context(ready(lambda: self.engine))
            heard = PROTOCOLS[entrance].say(self.server, self.text, **alone | flac)
            if heard.error:
                raise RequestError(heard.error["message"])
        elif entrance == "line":
            self._batch({"text": self.text} | alone)
        elif entrance in COMMANDS:
            words = [word for pair in alone.items() for word in self._words(*pair)]
            if entrance == "batch":
                return self._batch({"text": self.text}, words)
            run = demo_pipeline.main if entrance == "demo" else lambda argv: cli.main(["speak", *argv])
            assert run(["--text", self.text, "-o", str(self.folder / "x.wav"), *words]) == 0 or self._failed()
        elif entrance in SERVERS:
            args = cli.make_parser().parse_args([entrance, *(w for pair in alone.items() for w in self._words(*pair))])
            service = EngineService(lambda: None, server_options(args, entrance), model="demo")
            service._engine = self.engine
            return self._told(service.request({}))
        elif entrance == "pipecat":
            service = MegakernelTTSService(engine=self.engine, settings=MegakernelTTSService.Settings(**alone))
            return self._told(service._request(self.engine))
        else:
            return self._remote(alone)
        return self.said[0]

    def _failed(self) -> None:
        raise RequestError(self.capsys.readouterr().err)

    def _words(self, name: str, value: Any) -> list[str]:
        if isinstance(value, Lexicon):
            path = self.folder / "lexicon.json"
            path.write_text('{"sql": "sequel"}')
            value = path
        if name == "layout":
            value = "streaming"
        elif isinstance(value, list):
            value = ",".join(map(str, value))
        return [f"--{name.replace('_', '-')}", str(value)]

    def _batch(self, line: dict, words: list[str] = ()) -> Any:  # type: ignore[assignment]
        source, output = self.folder / "lines.jsonl", self.folder / f"out{len(list(self.folder.iterdir()))}"
        source.write_text(json.dumps(line) + "\n")
        if cli.main(["batch", str(source), "-o", str(output), *words]):
            self._failed()
        return self.said[0]

    def _remote(self, settings: dict) -> Any:
        sent: dict[str, Any] = {}

        async def note(_kind, **fields) -> None:
            sent.update(fields)

        async def connected() -> None: ...

        async def main() -> None:
            service = MegakernelWebsocketTTSService(
                url="ws://x", settings=MegakernelWebsocketTTSService.Settings(**settings)
            )
            service._hello = {"sample_rate": 24000, "voices": ["max"], "languages": ["english"]}
            service._sample_rate = 24000
            service.send, service._ensure_connected = note, connected
            await (await service.open_session("a", "turn", TEXT, complete=True)).begin()

        asyncio.run(main())
        return {name: value for name, value in sent.items() if name != "context"}


@pytest.fixture(scope="module")
def engine():
    """Its model ends each utterance behind one frame: what it is asked counts, not what it says."""
    with probed("demo", max_streams=2) as engine:
        decoder, begun = engine.probes.decoder, []

        def start(slot, *args) -> None:
            begun.append(slot)
            decoder.real.start(slot, *args)

        def collect() -> list:
            codes = decoder.real.collect()
            said = codes if begun else [None] * len(codes)
            begun.clear()
            return said

        decoder.start, decoder.collect = start, collect
        yield engine


@pytest.fixture
def asked(engine, tmp_path, monkeypatch, capsys):
    with Asked(engine, tmp_path, monkeypatch) as asked:
        asked.capsys = capsys
        yield asked


@pytest.mark.parametrize("entrance", [slow_case(e) if e == "demo" else e for e in ENTRANCES])
def test_each_option_is_taken_or_refused_and_none_is_dropped(asked, entrance, caplog):
    plain, dropped = asked.by(entrance, None, None), []
    for name, row in table().items():
        value = GIVEN[name]
        if name == "speaker" and entrance in CLIENTS:
            assert told_apart({name: value}, entrance) == ({"voice": value}, []), "for clients it is the same as voice"
            continue
        if name == "non_streaming_mode" and entrance == "stream":
            value = True  # there False is the default
        if name == "chunk_frames" and entrance == "stream":
            value = 2
        given = row.names.get(entrance, name)
        caplog.clear()
        try:
            changed = asked.by(entrance, given, value) != plain
        except (RequestError, SystemExit, TypeError) as refused:
            words = f"{refused} {asked.capsys.readouterr().err}"
            if why := row.without.get(entrance):
                assert why in words or isinstance(refused, TypeError), (name, words)  # a dataclass has no such field
                continue
            changed = name in UNHEEDED
            assert changed, (name, words)
        if row.without.get(entrance) or not (changed or name in UNHEEDED and caplog.records):
            dropped.append(name)
    assert not dropped


@pytest.mark.parametrize("path", PARTS)
def test_what_is_written_twice_says_the_same(path):
    assert renewed(path) == (ROOT / path).read_text(encoding="utf-8"), "run tools/options_table.py"


@pytest.mark.parametrize("entrance", [slow_case(e) if e == "demo" else e for e in ENTRANCES if e != "remote"])
def test_numbers_are_read_without_a_language(asked, entrance, monkeypatch):
    """What the remote service sends is the server's matter, as at its socket."""
    asked.text = "I have 5 apples."
    assert asked.by(entrance, "normalize", "auto")["text"] == "I have five apples.", "the demo voice is English"
    languages = ("english", "german")
    monkeypatch.setattr(asked.engine._prompts, "languages", ("auto", *languages))
    monkeypatch.setattr(TalkerConfig, "named_languages", languages)
    asked.text = "Ich habe 5 Äpfel."
    assert asked.by(entrance, "normalize", "auto")["text"] == "Ich habe fünf Äpfel."


def test_every_option_has_a_value_here():
    assert set(GIVEN) == set(table())
