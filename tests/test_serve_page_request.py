"""The page of `serve --ui`: what it asks of HTTP, what its programs send, and who uses it without a mouse or an eye."""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import wave
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import serving
from serving import TEXT, cloning, places_taken, ready, recording, said, until
from test_serve_page import LONG, TOKEN, Page, browser, demo, visit  # noqa: F401 (two fixtures)
from waiting import PATIENCE_S, slow_case

from qwen_megakernel.server.openai.bodies import SPEECH

NASTY = "It's \"5 $HOME\" `id` $(id) \\n \\\\ %s {x} ${y} !! <b>&amp; é 你好 😀\n\ttrue 'EOF'\u00a0\u200d\u2028 \\'"
CLONED = ("ref_audio", "ref_text", "x_vector_only_mode")


class Notebook:
    """ASGI middleware before the guard: it notes each request for speech, and takes from it what clones, so that the
    demo can speak it.

    Attributes:
        bodies, headers: of the requests, in their order.
        cut: bytes of an answer after which the connection breaks; None: it does not.
        more: fields that the app is given besides.
    """

    def __init__(self):
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.cut: int | None = None
        self.more: dict = {}

    def __call__(self, app):
        async def noting(scope, receive, send) -> None:
            if scope.get("path") != SPEECH or scope.get("method") != "POST":
                return await app(scope, receive, send)
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            self.bodies.append(json.loads(body))
            self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
            told = {"voice": "ada"} | {name: value for name, value in self.bodies[-1].items() if name not in CLONED}
            told |= self.more
            less, passed, sent = json.dumps(told).encode(), False, 0

            async def receive_less():
                nonlocal passed
                if passed:
                    return await receive()
                passed = True
                return {"type": "http.request", "body": less, "more_body": False}

            async def send_part(message) -> None:
                nonlocal sent
                sent += len(message.get("body", b""))
                await send(message)
                if self.cut is not None and sent > self.cut:
                    raise ConnectionError("cut by the test")

            headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
            headers.append((b"content-length", str(len(less)).encode()))
            await app(scope | {"headers": headers}, receive_less, send_part)

        return noting


@contextmanager
def noted(**options):
    """A server of the demo with a page, and its notebook."""
    notebook, make_app = Notebook(), serving.make_app

    def make(*args, **others):
        app = make_app(*args, **others)
        app.add_middleware(notebook)
        return app

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving, "make_app", make)
            server = stack.enter_context(ready(demo, ui=True, **options))
        yield server, notebook


@pytest.fixture(scope="module")
def noting():
    with noted() as (server, notebook):
        yield server, notebook


def allow_clones(seen: Page) -> None:
    """The page thinks that its server takes recordings with a request."""

    def answer(route) -> None:
        told = route.fetch()
        route.fulfill(response=told, json=told.json() | {"clones": True})

    seen.page.route("**/v1/voices", answer)
    seen.page.evaluate("listVoices()")


def choose_recording(seen: Page, data: bytes) -> None:
    seen.page.get_by_text("Clone a voice").click()
    seen.page.set_input_files("#file", {"name": "me.wav", "mimeType": "audio/wav", "buffer": data})
    seen.expect("reference", "me.wav")
    seen.click("Speak with it, without a name")
    seen.expect("reference", "next texts")


def pcm_of(file: bytes) -> bytes:
    with wave.open(io.BytesIO(file)) as opened:
        assert (opened.getframerate(), opened.getnchannels(), opened.getsampwidth()) == (24000, 1, 2)
        return opened.readframes(opened.getnframes())


# ---------------------------------------------------------------- what HTTP takes


