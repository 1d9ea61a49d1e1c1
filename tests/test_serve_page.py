"""The page of `serve --ui` in a real browser: what it says is what the engine says, and nobody else gets in by it."""

import base64
import hashlib
import json
import random
import re
import shutil
import wave
from contextlib import contextmanager

import numpy as np
import pytest
from kept import Kept
from serving import (
    PATIENCE_S,
    TEXT,
    Running,
    cloning,
    connect,
    get,
    places_taken,
    post,
    ready,
    recording,
    running,
    said,
    same,
    small_demo,
    until,
)
from waiting import slow_case
from websockets.exceptions import InvalidStatus

from qwen_megakernel import TTSEngine, Voice, cli
from qwen_megakernel.server import app as serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --use-fake-device-for-media-stream --use-fake-ui-for-media-stream"
)
LONG = " ".join([TEXT] * 8)
TOKEN = "a secret/of ours?~"
WATCH = """
    Object.assign(window, { played: [], stopped: 0, violations: [], states: [] });
    addEventListener("DOMContentLoaded", () => {
      const state = document.getElementById("state");
      new MutationObserver(() => states.push(state.textContent)).observe(state, { childList: true });
    });
    addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
    const { start, stop } = AudioBufferSourceNode.prototype;
    AudioBufferSourceNode.prototype.start = function (when) {
      const samples = Array.from(this.buffer.getChannelData(0), (sample) => 32768 * sample);
      played.push({ at: when * this.context.sampleRate, now: this.context.currentTime, samples });
      if (window.slow) this.playbackRate.value = 0.01;  // it never ends by itself, however late the next chunk comes
      return start.call(this, when);
    };
    AudioBufferSourceNode.prototype.stop = function () { stopped += 1; return stop.call(this); };
"""


def demo() -> Kept:
    return small_demo(max_positions=600)


@pytest.fixture(scope="module")
def server():
    with ready(demo, ui=True) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


