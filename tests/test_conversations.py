"""Conversations that real bots have, with both services in both modes: what is sent, what must be heard, what must be
in the LLM's context. Each ends within 3 s, with every start stopped and every slot free.

The scripts follow Pipecat's examples, tests and bug reports. Several run at once, because they play in real time.
`QUICK` has one of each kind; the others are slow."""

import asyncio
import functools
import random
import re

import pytest
from conversations import END, START, Script, Talk, heard_something, tokens, turn, until, until_heard
from kept import Kept
from pipecat.frames.frames import (
    AggregatedTextFrame,
    BotBackchannelFrame,
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    CancelFrame,
    EndFrame,
    ErrorFrame,
    Frame,
    FunctionCallsStartedFrame,
    InterruptionFrame,
    LLMTextFrame,
    StopFrame,
    TextFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStoppedFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.processors.filters.function_filter import FunctionFilter
from pipecat.services.tts_service import TextAggregationMode
from pipelines import of, one_start_and_stop
from serving import ready
from waiting import PATIENCE_S, until_in_loop
from waiting import until as until_true

from qwen_megakernel import RequestError, SamplingParams, TTSEngine
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

TOKEN, SENTENCE = TextAggregationMode.TOKEN, TextAggregationMode.SENTENCE
MODES = {"sentences": SENTENCE, "tokens": TOKEN}
SERVICES = {"local": MegakernelTTSService, "remote": MegakernelWebsocketTTSService}
LONG = "One two three four five six seven eight nine ten eleven twelve."
MONDAY = "Your appointment is confirmed for Monday."
READ = {"normalize": "auto", "language": "en"}


WORDS = "Yes.| No| one| two.|!| It is| so, |\n| <think>Hm.|</think> Ah.| [pause] | ...".split("|")


def some_steps(rng: random.Random) -> list:
    """Anything that a pipeline may send, in any order."""
    steps: list = []
    for _ in range(rng.randint(3, 14)):
        words = [LLMTextFrame(rng.choice(WORDS)) for _ in range(rng.randint(1, 4))]
        steps += rng.choice(
            [
                [START()],
                [END()],
                words,
                words,
                [START(), *words, END()],
                unspoken(*words),
                unspoken(END()),
                [speak(rng.choice(("Yes.", "...", "No. Yes.")), interruptible=rng.random() < 0.7)],
                [TextFrame(rng.choice(WORDS))],
                [AggregatedTextFrame("It is.", "sentence", raw_text="It is.")],
                [InterruptionFrame()],
                [called()],
                [change(voice=rng.choice(("ada", "max", "nobody")))],
                [rng.choice((0.02, 0.3, 0.8))],
            ]
        )
    return steps + rng.choice([[], [], [StopFrame()], [CancelFrame()]])


def unspoken(*frames: Frame) -> list[Frame]:
    """As a language model marks them after `LLMConfigureOutputFrame(skip_tts=True)`."""
    for frame in frames:
        frame.skip_tts = True
    return list(frames)


def speak(text: str, **fields) -> TTSSpeakFrame:
    frame = TTSSpeakFrame(text)
    for name, value in fields.items():
        setattr(frame, name, value)
    return frame


def closing(*kept: str):
    """A filter in front of the service that lets no more text through after the last of these words."""

    def around(service):
        seen = []

        async def passes(frame: Frame) -> bool:
            if isinstance(frame, (TextFrame, END)) and seen[-1:] == [kept[-1]]:
                return False
            if isinstance(frame, TextFrame):
                seen.append(frame.text.strip())
            return True

        return [FunctionFilter(passes), service]

    return around


def change(**settings) -> Frame:
    return TTSUpdateSettingsFrame(delta=MegakernelWebsocketTTSService.Settings(**settings))


async def bot_stopped(talk: Talk) -> None:
    """All sound of the first turn was heard. A busy machine lets the bot stop in the middle too: that is not meant."""
    await until(TTSStoppedFrame)(talk)
    sound = sum(frame.num_frames / frame.sample_rate for frame in of(talk.down, TTSAudioRawFrame))
    await until_heard(sound - 0.001)(talk)
    await until_in_loop(lambda: len(of(talk.up, BotStoppedSpeakingFrame)) == len(of(talk.up, BotStartedSpeakingFrame)))


def called() -> Frame:
    return FunctionCallsStartedFrame(function_calls=[])


SCRIPTS = {
    # ------------------------------------------------------------ plain
    "a greeting": Script([speak("Hello there.")], "Hello there.", context="Hello there.", turns=1),
    "a turn": Script(turn("Hello there. Yes."), "Hello there. Yes.", context="Hello there. Yes.", turns=1),
    "two turns at once": Script([*turn("Hello there."), *turn("How are you?")], "Hello there. | How are you?", turns=2),
    "a turn without a full stop": Script(turn("Hello there"), "Hello there", context="Hello there", turns=1),
    "a turn of blanks": Script([START(), LLMTextFrame("  "), LLMTextFrame(" "), END()], "", turns=0),
    "a turn without text": Script([START(), END(), *turn("Hello there.")], "Hello there.", turns=1),
    "a telephone": Script(turn("Hello there."), "Hello there.", context="Hello there.", rate=8000),
    "a wideband telephone": Script(turn("Hello there."), "Hello there.", context="Hello there.", rate=16000),
    # ------------------------------------------------------------ turns without an end
    "the end in mid-turn": Script([START(), *tokens("Hello there. How are")], "Hello there. How are", turns=1),
    "the end behind a sentence": Script([START(), *tokens("Hello there.")], "Hello there.", context="Hello there."),
    "the end behind the start": Script([START()], "", turns=0),
    "a stop in mid-turn": Script([START(), *tokens("Hello there. How are"), StopFrame()], "Hello there. How are"),
    "a cancel in mid-turn": Script([START(), *tokens(LONG), heard_something, CancelFrame()], seconds=(0, 3)),
    "a cancel before the text": Script([START(), CancelFrame()], ""),
    "speech is switched off in mid-turn": Script(
        [START(), *tokens("Hello there. How are"), *unspoken(*tokens(" you? Fine."), END())],
        "Hello there. How are", turns=1,
    ),
    "speech is switched off between turns": Script(
        [*turn("Hello there."), *unspoken(*turn("Not this.")), *turn("How are you?")], "Hello there. | How are you?",
        context="Hello there. | Not this. | How are you?",
    ),
    "a filter closes in mid-turn": Script(
        turn("Hello there. How are you?"), "Hello there. How", around=closing("How"), turns=1
    ),
    "a filter closes, and a call speaks": Script(
        [*turn("Hello there. How are you?"), 1.0, speak("Are you there?")],
        "Hello there. How | Are you there?", around=closing("How"),
    ),
    "the next turn without the end of the last": Script(
        [START(), *tokens("Hello there. How are"), *turn("Never mind.")], "Hello there. How are | Never mind.", turns=2
    ),
    # ------------------------------------------------------------ a language model that stalls
    "a stall behind a sentence": Script([START(), *tokens(MONDAY), 5.0, END()], MONDAY, context=MONDAY, turns=1),
    "stalls in a sentence, for longer than Pipecat waits for an item of a context": Script(
        [START(), *tokens("One two three"), 2.5, *tokens(" four five six"), 2.5, *tokens(" seven eight."), END()],
        "One two three four five six seven eight.", turns=1, options={"stop_frame_timeout_s": 1.5},
    ),
    "a stall between sentences": Script(
        [START(), *tokens(MONDAY), 4.0, *tokens(" Is that right?"), END()],
        f"{MONDAY} | Is that right?", context=f"{MONDAY} Is that right?", turns=1,
    ),
    "an interruption during a stall": Script(
        [START(), *tokens(MONDAY), until_heard(2.2), 1.0, InterruptionFrame(), until(InterruptionFrame)],
        MONDAY, context=MONDAY,
    ),
    "a function call behind a sentence": Script(
        [START(), *tokens("Let me look."), called(), 2.0, END(), *turn("It is Monday.")], "Let me look. | It is Monday."
    ),
    "a call speaks while the model stalls": Script(
        [START(), *tokens("Let me look. And"), 3.5, speak("One moment."), 1.0, *tokens(" then we go."), END()],
        seconds=(2.0, 5.0),
    ),
    # ------------------------------------------------------------ what is not spoken
    "reasoning": Script(
        turn("<think>The user says hello. I should greet them. Keep it short.</think>Hello!"), "Hello!", settings=READ
    ),
    "reasoning alone": Script(turn("<think>Hm. What now? Nothing.</think>"), "", settings=READ),
    "reasoning that never ends": Script(turn("Hello. <think>Hm. What now? Nothing."), "Hello.", settings=READ),
    "reasoning across a function call": Script(
        [START(), *tokens("<think>I must look."), called(), 1.0, *tokens(" Now I know.</think> It is Monday."), END()],
        "It is Monday.", settings=READ,
    ),
    "reasoning across a change of voice": Script(
        [START(), *tokens("<think>I am Ada."), change(voice="ada", speed=1.0), *tokens(" I am.</think> Hello."), END()],
        "Hello.", settings=READ,
    ),
    "a block of code": Script(
        turn("Look at this:\n```python\nx = 1. # a. b! c?\nprint(x)\n```\nThat is all."),
        seconds=(1.4, 2.6), settings=READ,
    ),
    "a comment": Script(turn("Yes. <!-- one. two. three. --> No."), "Yes. No.", settings=READ),
    "a link that looks like sentences": Script(
        turn("See [the page](https://example.com/A.B?C=D!E) now."), seconds=(1.0, 2.0), settings=READ
    ),
    "an emoji behind a sentence": Script(turn("That is great! \U0001f389"), "That is great!", settings=READ),
    "an emoji alone": Script([*turn("\U0001f389"), *turn("Hello.")], "Hello.", settings=READ),
    "dots and dashes": Script([*turn("..."), *turn("---"), speak("…"), *turn("Hello.")], "Hello."),
    "four turns without words": Script([*(4 * [*turn("...")]), *turn("Hello.")], "Hello.", turns=5),
    # ------------------------------------------------------------ odd tags
    "a pause without a length": Script(turn("Yes [pause] no."), "Yes  no."),
    "a pause that is too long": Script(turn("Yes. [pause 20s] No."), "Yes. No."),
    "a break without quotes": Script(turn("Yes <break time=500ms/> no."), "Yes  no."),
    "emphasis": Script(turn("It is <emphasis>fine</emphasis> now."), "It is fine now."),
    "a tag that is mentioned": Script(turn("The <audio> tag is old. Leave it."), "The  tag is old. Leave it."),
    "a tag that never ends": Script(turn("The <audio tag is old. Leave it."), "The <audio tag is old. Leave it."),
    "half an emoji": Script(
        [START(), LLMTextFrame("Hello there"), LLMTextFrame(" \ud83c"), LLMTextFrame(" my friend."), END()],
        seconds=(1, 3.5),
    ),
    # ------------------------------------------------------------ what was not heard
    "a busy engine": Script(turn("Hello there. How are you?"), "", context="", errors=("",), busy=True),
    "a service that is not usable": Script(
        [lambda talk: talk.service.set_usable(False), *turn("Hello there.")], "", context="", turns=1
    ),
    # ------------------------------------------------------------ bare text
    "bare text": Script([TextFrame("Hello there. "), TextFrame("How are you?")], "Hello there. How are you?"),
    "bare text, then a turn": Script(
        [TextFrame("Hello "), TextFrame("there."), *turn("How are you?")], "Hello there. | How are you?", turns=2
    ),
    "bare text, and nothing for a while": Script([*tokens("Hello there."), 4.0], "Hello there.", turns=1),
    "sentences from elsewhere": Script(
        [START(), *(AggregatedTextFrame(t, "sentence", raw_text=t) for t in ("Hello there.", "How are you?")), END()],
        "Hello there. How are you?", turns=1,
    ),
    "tokens behind an interruption": Script(
        [START(), *tokens("Hello"), InterruptionFrame(), until(InterruptionFrame), *tokens("there."), END(),
         *turn("How are you?")],
        seconds=(1.0, 4.0), context=None,
    ),
    # ------------------------------------------------------------ interruptions
    "an interruption before the text": Script(
        [START(), InterruptionFrame(), until(InterruptionFrame), *turn("Hello.")], "Hello."
    ),
    "an interruption at the first sound": Script(
        [*turn(LONG), heard_something, InterruptionFrame(), until(InterruptionFrame), *turn("Hello.")], seconds=(0.5, 3)
    ),
    "an interruption behind all sound": Script(
        [*turn("Yes."), bot_stopped, InterruptionFrame(), until(InterruptionFrame), *turn("Hello.")], "Yes. | Hello."
    ),
    "two interruptions": Script(
        [*turn(LONG), heard_something, InterruptionFrame(), InterruptionFrame(), until(InterruptionFrame, 2),
         *turn("Hello.")],
        seconds=(0.5, 3),
    ),
    "speech that may not be interrupted": Script(
        [speak("Please listen.", interruptible=False), InterruptionFrame(), until(InterruptionFrame)], "Please listen."
    ),
    "a murmur": Script([BotBackchannelFrame("Aha."), InterruptionFrame(), until(InterruptionFrame)], seconds=(0.3, 3)),
    # ------------------------------------------------------------ calls that speak, settings
    "a call speaks before a turn": Script(
        [speak("One moment please."), *turn("Here you are."), speak("Bye.")], seconds=(1, 6), turns=3,
        context="One moment please. | Here you are. | Bye.", options={"trim_leading_silence": True},
    ),
    "two calls speak": Script(
        [speak("One moment please."), speak("Here you are.")], seconds=(1, 5), turns=2,
        context="One moment please. | Here you are.", options={"trim_leading_silence": True},
    ),
    "a call speaks in a turn": Script(
        [START(), *tokens("Hello there. "), speak("One moment."), *tokens("How are you?"), END()],
        seconds=(1.5, 6.0), context=None,
    ),
    "another voice": Script(
        [*turn("Hello."), change(voice="max"), *turn("Hello.")], seconds=(1.0, 4.0), context="Hello. | Hello."
    ),
    "another voice in a turn": Script(
        [START(), *tokens("Hello. "), change(voice="max"), *tokens("Hello."), END()], seconds=(1.0, 4.0),
    ),
    "a voice that is not there": Script(
        [change(voice="bob"), *turn("Hello.")], "Hello.", errors=("unknown voice 'bob'",)
    ),
    "Pipecat waits for hardly anything": Script(
        turn("Hello there. Yes."), "Hello there. Yes.", turns=1, options={"stop_frame_timeout_s": 0.05}
    ),
    "a context for each sentence": Script(
        turn("Hello there. How are you?"), "Hello there. How are you?", options={"reuse_context_id_within_turn": False}
    ),
    "the end twice": Script([*turn("Hello."), END(), END()], "Hello.", turns=1),
    "text behind the end of its turn": Script([*turn("Hello there."), *tokens("Yes."), 1.5], "Hello there. | Yes."),
    "an end frame within the steps": Script([*turn("Hello."), EndFrame()], "Hello.", turns=1),
}  # fmt: skip
SENTENCES_ONLY = {"a context for each sentence"}
QUICK = {
    "a greeting", "a turn", "a telephone", "the end in mid-turn", "a cancel in mid-turn",
    "speech is switched off in mid-turn", "a filter closes in mid-turn", "an interruption during a stall",
    "a function call behind a sentence", "reasoning across a function call", "dots and dashes",
    "a pause without a length", "a busy engine", "bare text, then a turn", "an interruption at the first sound",
    "speech that may not be interrupted", "a call speaks before a turn", "another voice in a turn",
    "a voice that is not there",
}  # fmt: skip
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCRIPTS]
AT_ONCE = 12