@pytest.mark.slow
def test_a_recording_speaks_the_next_texts_without_a_name(noting, visit):  # noqa: F811
    server, notebook = noting
    with visit(server) as seen:
        seen.page.get_by_text("Clone a voice").click()
        assert not seen.page.is_visible("#cloner")
        seen.page.get_by_text("Clone a voice").click()
        allow_clones(seen)
        choose_recording(seen, recording(rate=44100, channels=2))
        assert "only with the speaker's consent" in seen.page.inner_text("#cloner").lower()
        assert not seen.page.is_visible("#named"), "voices with a name need another option of the server"
        assert seen.page.input_value("#voice") == "the recording"
        assert seen.page.get_by_label("word by word").is_disabled() and "whole text" in seen.text("hint")
        for said_words in ("", "Good morning."):
            seen.speak(seed=5, said=said_words)
            seen.expect("state", "speaking")
            seen.ready()
            assert seen.pcm() == said(server) and seen.text("sent") == TEXT and seen.text("seed-used") == "5"
            body = notebook.bodies[-1]
            with seen.page.expect_download() as download:
                seen.page.get_by_text("Show the request").click()
                seen.click("Save recording.wav")
            seen.page.get_by_text("Show the request").click()
            file = download.value.path().read_bytes()
            assert base64.b64decode(body.pop("ref_audio")) == file and len(pcm_of(file)) == 48000
            rest = {"ref_text": said_words} if said_words else {"x_vector_only_mode": True}
            fixed = {"model": "demo", "input": TEXT, "language": "auto", "seed": 5, "response_format": "pcm"}
            assert body == fixed | rest
        assert not seen.texts(), "the socket is not used"
        seen.page.select_option("#voice", "max")
        assert seen.say(seed=5) == said(server, speaker="max") and len(seen.texts()) == 1
        seen.page.set_input_files("#file", {"name": "x", "mimeType": "audio/wav", "buffer": b"no sound"})
        seen.expect("reference", "cannot read")
        assert "the recording" not in seen.page.locator("#voice option").all_inner_texts()


@pytest.mark.slow
def test_tags_go_in_at_the_cursor_and_several_speakers_are_asked_for(noting, visit):  # noqa: F811
    server, notebook = noting
    with visit(server) as seen:
        assert not seen.page.is_visible("#names")
        seen.send_it("word by word")
        seen.page.get_by_role("switch", name="Several speakers").check()
        assert seen.page.get_by_label("whole").is_checked()
        seen.fill(text="Hello. Hi.", seed=5)
        seen.page.evaluate("document.getElementById('text').setSelectionRange(0, 0)")
        seen.click("[ada]")
        seen.page.evaluate("document.getElementById('text').setSelectionRange(13, 16)")
        seen.click("[pause 1s]")
        seen.click("[max]")
        seen.page.keyboard.type("Bye.")
        text = "[ada] Hello. [pause 1s] [max] Bye."
        assert seen.page.input_value("#text") == text
        seen.page.keyboard.press("Control+Enter")
        until(lambda: notebook.bodies and notebook.bodies[-1]["input"] == text)
        assert notebook.bodies[-1]["speakers"] is True and notebook.bodies[-1]["voice"] == "ada"
        seen.click("Stop")
        seen.ready()
        seen.page.get_by_role("switch", name="Several speakers").uncheck()
        assert seen.page.get_by_label("word by word").is_enabled() and not seen.page.is_visible("#names")
        seen.page.focus("#text")
        for _ in range(8):  # each tag and each letter that was typed, if the browser takes them one by one
            if seen.page.input_value("#text") != "Hello. Hi.":
                seen.page.keyboard.press("Control+z")
        assert seen.page.input_value("#text") == "Hello. Hi."
    server.at_rest()


@pytest.mark.slow
def test_http_speech_can_be_stopped_refused_and_cut(noting, visit):  # noqa: F811
    server, notebook = noting
    engine = server.service.engine
    with visit(server) as seen:
        seen.page.get_by_role("switch", name="Several speakers").check()
        cancelled = engine.metrics()["cancelled"]
        seen.speak(LONG, seed=5)
        seen.expect("seconds", r"^[1-9]")
        seen.page.keyboard.press("Escape")
        seen.ready()
        assert seen.text("message") == "Stopped."
        server.at_rest()
        assert engine.metrics()["cancelled"] == cancelled + 1
        with places_taken(engine, 8):
            seen.speak("Hello.")
            seen.expect("message", "busy")
        server.at_rest()
        notebook.cut = 100_000
        seen.speak(LONG)
        seen.expect("message", "The speech was cut")
        notebook.cut = None
        seen.speak("Hello.")
        seen.expect("message", "^$")
        until(lambda: seen.button("Download WAV").is_enabled())
        seen.ready()
        assert seen.pcm() == said(server, "Hello.")
        seen.problems[:] = [words for words in seen.problems if "429" not in words and "INCOMPLETE" not in words]