class Page:
    """The page as its user sees it. Whatever it asks of others, breaks or is forbidden fails the test."""

    def __init__(self, page):
        self.page, self.asked_for, self.problems, self.sent = page, [], [], []
        page.set_default_timeout(1000 * PATIENCE_S)
        page.add_init_script(WATCH)
        page.on("request", lambda request: self.asked_for.append(request.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        page.on("websocket", self._listen)

    def _listen(self, websocket) -> None:
        self.asked_for.append(websocket.url.replace("ws", "http", 1))
        websocket.on("framesent", lambda payload: self.sent.append(json.loads(payload)))

    def button(self, name: str):
        return self.page.get_by_role("button", name=name, exact=True)

    def click(self, name: str) -> None:
        self.button(name).click()

    def text(self, name: str) -> str:
        return self.page.inner_text(f"#{name}")

    def expect(self, name: str, words: str) -> None:
        from playwright.sync_api import expect

        expect(self.page.locator(f"#{name}")).to_have_text(re.compile(words), timeout=1000 * PATIENCE_S)

    def ready(self) -> None:
        """Connected, and nothing is said or heard."""
        self.expect("state", "^ready$")

    def speak(self, text: str = TEXT, **fields) -> None:
        self.fill(text=text, **fields)
        self.click("Speak")

    def say(self, text: str = TEXT, **fields) -> bytes:
        """The PCM of what it then offers, when all of it is here."""
        self.speak(text, **fields)
        self.expect("rtf", r"^\d")
        return self.pcm()

    def fill(self, **fields) -> None:
        for name, value in fields.items():
            self.page.fill(f"#{name}", str(value))

    def send_it(self, way: str) -> None:
        self.page.get_by_label(way).check()

    def pcm(self) -> bytes:
        """Of the WAV that it offers."""
        with self.page.expect_download() as download:
            self.click("Download WAV")
        with wave.open(str(download.value.path())) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
            return file.readframes(file.getnframes())

    def texts(self) -> list[dict]:
        return [message for message in self.sent if message["type"] == "text"]


@pytest.fixture
def visit(browser):
    """visit(server) -> Page in this state, of a server that is ready: the browser's console calls a 503 an error."""

    @contextmanager
    def visit(server: Running, state: str = "ready", script: str = "", **options):
        until(lambda: server.service.state == "ready")
        seen = Page(browser.new_page(viewport={"width": 900, "height": 900}, **options))
        seen.page.add_init_script(script)
        seen.page.goto(server.url)
        seen.expect("state", f"^{state}$")
        yield seen
        assert not seen.problems and not seen.page.evaluate("violations")
        assert seen.asked_for and all(url.startswith(server.url) for url in seen.asked_for)
        seen.page.close()

    return visit


# ---------------------------------------------------------------- what it says


def test_it_says_and_plays_what_the_engine_says(server, visit, fresh_seed):
    with visit(server) as seen:
        names = seen.page.locator("#voice option").all_inner_texts()
        assert names == list(server.service.engine.speakers)
        assert not seen.page.is_visible("#instructions"), "the demo takes none"
        seen.page.select_option("#voice", "max")
        seen.page.select_option("#language", "english")
        truth = said(server, seed=fresh_seed, speaker="max", language="english")
        assert seen.say(seed=fresh_seed) == truth
        seen.ready()
        assert "speaking" in seen.page.evaluate("states")
        played = seen.page.evaluate("played")
        heard = np.concatenate([chunk["samples"] for chunk in played])
        assert np.abs(heard).max() > 1000 and heard.astype("<i2").tobytes() == truth
        for one, following in zip(played, played[1:], strict=False):
            late = following["now"] * 24000 >= one["at"] + len(one["samples"]) - 128
            assert late or abs(following["at"] - one["at"] - len(one["samples"])) < 1e-3, "a gap"
        assert float(seen.text("seconds")) == round(len(truth) / 48000, 2)
        assert int(seen.text("frames")) == round(len(truth) / 2 / 1920) and int(seen.text("ttfc")) > 0
        assert seen.text("seed-used") == str(fresh_seed) and seen.text("sent") == TEXT
        assert len(seen.texts()) == 1


@pytest.mark.slow
def test_a_random_seed_is_shown_and_says_the_same_again(server, visit):
    with visit(server) as seen:
        first, seed = seen.say("Hello."), seen.text("seed-used")
        seen.click("Keep the seed")
        seen.click("Speak")  # while the first is still heard
        seen.expect("rtf", r"^\d")
        assert seen.text("seed-used") == seed and seen.pcm() == first == said(server, "Hello.", int(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, pieces",
    [
        (f" {TEXT}\n", ["Hello", " there,", " how", " are", " you", " today?"]),
        ("你好 world。", ["你", "好", " world", "。"]),
    ],
    ids=["words", "characters"],
)
def test_a_text_that_is_dripped_in_is_the_streaming_layout(server, visit, text, pieces):
    with visit(server) as seen:
        seen.send_it("word by word")
        seen.speak(text, seed=5)
        seen.expect("message", "^$")
        seen.ready()
        assert [message["text"] for message in seen.texts()] == pieces
        assert same(seen.pcm(), said(server, text.strip(), non_streaming_mode=False))
        assert seen.text("rtf") == "–", "it would count the waiting for words"


@pytest.mark.slow
def test_words_are_sent_while_they_are_typed(server, visit):
    with visit(server) as seen:
        seen.send_it("while I type")
        seen.fill(seed=5)
        assert seen.button("Finish").is_disabled()
        seen.page.focus("#text")
        seen.page.evaluate("document.getElementById('text').select()")
        seen.page.keyboard.type("Hello thr")
        seen.page.keyboard.press("Backspace")
        seen.page.keyboard.type("ere, how")
        seen.page.keyboard.press("Home")
        seen.page.keyboard.type("x")
        seen.expect("message", "cannot be changed")
        assert seen.page.input_value("#text") == "Hello there, "
        seen.page.keyboard.type("how are you today?")
        seen.click("Finish")
        seen.ready()
        assert [message["text"] for message in seen.texts()] == ["Hello ", "there, ", "how ", "are ", "you ", "today?"]
        assert same(seen.pcm(), said(server, non_streaming_mode=False))
        assert seen.page.input_value("#text") == "" and seen.text("sent") == TEXT


@pytest.mark.slow
def test_stop_silences_at_once_and_the_next_one_is_whole(server, visit):
    cancelled = server.service.engine.metrics()["cancelled"]
    with visit(server) as seen:
        seen.page.evaluate("slow = true")
        seen.speak(LONG, seed=5)
        seen.expect("seconds", r"^[1-9]")
        seen.click("Stop")
        seen.ready()
        assert seen.text("message") == "Stopped." and seen.page.evaluate("stopped") > 0
        server.at_rest()
        assert server.service.engine.metrics()["cancelled"] == cancelled + 1
        made = seen.pcm()
        assert said(server, LONG, max_frames=len(made) // 3840 + 16).startswith(made)
        seen.click("Speak")
        seen.expect("seconds", r"^[1-9]")
        before = seen.page.evaluate("stopped")
        assert seen.say() == said(server), "which interrupts"
        assert seen.page.evaluate("stopped") > before
        seen.page.keyboard.press("Escape")
        seen.ready()
    server.at_rest()


def test_what_cannot_be_said_is_told_in_words(server, visit):
    engine = server.service.engine
    with visit(server) as seen:
        seen.speak(" ")
        seen.expect("message", "no text")
        for seed in ("-1", "1.5", str(2**53), "x"):
            seen.speak(seed=seed)
            seen.expect("message", "whole number")
        assert not seen.sent
        seen.page.evaluate("document.getElementById('voice').options[0].value = '<img src=x>'")
        seen.speak(seed="")
        seen.expect("message", "unknown voice '<img src=x>'")
        with places_taken(engine, 8):
            seen.page.select_option("#voice", "max")
            seen.click("Speak")
            seen.expect("message", "busy")
        server.at_rest()
        seen.click("Speak")
        seen.expect("rtf", r"^\d")
        assert seen.text("message") == ""


@pytest.mark.slow
def test_it_comes_back_with_its_server(browser, fresh_seed):
    """Which is away, loads its model, and is there."""
    with running(demo, ui=True) as server:
        until(lambda: server.service.state == "ready")
        page = browser.new_page()
        page.add_init_script(WATCH)
        page.goto(server.url)
        seen = Page(page)
        seen.ready()
        seen.speak(LONG)
        seen.expect("seconds", r"^\d")
    seen.expect("state", "not connected")
    assert seen.button("Speak").is_disabled()
    seen.expect("message", "cannot be reached. Trying again")
    with running(demo, port=server.port, ui=True) as server:
        seen.expect("state", "ready|speaking")
        assert seen.say(seed=fresh_seed) == said(server, seed=fresh_seed)
    page.close()


# ---------------------------------------------------------------- where there is no sound


BROKEN = "window.AudioContext = function () { throw Error() }"


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["delete window.AudioContext", BROKEN])
def test_without_sound_the_figures_and_the_download_remain(server, visit, fresh_seed, missing):
    with visit(server, script=missing) as seen:
        silent = waveform(seen)
        assert seen.say(seed=fresh_seed) == (truth := said(server, seed=fresh_seed))
        seen.ready()
        seen.expect("note", "cannot play sound")
        assert float(seen.text("seconds")) == round(len(truth) / 48000, 2) and int(seen.text("ttfc")) > 0
        assert waveform(seen) != silent and seen.text("message") == "" and seen.page.evaluate("played") == []
        seen.speak(LONG)
        seen.expect("seconds", r"^[1-9]")
        seen.click("Stop")
        seen.ready()
    server.at_rest()


def waveform(seen: Page) -> str:
    return seen.page.evaluate("document.getElementById('wave').toDataURL()")


BLOCKED = """
    window.AudioContext = class extends AudioContext {
      constructor(options) { super(options); this.suspend(); }
      resume() { return window.allowed ? super.resume() : %s; }
    };
"""
REFUSALS = {
    "refused": "Promise.reject(new DOMException('no', 'NotAllowedError'))",
    "unanswered": "new Promise(() => {})",
}


TAPS = [("refused", "mouse"), ("refused", "finger"), ("refused", "key"), ("unanswered", "mouse")]


@pytest.mark.slow
@pytest.mark.parametrize("refusal, tap", [TAPS[0], *(slow_case(*pair) for pair in TAPS[1:])])
def test_blocked_sound_is_told_and_heard_from_its_beginning_after_a_tap(server, visit, fresh_seed, refusal, tap):
    with visit(server, script=BLOCKED % REFUSALS[refusal], has_touch=True) as seen:
        assert seen.text("note") == ""
        seen.speak(LONG)
        seen.expect("note", "blocks the sound. Tap")
        seen.expect("seconds", r"^[1-9]")
        seen.click("Stop")
        seen.ready()
        server.at_rest()
        before = seen.page.evaluate("played.length")
        seen.speak("Hello.", seed=fresh_seed)
        seen.expect("rtf", r"^\d")
        seen.ready()  # all of it is here, though none was heard
        seen.expect("note", "blocks the sound. Tap")
        assert seen.pcm() == said(server, "Hello.", fresh_seed)
        seen.page.evaluate("allowed = true, states.length = 0")
        {
            "mouse": lambda: seen.page.mouse.click(2, 2),
            "finger": lambda: seen.page.touchscreen.tap(2, 2),
            "key": lambda: seen.page.keyboard.press("Shift"),
        }[tap]()
        until(lambda: seen.page.evaluate("states.includes('speaking')"))
        seen.expect("note", "^$")
        seen.ready()  # it was heard
        chunks = seen.page.evaluate("played")[before:]
        assert chunks[0]["at"] > 24000 * chunks[-1]["now"], "the clock was past its beginning before the tap"


# ---------------------------------------------------------------- cloning


@pytest.mark.slow
def test_it_clones_what_is_chosen_or_recorded(tiny, tmp_path, visit):
    with cloning(tiny, ui=True, allow_upload=True, voices=tmp_path) as server, visit(server) as seen:
        seen.page.get_by_text("Clone a voice").click()
        assert seen.button("Make the voice").is_disabled() and seen.button("Speak").is_disabled()
        choose = lambda name, data: seen.page.set_input_files(  # noqa: E731
            "#file", {"name": name, "mimeType": "audio/wav", "buffer": data}
        )
        choose("<b>", b"no sound")
        seen.expect("reference", "cannot read <b>")
        choose("long.wav", recording(seconds=61, rate=8000))
        seen.expect("reference", "more than 60")
        assert seen.button("Make the voice").is_disabled()
        choose("me.wav", recording(rate=44100, channels=2))
        seen.expect("reference", r"me\.wav: 1\.0 s")
        seen.fill(name="ann", said="Hello.")
        seen.click("Make the voice")
        seen.expect("reference", "voice ann is made")
        assert seen.page.input_value("#voice") == "ann"
        voice = Voice.load(tmp_path / "ann.safetensors")
        assert seen.say(seed=5) == said(server, speaker=None, voice=voice)
        seen.click("Make the voice")
        seen.expect("reference", "'ann' already")

        seen.click("Record")
        seen.expect("reference", "Recording")
        seen.page.wait_for_timeout(2500)  # a voice needs half a second, and a busy machine records less than it hears
        seen.click("Stop recording")
        seen.expect("reference", r"the recording: \d\.\d s")
        seen.fill(name="ben", said="")
        seen.click("Make the voice")
        seen.expect("reference", "voice ben is made")
        assert (tmp_path / "ben.safetensors").is_file()
        assert seen.page.locator("#voice option").all_inner_texts() == ["ann", "ben"]
        seen.problems[:] = [problem for problem in seen.problems if "400" not in problem]  # the name that was taken


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", slow_case("elsewhere")])
def test_without_a_voice_nothing_can_be_said_until_one_was_made(tiny, tmp_path, visit, fresh_seed, where):
    with cloning(tiny, ui=True, allow_upload=True, voices=tmp_path) as server, visit(server) as seen:
        seen.expect("note", "no voice yet")
        assert seen.page.locator("#voice option").count() == 0 and seen.page.locator("#voice").is_disabled()
        assert seen.button("Speak").is_disabled()
        seen.page.focus("#text")
        seen.page.keyboard.press("Control+Enter")
        seen.send_it("while I type")
        seen.page.keyboard.type("Hello there, ")
        seen.send_it("whole")
        assert not seen.texts()
        if where == "here":
            seen.page.get_by_text("Clone a voice").click()
            seen.page.set_input_files("#file", {"name": "a.wav", "mimeType": "audio/wav", "buffer": recording()})
            seen.fill(name="ann")
            seen.click("Make the voice")
        else:
            made = {"name": "ann", "audio": base64.b64encode(recording()).decode()}
            assert post(f"{server.url}/v1/voices", json=made).status_code == 201
            seen.page.evaluate("dispatchEvent(new Event('focus'))")  # as when its user comes back to the page
        seen.expect("note", "^$")
        assert seen.page.input_value("#voice") == "ann"
        voice = Voice.load(tmp_path / "ann.safetensors")
        assert seen.say(seed=fresh_seed) == said(server, seed=fresh_seed, speaker=None, voice=voice)


@pytest.mark.slow
def test_a_model_that_needs_no_voice_offers_the_default_one(tiny, visit):
    folder = tiny("voice_design", size="tiny", eos_gain=2.0)
    load = lambda: TTSEngine.load(folder, device="cpu", max_streams=2, max_positions=512)  # noqa: E731
    with running(load, ui=True, allow_upload=True) as server, visit(server) as seen:
        seen.ready()
        assert seen.page.locator("#voice option").all_inner_texts() == ["default"] and seen.text("note") == ""
        seen.fill(text="Hello.", instructions="A warm, low voice.")
        seen.click("Speak")
        seen.expect("rtf", r"^\d")
        assert seen.texts()[0]["instructions"] == "A warm, low voice."


def test_where_nobody_may_clone_it_says_so(server, visit):
    with visit(server) as seen:
        seen.page.get_by_text("Clone a voice").click()
        assert seen.page.is_visible("#no-clone") and not seen.page.is_visible("#cloner")
    assert get(f"{server.url}/v1/voices").json()["cloning"] is False


# ---------------------------------------------------------------- who gets in


@pytest.fixture(scope="module")
def locked():
    with ready(demo, ui=True, token=TOKEN) as server:
        yield server


def test_a_token_is_asked_for_and_kept_nowhere(locked, visit, caplog):
    with caplog.at_level("DEBUG", "qwen_megakernel"), visit(locked, "locked") as seen:
        assert not seen.page.is_visible("#desk")
        for wrong, words in (("a secret", "does not know"), ("gäste", "ASCII")):
            seen.fill(token=wrong)
            seen.click("Open")
            seen.expect("door-message", words)
        seen.fill(token=TOKEN)
        seen.click("Open")
        seen.ready()
        assert seen.say("Hello.", seed=5) == said(locked, "Hello.")
        kept = "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie, location.href]"
        assert TOKEN not in "".join(seen.page.evaluate(kept)) + seen.page.content() + "".join(seen.asked_for)
        seen.page.reload()
        seen.expect("state", "locked")
        seen.problems[:] = [problem for problem in seen.problems if "401" not in problem]
    assert TOKEN not in caplog.text and bearer(TOKEN) not in caplog.text


def bearer(token: str) -> str:
    return "bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


def test_a_socket_takes_the_token_as_a_subprotocol_of_its_own_pages(locked):
    with connect(locked.socket_url, origin=locked.url, subprotocols=["speech", bearer(TOKEN)]) as line:
        assert line.subprotocol == "speech", "the token is not said back"
        assert json.loads(line.recv())["type"] == "hello"
    with connect(locked.socket_url, additional_headers={"Authorization": f"Bearer {TOKEN}"}) as line:
        assert line.subprotocol is None and json.loads(line.recv())["type"] == "hello"


HOSTILE = {
    "nothing": [],
    "the other one": ["speech"],
    "wrong": ["speech", bearer("wrong")],
    "empty": ["speech", "bearer."],
    "a part": ["speech", bearer(TOKEN)[:-1]],
    "more": ["speech", bearer(TOKEN) + "A"],
    "in letters of another case": ["speech", bearer(TOKEN).swapcase()],
    "without its word": ["speech", bearer(TOKEN).removeprefix("bearer.")],
    "many": ["speech", *(bearer(str(i)) for i in range(100))],
}


OTHERS = [None, "https://evil.example", "null", "http://["]


@pytest.mark.parametrize("offered", [*HOSTILE.values(), None], ids=[*HOSTILE, "the right one, from another page"])
def test_other_subprotocols_and_other_sites_pages_open_nothing(locked, offered):
    for origin in OTHERS if offered is None else [locked.url]:
        subprotocols = ["speech", bearer(TOKEN)] if offered is None else offered or None
        with pytest.raises(InvalidStatus) as refused:
            connect(locked.socket_url, origin=origin, subprotocols=subprotocols)
        assert refused.value.response.status_code == 401 and TOKEN not in str(refused.value.response.body)


@pytest.mark.parametrize("value", [b"\xff\xfe", b"bearer.\xed\xa0\x80", b"speech, b\xe4r", b","])
def test_broken_subprotocols_are_no_errors_of_ours(locked, value):
    import socket

    lines = [b"GET /v1/audio/speech/socket HTTP/1.1", f"Host: 127.0.0.1:{locked.port}".encode(), b"Upgrade: websocket"]
    lines += [b"Connection: Upgrade", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    lines += [f"Origin: {locked.url}".encode(), b"Sec-WebSocket-Protocol: " + value, b"", b""]
    with socket.create_connection(("127.0.0.1", locked.port), timeout=PATIENCE_S) as line:
        line.sendall(b"\r\n".join(lines))
        assert line.recv(4096).split()[1] in (b"400", b"401")


def test_without_the_token_only_the_page_itself_is_served(locked):
    page = get(locked.url)
    assert page.status_code == 200 and TOKEN not in page.text
    for path in ("//", "/index.html", "/%2e", "/page.html", "/v1/voices", "/openapi.json"):
        assert get(locked.url + path).status_code == 401, path
    headers = {"Sec-WebSocket-Protocol": f"speech, {bearer(TOKEN)}", "Origin": locked.url}
    assert get(f"{locked.url}/v1/voices", headers=headers).status_code == 401, "HTTP takes no subprotocol for it"
    assert post(locked.url, content=b"x" * 1000).status_code == 413
    assert post(locked.url).status_code == 405
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{locked.port}/", origin=locked.url)
    assert refused.value.response.status_code == 401


def test_without_a_token_the_page_is_for_localhost_alone(server):
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        assert get(server.url, headers=headers).status_code == 403
    with pytest.raises(InvalidStatus) as refused:
        connect(server.socket_url, origin="https://evil.example", subprotocols=["speech"])
    assert refused.value.response.status_code == 403


def test_the_page_may_reach_its_own_server_and_nothing_else(server, browser):
    headers = get(server.url).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and "unsafe" not in str(policy)
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    page = browser.new_page()
    page.add_init_script(WATCH)
    page.goto(server.url)
    page.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0)")
    page.evaluate("document.body.append(Object.assign(new Image(), { src: '/x.png' }))")
    page.evaluate("import('data:text/javascript,played.push(1)').catch(() => 0)")
    for way in ("body.innerHTML = '<b>x</b>'", "body.setAttribute('onclick', 'played.push(1)')"):
        assert "Trusted" in page.evaluate(
            f"(() => {{ try {{ document.{way} }} catch (error) {{ return `${{error}}` }} }})()"
        )
    until(lambda: page.evaluate("violations.length >= 5"))
    broken = set(page.evaluate("violations"))
    assert broken == {"connect-src", "img-src", "script-src-elem", "require-trusted-types-for"}
    assert page.evaluate("played") == []
    page.close()


SWAGGER = {
    "js": b"""
        window.SwaggerUIBundle = async ({ url, dom_id }) => {
          const told = await (await fetch(url)).json();
          document.querySelector(dom_id).textContent = Object.keys(told.paths).join(" ");
          fetch("http://127.0.0.1:9/").catch(() => 0);
        };
    """,
    "css": b"body { font-size: 7px }",
}


@pytest.mark.parametrize("there", ["the file", slow_case("another file"), slow_case("nothing")])
def test_docs_shows_the_api_and_its_foreign_script_reaches_nobody_else(server, browser, there):
    """With a script in Swagger UI's place, whose digest the page gets: no test fetches the real one."""
    page, asked_for = browser.new_page(), []
    page.add_init_script(WATCH)
    page.on("request", lambda request: asked_for.append(request.url))
    digests = {kind: base64.b64encode(hashlib.sha384(body).digest()).decode() for kind, body in SWAGGER.items()}

    def show(route) -> None:
        answer = route.fetch()
        text, done = re.subn(
            r"\.(js|css)\" integrity=\"sha384-[\w+/]{64}\"",
            lambda m: f'.{m[1]}" integrity="sha384-{digests[m[1]]}"',
            answer.text(),
        )
        assert done == 2
        route.fulfill(response=answer, body=text if there == "the file" else answer.text())

    def give(route) -> None:
        kind = route.request.url.rpartition(".")[2]
        headers = {
            "access-control-allow-origin": "*",
            "content-type": "text/css" if kind == "css" else "text/javascript",
        }
        route.abort() if there == "nothing" else route.fulfill(body=SWAGGER[kind], headers=headers)

    page.route("**/docs", show)
    page.route("https://cdn.jsdelivr.net/**", give)
    page.goto(f"{server.url}/docs")
    if there == "the file":
        until(lambda: page.evaluate("violations.length"))  # wait_for_function uses eval, which the policy forbids
        assert page.evaluate("violations") == ["connect-src"]
        assert "/v1/audio/speech /v1/audio/speech/batch /v1/models" in page.inner_text("#swagger-ui")
        assert page.evaluate("getComputedStyle(document.body).fontSize") == "7px"
    else:
        assert "which needs the internet. /openapi.json says the same" in page.inner_text("#swagger-ui")
    page.close()
    hosts = {url.split("/")[2] for url in asked_for}
    assert hosts == {"cdn.jsdelivr.net", f"127.0.0.1:{server.port}"}


def test_docs_takes_two_files_of_one_version_and_no_other(server):
    """Whatever else that network holds, the page's policy and its digests refuse it."""
    shown = get(f"{server.url}/docs")
    files = re.findall(r'"(https:[^"]+)" integrity="sha384-[\w+/]{64}" crossorigin="anonymous"', shown.text)
    assert [re.sub(r"@\d+\.\d+\.\d+/", "@VERSION/", url) for url in files] == [
        "https://cdn.jsdelivr.net/npm/swagger-ui-dist@VERSION/swagger-ui.css",
        "https://cdn.jsdelivr.net/npm/swagger-ui-dist@VERSION/swagger-ui-bundle.js",
    ]
    assert sorted(re.findall(r"https:[^\s;]+", shown.headers["content-security-policy"])) == sorted(files)
    assert get(f"{server.url}/docs", headers={"host": "evil.example"}).status_code == 403


def test_without_the_option_there_is_no_page():
    with running(demo) as server:
        assert get(server.url).status_code == 404
    with running(demo, token=TOKEN) as server:
        assert get(server.url).status_code == 401


def test_the_option_reaches_the_server(monkeypatch):
    asked = []
    monkeypatch.setattr(serve, "make_app", lambda _load, options, **_more: asked.append(options.ui))
    monkeypatch.setattr(serve, "serve", lambda app, listener: listener.close() or 0)
    assert cli.main(["serve", "--port", "0", "--ui"]) == cli.main(["serve", "--port", "0"]) == 0
    assert asked == [True, False]


# ---------------------------------------------------------------- how it looks


@pytest.mark.parametrize("scheme", ["light", slow_case("dark")])
def test_on_a_phone_all_of_it_can_be_reached_with_a_thumb(server, visit, scheme):
    with visit(server, color_scheme=scheme, has_touch=True) as seen:
        page = seen.page
        page.set_viewport_size({"width": 390, "height": 844})
        seen.ready()
        seen.fill(text="Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft " * 3)
        page.get_by_role("button", name="Speak").tap()
        seen.expect("seed-used", r"^\d+$")
        page.get_by_text("Clone a voice").tap()
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        page.evaluate("for (const id of ['cloner', 'once', 'door', 'how']) document.getElementById(id).hidden = false")
        page.evaluate("document.getElementById('speakers').checked = true, refresh()")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        sizes = "button, select, textarea, summary, input:not([type=radio]), fieldset label"
        low = page.locator(sizes).evaluate_all(
            "all => all.filter((one) => one.checkVisibility() && one.getBoundingClientRect().height < 44)"
            ".map((one) => one.outerHTML)"
        )
        assert not low
        assert page.locator("input, select, textarea").evaluate_all("all => all.every(one => one.labels.length)")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor").startswith("rgb(2")
        assert light == (scheme == "light")
        seen.click("Stop")


@pytest.mark.slow
def test_long_words_of_users_and_servers_fit_on_a_narrow_phone(server, visit):
    word = "W" * 90
    with visit(server) as seen:
        page = seen.page
        page.set_viewport_size({"width": 320, "height": 700})
        seen.ready()
        page.evaluate("for (const id of ['cloner', 'door']) document.getElementById(id).hidden = false")
        page.get_by_text("Clone a voice").click()
        page.get_by_text("Show the request").click()
        page.evaluate(f"document.getElementById('voice').add(new Option('{word}', '{word}', true, true), 0)")
        seen.speak(word)
        seen.expect("message", "unknown voice 'WWW")
        seen.expect("sent", word)
        page.set_input_files("#file", {"name": f"{word}.wav", "mimeType": "audio/wav", "buffer": recording()})
        seen.expect("reference", word)
        page.evaluate(f"for (const id of ['model', 'door-message']) document.getElementById(id).textContent = '{word}'")
        assert page.evaluate("document.documentElement.scrollWidth") <= 320


@pytest.mark.slow
def test_random_typing_loses_nothing(server, visit, fresh_seed):
    """Of whatever is typed, with typos taken back, the joined pieces are what the box held."""
    rng = random.Random(fresh_seed)
    with visit(server) as seen:
        seen.send_it("while I type")
        seen.page.focus("#text")
        seen.page.evaluate("document.getElementById('text').select()")
        text = ""
        for _ in range(30):
            key = rng.choice("ab  ,é好")
            seen.page.keyboard.type(key)
            text += key
            if key in "ab" and rng.random() < 0.3:
                seen.page.keyboard.press("Backspace")
                text = text[:-1]
        if not text.strip():
            text += "a "
            seen.page.keyboard.type("a ")
        if seen.button("Finish").is_enabled():
            seen.click("Finish")
            assert "".join(message["text"] for message in seen.texts()) == text
        seen.page.keyboard.press("Escape")
        seen.ready()