@pytest.fixture(scope="module")
def engines():
    """One with room for all, and one that is full."""
    options = {"device": "cpu", "threads": 1, "queue_timeout": PATIENCE_S}
    with (
        TTSEngine.load("demo", max_streams=16, max_queue=64, **options) as free,
        TTSEngine.load("demo", max_streams=1, max_queue=0, **options) as full,
    ):
        yield free, full


@pytest.fixture(scope="module")
def urls(engines):
    free, full = engines
    with ready(lambda: Kept(free)) as one, ready(lambda: Kept(full)) as other:
        yield one.socket_url, other.socket_url


async def converse(scripts: dict[str, Script], make) -> dict[str, Talk | BaseException]:
    """All of them, `AT_ONCE` at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(script: Script) -> Talk:
        async with room:
            talk = await Talk(make(script), script).run()
            if of(talk.down, StopFrame):  # it leaves the cleaning up to the bot
                await talk.service.cleanup()
            return talk

    talks = await asyncio.gather(*map(one, scripts.values()), return_exceptions=True)
    return dict(zip(scripts, talks, strict=True))


# Each service and each mode once; tests/test_pipecat.py has all four.
WAYS = [("local", "tokens"), ("remote", "sentences")]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def how(request, engines, urls):
    """The mode, and a function that makes a service of one kind in this mode for a script."""
    kind, mode = request.param

    def make(script: Script):
        service = SERVICES[kind]
        where = {"engine": engines[script.busy]} if kind == "local" else {"url": urls[script.busy]}
        settings = service.Settings(voice="ada", seed=3, **({"language": "en"} | script.settings))
        options = {"text_aggregation_mode": MODES[mode], "trim_leading_silence": False} | script.options
        return service(settings=settings, **where, **options)

    return MODES[mode], make


def hold(engines, scripts: dict[str, Script], make) -> dict[str, Talk | BaseException]:
    """All of these conversations. Afterwards no slot is held."""
    free, full = engines
    taken = full.submit()
    talks = asyncio.run(converse(scripts, make))
    taken.cancel()
    until_true(lambda: not free.health()["streams"])
    return talks


@pytest.fixture(scope="module")
def talks(request, how, engines):
    """The conversations that are asked for, with one service in one mode, by their names."""
    mode, make = how
    tests = [item.callspec.params for item in request.session.items if item.originalname == "test_a_conversation"]
    names = dict.fromkeys(params["name"] for params in tests)
    return mode, hold(engines, {name: SCRIPTS[name] for name in names if possible(name, mode)}, make)


def possible(name: str, mode: TextAggregationMode) -> bool:
    return mode is SENTENCE or name not in SENTENCES_ONLY


def expected_s(engine: TTSEngine, heard: str, mode) -> float:
    """Seconds of what must be heard."""
    parts = heard.split(" | ")
    if mode is SENTENCE:
        parts = [sentence for part in parts for sentence in re.split(r"(?<=[.!?]) +", part)]
    return sum(alone_s(engine, part, mode is SENTENCE) for part in parts if part)


@functools.cache
def alone_s(engine: TTSEngine, text: str, whole: bool) -> float:
    """Seconds of what the engine says. Many scripts share their sentences."""
    how = {"speaker": "ada", "language": "en", "sampling": SamplingParams(seed=3), "lenient": True}
    return engine.generate(text, non_streaming_mode=whole, **how).duration_s


@pytest.mark.parametrize("name", CASES)
def test_a_conversation(engines, talks, name):
    (mode, all_talks), script = talks, SCRIPTS[name]
    if not possible(name, mode):
        pytest.skip("not possible in this mode")
    talk = all_talks[name]
    if isinstance(talk, BaseException):
        raise talk
    told = [frame.error for frame in of(talk.up, ErrorFrame)]
    assert len(told) == len(script.errors) or (script.errors and told), told
    assert all(any(words in error for error in told) for words in script.errors), told
    talk.check_always()
    if script.seconds:
        assert script.seconds[0] <= talk.heard_s <= script.seconds[1]
    else:
        wanted = expected_s(engines[0], script.heard, mode)
        # The last piece of 40 ms of each turn is filled up. At another rate Pipecat resamples, and forgets the samples
        # that it holds when nothing comes for 0.2 s, as on a busy machine.
        lost = 0.01 if script.rate == 24000 else 0.2
        assert wanted - lost <= talk.heard_s <= wanted + 0.2
    if script.context is not None:
        assert talk.said == script.context
    if script.turns is not None:
        assert one_start_and_stop(talk.down, script.turns)


@pytest.mark.slow
def test_whatever_is_sent_the_conversation_ends_and_nothing_is_held(how, engines, fresh_seed):
    _, make = how
    scripts = {str(n): Script(some_steps(random.Random(fresh_seed + n)), settings=READ) for n in range(12)}
    for name, talk in hold(engines, scripts, make).items():
        if isinstance(talk, BaseException):
            raise AssertionError(f"script {name}: {scripts[name].steps}") from talk
        talk.check_always()
        wrong = [frame.error for frame in of(talk.up, ErrorFrame) if "unknown voice" not in frame.error]
        assert not wrong, scripts[name].steps


async def one_behind_the_other(service, *scripts: Script) -> list[float]:
    return [(await Talk(service, script).run()).heard_s for script in scripts]


@pytest.mark.slow
def test_a_service_speaks_in_a_second_pipeline(how, engines):
    """And nothing of the first is left in it, however that one ended."""
    mode, make = how
    begun = [START(), *tokens("Hello there. How are"), until(TTSAudioRawFrame)]

    async def all_of_them() -> list[list[float]]:
        firsts = [Script([*begun, *end]) for end in ([], [StopFrame()], [CancelFrame()])]
        more = [Script(turn("Hello.")), Script(turn("Yes."))]
        return await asyncio.gather(*(one_behind_the_other(make(first), first, *more) for first in firsts))

    for _first, *heard in asyncio.run(all_of_them()):
        for seconds, text in zip(heard, ("Hello.", "Yes."), strict=True):
            wanted = expected_s(engines[0], text, mode)
            assert wanted - 0.01 <= seconds <= wanted + 0.05


def test_what_cannot_work_is_refused(engines):
    for options, message in (
        ({"reuse_context_id_within_turn": False, "text_aggregation_mode": TOKEN}, "each token an utterance"),
        ({"stop_frame_timeout_s": 0}, "more than 0 seconds, got 0"),
    ):
        for service, where in ((MegakernelTTSService, {"engine": engines[0]}), (SERVICES["remote"], {"url": "ws://x"})):
            with pytest.raises(RequestError, match=message):
                service(**where, **options)