def test_a_text_file_is_loaded_into_the_box(noting, visit):  # noqa: F811
    with visit(noting[0]) as seen:
        before = seen.page.input_value("#text")

        def load(data: bytes) -> None:
            with seen.page.expect_file_chooser() as chooser:
                seen.click("Open a text file")
            chooser.value.set_files({"name": "<b>.txt", "mimeType": "text/plain", "buffer": data})

        for data, words in ((b"\xff\xfe\x00", "no text in UTF-8"), (b"a" * 4097, "4097 characters, more than 4096")):
            load(data)
            seen.expect("message", words)
            assert seen.page.input_value("#text") == before
        load("\ufeffFirst\r\nsecond: é 你好.\r\n".encode())
        seen.expect("message", "<b>.txt: 19 characters")
        assert seen.page.input_value("#text") == "First\nsecond: é 你好."
        seen.page.keyboard.press("Control+z")
        assert seen.page.input_value("#text") == before


@pytest.mark.slow
def test_a_recording_is_a_voice_for_the_page_and_for_its_program(tiny, visit, tmp_path):  # noqa: F811
    with cloning(tiny, ui=True, allow_clone=True) as server, visit(server) as seen:
        seen.expect("note", "no voice yet")
        choose_recording(seen, recording())
        seen.expect("note", "^$")
        seen.speak(seed=5)
        seen.expect("seed-used", "^5$")
        until(lambda: seen.button("Download WAV").is_enabled())
        seen.ready()
        open_request(seen)
        with seen.page.expect_download() as download:
            seen.click("Save recording.wav")
        download.value.save_as(tmp_path / "recording.wav")
        run_program("curl", shown(seen, "curl"), tmp_path)
        assert (tmp_path / "speech.wav").read_bytes()[44:] == seen.pcm() != b""


# ---------------------------------------------------------------- the programs


NODE = shutil.which("node")
RUNNERS = {
    "curl": ["bash", "-euo", "pipefail", "speech.sh"],
    "python": [sys.executable, "speech.py"],
    "javascript": [NODE, "speech.mjs"],
}
STAND_INS = """async ([program, recording]) => {
    const files = {};
    const readFile = async () => recording, writeFile = async (name, bytes) => { files[name] = bytes; };
    const run = Object.getPrototypeOf(readFile).constructor;
    await new run("readFile", "writeFile", program.replace(/^import .*$/m, ""))(readFile, writeFile);
    return Array.from(files["speech.wav"]);
}"""


def run_program(kind: str, program: str, folder, **more: str) -> None:
    """As its user would, in a folder of its own, in which speech.wav is then."""
    file = folder / RUNNERS[kind][-1]
    file.write_text(program, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | more
    done = subprocess.run(
        RUNNERS[kind], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def shown(seen: Page, kind: str) -> str:
    seen.page.locator(f"#{kind}").click()
    return seen.page.locator("#program").text_content()


def open_request(seen: Page) -> None:
    seen.page.get_by_text("Show the request").click()


def test_a_shown_program_says_what_the_page_says(noting, visit, tmp_path, fresh_seed):  # noqa: F811
    server, notebook = noting
    with visit(server) as seen:
        open_request(seen)
        seen.page.select_option("#voice", "max")
        seen.page.select_option("#language", "english")
        pcm = seen.say(seed=fresh_seed)
        run_program("curl", shown(seen, "curl"), tmp_path)
        [sent] = seen.texts()
        wanted = {name: sent[name] for name in ("voice", "language", "seed")} | {"input": sent["text"]}
        assert notebook.bodies[-1] == wanted | {"model": "demo", "response_format": "wav"}
        truth = said(server, TEXT, fresh_seed, speaker="max", language="english")
        assert (tmp_path / "speech.wav").read_bytes()[44:] == pcm == truth


@pytest.mark.slow
def test_a_shown_program_sends_what_the_page_sends(noting, visit, tmp_path, monkeypatch):  # noqa: F811
    """With every setting, and a text that no quoting may change. JavaScript runs in the page too: not everywhere is
    there a node."""
    server, notebook = noting
    monkeypatch.setattr(notebook, "more", {"max_frames": 2})  # what is sent counts, not what is said
    with visit(server) as seen:
        allow_clones(seen)
        choose_recording(seen, recording())
        seen.page.get_by_role("switch", name="Several speakers").check()
        seen.page.evaluate("document.getElementById('how').hidden = false")
        seen.fill(text=NASTY, said="true", instructions="'\"$\\", seed=2**53 - 1)
        seen.click("Speak")
        until(lambda: notebook.bodies and notebook.bodies[-1]["input"] == NASTY)
        body = notebook.bodies[-1]
        seen.click("Stop")
        open_request(seen)
        with seen.page.expect_download() as download:
            seen.click("Save recording.wav")
        file = download.value.path().read_bytes()
        (tmp_path / "recording.wav").write_bytes(file)
        kinds = [kind for kind in RUNNERS if kind != "javascript" or NODE]
        runs = [partial(run_program, kind, shown(seen, kind), tmp_path) for kind in kinds]
        arguments = [shown(seen, "javascript"), base64.b64encode(file).decode()]
        for run in [*runs, lambda: seen.page.evaluate(STAND_INS, arguments)]:
            before = len(notebook.bodies)
            run()
            assert len(notebook.bodies) == before + 1
            assert notebook.bodies[-1] == body | {"response_format": "wav"}
        assert {"ref_audio", "ref_text", "speakers", "instructions"} <= set(body) and body["seed"] == 2**53 - 1
    server.at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["word by word", "while I type"])
def test_a_program_for_text_in_pieces_asks_for_its_layout(noting, visit, way):  # noqa: F811
    with visit(noting[0]) as seen:
        open_request(seen)
        assert "non_streaming_mode" not in shown(seen, "python")
        seen.send_it(way)
        assert '"non_streaming_mode": False' in shown(seen, "python")
        seen.fill(text="Now.")
        assert '"input": "Now."' in shown(seen, "python"), "it follows the settings"
        seen.fill(seed="x")
        assert "A seed is a whole number" in shown(seen, "curl") and seen.button("Copy").is_disabled()


@pytest.mark.slow
def test_a_program_reads_the_token_and_does_not_hold_it(visit, tmp_path):  # noqa: F811
    with noted(token=TOKEN) as (server, notebook), visit(server, "locked") as seen:
        notebook.more = {"max_frames": 2}
        seen.fill(token=TOKEN)
        seen.click("Open")
        seen.ready()
        assert seen.page.evaluate("document.activeElement.id") == "text", "where one goes on"
        open_request(seen)
        for kind in RUNNERS:
            program = shown(seen, kind)
            assert TOKEN not in program and "SPEECH_TOKEN" in program and "SPEECH_TOKEN" in seen.text("needs")
            if kind != "javascript" or NODE:
                run_program(kind, program, tmp_path, SPEECH_TOKEN=TOKEN)
                assert notebook.headers[-1]["authorization"] == f"Bearer {TOKEN}"
        seen.problems[:] = [problem for problem in seen.problems if "401" not in problem]


def test_a_program_is_copied_or_selected(noting, visit):  # noqa: F811
    with visit(noting[0]) as seen:
        open_request(seen)
        seen.fill(text=NASTY)
        seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        program = shown(seen, "python")
        seen.click("Copy")
        seen.expect("copied", "Copied")
        assert seen.page.evaluate("navigator.clipboard.readText()") == program
        seen.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        program = shown(seen, "curl")
        seen.click("Copy")
        seen.expect("copied", "It is selected. Press")
        assert seen.page.evaluate("getSelection().toString()").strip() == program.strip()


# ---------------------------------------------------------------- who has no mouse, or no eye


FOCUSED = """() => {
    const one = document.activeElement, style = getComputedStyle(one), radio = one.type === "radio";
    const around = radio ? getComputedStyle(one.parentNode) : style, box = one.getBoundingClientRect();
    const seen = around.outlineStyle !== "none" && parseFloat(around.outlineWidth) >= 2;
    return [one.id || one.textContent.trim() || one.value, seen && box.width > 0 && box.height > 0];
}"""


def tabbed(seen: Page) -> list[str]:
    """What Tab reaches, from the beginning of the page to its end; each must show that it has the focus."""
    seen.page.evaluate("document.activeElement.blur(), getSelection().removeAllRanges()")
    seen.page.evaluate("document.body.tabIndex = -1, document.body.focus(), document.body.removeAttribute('tabindex')")
    reached: list[str] = []
    while True:
        seen.page.keyboard.press("Tab")
        name, visible = seen.page.evaluate(FOCUSED)
        if seen.page.evaluate("document.activeElement === document.body") or name in reached:
            return reached
        assert visible, f"nobody sees that {name} has the focus"
        reached.append(name)


def test_the_keyboard_alone_does_everything(noting, visit):  # noqa: F811
    server, _ = noting
    with visit(server) as seen:
        allow_clones(seen)
        keyboard, page = seen.page.keyboard, seen.page
        desk = ["text", "pause", "open", "speakers", "whole", "voice", "language", "seed", "speak"]
        assert tabbed(seen) == [*desk, "Show the request", "Clone a voice"]
        page.focus("#speakers")
        keyboard.press("Space")
        page.get_by_text("Show the request").focus()
        keyboard.press("Enter")
        page.get_by_text("Clone a voice").focus()
        keyboard.press("Space")
        page.set_input_files("#file", {"name": "me.wav", "mimeType": "audio/wav", "buffer": recording()})
        seen.expect("reference", "me.wav")
        names = [f"[{name}]" for name in server.service.engine.speakers]
        shown_now = ["curl", "program", "copy"]
        cloner = ["Clone a voice", "file", "record", "said", "use"]
        assert tabbed(seen) == [*desk[:4], *names, *desk[4:], "Show the request", *shown_now, *cloner]

        page.focus("#curl")
        walked = []
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "Home", "End"):
            keyboard.press(key)
            assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
            walked.append(page.evaluate("document.activeElement.id"))
            assert page.get_attribute("#program", "aria-labelledby") == walked[-1]
        assert walked == ["python", "javascript", "curl", "javascript", "curl", "javascript"]
        keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "program"

        page.focus("#use")
        keyboard.press("Enter")
        assert page.input_value("#voice") == "the recording"
        page.select_option("#voice", "ada")
        page.focus("#speakers")
        keyboard.press("Space")
        page.focus("[value=whole]")
        keyboard.press("ArrowRight")
        assert page.get_by_label("word by word").is_checked()
        keyboard.press("ArrowLeft")
        seen.fill(text=LONG)
        page.evaluate("slow = true")
        page.focus("#speak")
        keyboard.press("Enter")
        seen.expect("state", "speaking")
        keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "stop"
        keyboard.press("Space")
        seen.ready()
        assert page.evaluate("document.activeElement.id") == "speak", "a button that goes leaves its focus behind"
        keyboard.press("Enter")
        seen.expect("state", "speaking")
        keyboard.press("Escape")
        seen.ready()
    server.at_rest()


STATES = {
    "new": "",
    "open": "for (const one of document.querySelectorAll('details')) one.open = true;"
    "for (const id of ['cloner', 'once', 'how', 'names', 'save']) document.getElementById(id).hidden = false;"
    "document.getElementById('speakers').checked = true; tell('It failed.', true); refresh();",
    "locked": "document.getElementById('door').hidden = false; document.getElementById('room').hidden = true;"
    "document.getElementById('door-message').textContent = 'The server does not know this token.';",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", ["open", slow_case("new"), slow_case("locked")])
def test_axe_finds_nothing(noting, visit, scheme, state):  # noqa: F811
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with visit(noting[0], color_scheme=scheme, reduced_motion="reduce") as seen:
        seen.page.evaluate(STATES[state])
        found = axe.run(seen.page, options={})
        assert not found.violations_count, found.generate_report()
        checked = {rule["id"] for rule in found.response["passes"]}
        assert {"color-contrast", "label", "button-name"} <= checked


@pytest.mark.slow
def test_changes_are_read_out(noting, visit):  # noqa: F811
    """Of what is said, what went wrong and what was made, a screen reader tells; it watches them all the time."""
    with visit(noting[0]) as seen:
        live = {"state": "status", "message": "status", "note": "status", "reference": "status", "copied": "status"}
        for name, role in (live | {"door-message": "alert"}).items():
            assert seen.page.get_attribute(f"#{name}", "role") == role
        for name in ("message", "note"):
            assert seen.page.evaluate(f"getComputedStyle(document.getElementById('{name}')).display") != "none"
        seen.page.evaluate("states.length = 0")
        seen.say("Hello.")
        seen.ready()
        assert seen.page.evaluate("states") == ["speaking", "ready"], "each is told once"
