"""Files that somebody else has made: none hangs, fills the memory, runs as us or ends in a foreign error."""

import contextlib
import csv
import json
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_check import reference
from qwen_megakernel import (
    AudioError,
    CheckpointError,
    Lexicon,
    RequestError,
    SamplingParams,
    SpeechError,
    TextError,
    TTSEngine,
    TTSError,
    VoiceError,
    cli,
    files,
)
from qwen_megakernel.backend import build
from qwen_megakernel.backend.card import Card
from qwen_megakernel.backend.targets import TARGETS
from qwen_megakernel.backend.vocoder_weights import VocoderWeights
from qwen_megakernel.checkpoint.codec_config import CodecConfig
from qwen_megakernel.checkpoint.json_object import JsonObject, read_json
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.synthetic import json_files
from qwen_megakernel.commands.batch_input import read_lines
from qwen_megakernel.commands.manifest import Manifest
from qwen_megakernel.commands.text_input import read_text
from qwen_megakernel.model.audio_file import check_file, read_file
from qwen_megakernel.model.voice import Voice, VoiceEncoder
from qwen_megakernel.trust import verdicts
from qwen_megakernel.trust.verdicts import FramePart, Key, Part, Verdict
from spoken_text import lexicon
from spoken_text.files import read_file as read_any


@contextlib.contextmanager
def ended_soon():
    """Whoever waits for a pipe is woken by an error of its own kind, which no reader expects."""

    def late(*_args) -> None:
        raise AssertionError("it waits for what never comes")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- kinds of files

READERS = {
    "config": (lambda path: read_json(path), "config.json", CheckpointError),
    "voice": (Voice.load, "voice.safetensors", VoiceError),
    "lexicon": (Lexicon.load, "words.json", TextError),
    "lexicon as CSV": (Lexicon.load, "words.csv", TextError),
    "recording": (check_file, "me.wav", AudioError),
    "recording's sound": (read_file, "me.wav", AudioError),
    "batch": (lambda path: list(read_lines(str(path), "text")), "in.txt", RequestError),
    "manifest": (lambda path: Manifest(path.parent), "manifest.jsonl", RequestError),
    "text": (lambda path: read_text(str(path)), "text.md", RequestError),
}


@pytest.mark.parametrize("kind", ["pipe", "zeros", "link to a pipe"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused_at_once(reader, kind, tmp_path):
    read, name, error = READERS[reader]
    path = tmp_path / name
    if kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path if kind == "pipe" else tmp_path / "pipe")
        if kind == "link to a pipe":
            path.symlink_to(tmp_path / "pipe")
    with ended_soon(), pytest.raises(error):
        read(path)


TENSORS = "model.safetensors"
OF_CHECKPOINT = ("config.json", "generation_config.json", "vocab.json", "merges.txt", "speech_tokenizer/config.json")


@pytest.mark.parametrize("name", [*OF_CHECKPOINT, TENSORS, f"speech_tokenizer/{TENSORS}", f"{TENSORS}.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_no_file_of_a_checkpoint_is_waited_for(name, kind, copy):
    folder = copy()
    path = folder / name
    path.unlink(missing_ok=True)
    if name.startswith(f"{TENSORS}.index"):
        (folder / TENSORS).unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with ended_soon(), pytest.raises(TTSError):
        load_on_cpu(folder)


@pytest.fixture
def copy(tiny, tmp_path):
    """copy(variant): a tiny checkpoint of its own."""

    def make(variant: str = "custom_voice") -> Path:
        return Path(shutil.copytree(tiny(variant), tmp_path / variant))

    return make


def load_on_cpu(folder: Path) -> TTSEngine:
    return TTSEngine.load(folder, device="cpu", threads=1, max_streams=1, max_positions=128)


def test_what_is_larger_than_allowed_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(10**12)  # with holes: it takes no room
    with pytest.raises(CheckpointError, match="1048576 .*1000000000000"):
        read_json(path)
    with pytest.raises(OSError, match="has at most 10 bytes"):
        read_any("/proc/self/maps", "a list", 10)  # it states no size


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000, 5, None, b"x\0", ["x"]])
@pytest.mark.parametrize("read, error", [(Voice.load, VoiceError), (Lexicon.load, TextError)])
def test_names_that_no_file_can_have_are_refused(read, error, name):
    with pytest.raises(error):
        read(name)


# ---------------------------------------------------------------- lexicons


BOMBS = {
    "many": "{" + ",".join(f'"{n:x}": ""' for n in range(70_000)) + "}",
    "the same": "{" + ",".join('"a": ""' for _ in range(100_000)) + "}",
    "languages": "{" + ",".join(f'"{n:x}": {{}}' for n in range(70_000)) + "}",
    "deep": '{"a":' * 150_000,
    "digits": '{"a": ' + "1" * 900_000 + "}",
    "blanks": '{"a"' + " " * 900_000,
    "escapes": '{"' + "\\\\" * 400_000 + '": 1}',
    "a long entry": json.dumps({"a": "x" * 900_000}),
    "lists": json.dumps({"a": [[]] * 200_000}),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_lexicon_that_is_a_bomb_is_refused_with_a_short_message(what, tmp_path):
    path = tmp_path / "words.json"
    path.write_text(BOMBS[what])
    with pytest.raises(TextError) as refused:
        Lexicon.load(path)
    assert len(str(refused.value)) < 500


def test_the_work_for_a_lexicon_grows_with_its_size(tmp_path, monkeypatch):
    """Counted in lines of Python, because a clock would measure the machine."""

    def lines_run(entries: int) -> int:
        path, count = tmp_path / "words.json", 0
        path.write_text(json.dumps({f"word{n}": f"spelling {n}" for n in range(entries)}, indent=4))

        def trace(_frame, _event, _arg):
            nonlocal count
            count += 1
            return trace

        sys.settrace(trace)
        try:
            assert len(Lexicon.load(path)) == entries
        finally:
            sys.settrace(None)
        return count

    few, many = lines_run(100), lines_run(1000)
    assert many < 11 * few


def test_a_full_lexicon_in_indented_json_is_read_as_the_same_in_csv(tmp_path):
    words = {f"word{n}, the {n}th": f"spelling {n}" for n in range(lexicon.MOST_ENTRIES)}
    (tmp_path / "words.json").write_text(json.dumps(words, indent=8))
    with (tmp_path / "words.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("word", "spelling"), *words.items()])
    read = [Lexicon.load(tmp_path / name)._entries for name in ("words.json", "words.csv")]
    assert read[0] == read[1] and len(read[0][""]) == lexicon.MOST_ENTRIES


@pytest.mark.parametrize(
    "text, line",
    [
        ('{\n"a": "b",\n"\\u0061": "c"}', 2),
        ('{"de": {"x": "y"},\n"x": "z",\n"y": 3}', 3),
        ('{"a": "cc",\n"de": {"a": "x",\n"cc": 1}}', 3),
        ('{\n"a": "b",\n"cc": {"x": 1}}', 3),
        ('{"a": "\\"b\\": c",\n\n"b": null}', 3),
    ],
)
def test_the_line_of_a_wrong_entry_is_told(text, line, tmp_path):
    (tmp_path / "words.json").write_text(text)
    with pytest.raises(TextError, match=f"words.json, line {line}: "):
        Lexicon.load(tmp_path / "words.json")


# ---------------------------------------------------------------- what a config names

FOREIGN = {
    "attn_implementation": "somebody/kernel",
    "_attn_implementation": "somebody/kernel",
    "auto_map": {"A": "b.C"},
}
FOREIGN |= {"quantization_config": {"quant_method": "x"}, "torchscript": True, "id2label": {}, "tie_word_embeddings": 1}


def test_only_known_keys_of_the_encoders_config_reach_transformers():
    plain = json_files("tiny")["speech_tokenizer/config.json"]
    tampered = json.loads(json.dumps(plain))
    tampered["encoder_config"] |= FOREIGN
    read = CodecConfig.from_json(JsonObject(tampered, "x"))
    assert not FOREIGN.keys() & read.encoder.keys()
    assert read == CodecConfig.from_json(JsonObject(plain, "x"))


@pytest.mark.attacks
def test_a_clone_fetches_no_foreign_attention_and_is_the_same(copy, tiny, monkeypatch):
    import transformers.integrations.hub_kernels as kernels

    monkeypatch.setattr(kernels, "get_kernel", lambda *_args, **_kwargs: pytest.fail("it asks for foreign code"))
    folder = copy("base")
    path = folder / "speech_tokenizer" / "config.json"
    config = json.loads(path.read_text())
    config["encoder_config"] |= FOREIGN
    path.write_text(json.dumps(config))
    sound = 0.1 * np.random.default_rng(0).standard_normal(24000).astype(np.float32), 24000
    voices = [VoiceEncoder(Checkpoint.open(model)).encode(sound, "Hello.") for model in (folder, tiny("base"))]
    assert voices[0].digest == voices[1].digest


@pytest.mark.parametrize("name", ["config.json", "speech_tokenizer/config.json"])
def test_verify_gives_the_reference_no_config_that_names_code(name, copy):
    folder = copy()
    reference._refuse_foreign_code(folder)
    config = json.loads((folder / name).read_text())
    config["inner"] = [{"attn_implementation": "somebody/kernel"}]
    (folder / name).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="may fetch as code"):
        reference._refuse_foreign_code(folder)


# ---------------------------------------------------------------- builds and verdicts

CARD = Card("card", "90", 132, (13, 0), TARGETS["sm_90ax128"])
KEY = Key("card", 1, "13.0", "2", "build", "demo", "bf16")
GOOD = Verdict(KEY, FramePart(True, "", 1.0, 2.0), Part(True, "", 1.0, 2.0))


@pytest.fixture
def extensions(monkeypatch, tmp_path):
    """The folder of builds, which everybody may write, and a process whose files everybody may write."""
    monkeypatch.setattr(verdicts, "_HELD", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "shared"))
    before = os.umask(0)
    (tmp_path / "shared").mkdir()
    yield tmp_path / "shared"
    os.umask(before)


def open_to_others(how: str, folder: Path, file: Path, monkeypatch) -> None:
    """A folder, or the file in it, that another user could have written."""
    if how == "another's" and os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    elif how == "another's":
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    elif how == "link":
        folder.symlink_to(folder.rename(folder.with_name("elsewhere")))
    else:
        (file if how == "writable file" else folder).chmod(0o777)


others_could_write = pytest.mark.parametrize("how", ["another's", "writable", "writable file", "link"])


def test_a_verdicts_folder_is_our_own_whatever_the_umask_is(extensions):
    verdicts.keep(GOOD)
    assert verdicts.read(KEY) == GOOD and not verdicts._HELD
    assert stat.S_IMODE(verdicts.folder().stat().st_mode) == 0o700
    assert stat.S_IMODE(verdicts.file_of(KEY).stat().st_mode) == 0o600


@others_could_write
def test_a_verdict_that_others_could_write_is_not_believed(how, extensions, monkeypatch, caplog):
    verdicts.keep(GOOD)
    open_to_others(how, verdicts.folder(), verdicts.file_of(KEY), monkeypatch)
    assert verdicts.read(KEY) is None
    assert "cannot be used and is ignored" in caplog.text
    verdicts.keep(GOOD)
    assert how == "writable file" or "cannot be saved" in caplog.text


@others_could_write
def test_code_that_others_could_write_is_not_run(how, extensions, monkeypatch):
    folder = extensions / "qwen_megakernel_sm_90a_0123"
    monkeypatch.setattr(build, "_imported", lambda _library: pytest.fail("it runs"))
    monkeypatch.setattr(build, "_built", lambda *_args: pytest.fail("it is built where others write"))
    folder.mkdir(mode=0o700)
    library = folder / f"{folder.name}.so"
    library.touch(0o600)
    open_to_others(how, folder, library, monkeypatch)
    with pytest.raises(build.BackendError, match="not trusted: delete it|Not a directory|symbolic link"):
        build.Build(CARD, CARD.target, frozenset(), folder).load()


def test_an_own_folder_and_those_above_it_are_made_for_us_alone(extensions):
    with files.own_folder(extensions / "a" / "b") as own:
        (own / "file").touch()
        (extensions / "a" / "b").rename(extensions / "a" / "c")
        assert [path.name for path in own.iterdir()] == ["file"], "whatever its name leads to by now"
    assert {stat.S_IMODE((extensions / name).stat().st_mode) for name in ("a", "a/c")} == {0o700}


# ---------------------------------------------------------------- batches


def batch(*args: object) -> int:
    return cli.main(["batch", *map(str, args), "--device", "cpu", "--threads", "1", "--max-streams", "1"])


ENTRY = {"id": "a", "line": 1, "file": "a.wav", "seconds": 1.0, "seed": 1, "finish_reason": "eos", "attempts": 1}
ENTRY |= {"error": None, "request": "0" * 16, "threads": 1}


@pytest.mark.parametrize(
    "raw",
    [
        *[json.dumps({name: value for name, value in ENTRY.items() if name != gone}) for gone in ("id", "error")],
        *[
            json.dumps({name: value for name, value in ENTRY.items() if name != gone})
            for gone in ("request", "threads")
        ],
        *[json.dumps(ENTRY | {"id": name}) for name in ("\ud800", "../a", None, 5, "", "\x1b[2J")],
        *[json.dumps(ENTRY | {"threads": count}) for count in ("2", 0, 1.5, True)],
        json.dumps(ENTRY | {"request": None}),
        "[" * 100_000,
        '{"id": ' + "9" * 5000 + "}",
        "null",
        "5",
        "\xff",
        "x" * 2**22,
    ],
    ids=lambda raw: raw[:40],
)
def test_a_manifest_that_is_none_is_refused_and_kept(raw, tmp_path):
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(raw.encode("latin-1") + b"\n")
    with pytest.raises(RequestError, match=r"line 1: .*`batch`.*--output"):
        Manifest(tmp_path)
    assert path.read_bytes() == raw.encode("latin-1") + b"\n"


@pytest.mark.attacks
def test_a_batch_goes_on_whatever_a_line_holds(tmp_path, capsys):
    lines = [
        {"id": "\ud800", "text": "No."},
        {"id": "a", "text": "\ud800"},
        {"id": "\x1b[2J\x07", "text": "No."},
        {"id": "b", "text": "No.", "\x1b]0;x": 1},
        {"id": "c", "text": "No.", "voice": "\ud800"},
        {"id": "x" * 100_000, "text": "No."},
        {"id": "d", "text": ["x"] * 10_000},
        {"id": "yes", "text": "Yes."},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):  # what was refused is refused again
        assert batch(path, "-o", tmp_path / "out") == 1
        told = capsys.readouterr()
        assert "Traceback" not in told.err and not set("\x1b\x07") & set(told.err + told.out)
        assert told.err.count("failed  line") == 7 and r"\x1b[2J\x07" in told.err and len(told.err) < 10_000
        entries = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text("utf-8").splitlines()]
        assert [entry["line"] for entry in entries] == list(range(1, 9)) and entries[0]["id"] == "\ud800"
        assert entries[7]["error"] is None and (tmp_path / "out" / "yes.wav").is_file()


def test_what_a_file_holds_reaches_no_terminal_raw(tmp_path, capsys):
    (tmp_path / "in.csv").write_text("text,\x1b[2J\na,b\n")
    assert batch(tmp_path / "in.csv", "-o", tmp_path / "out") == 1
    assert r"got text, \x1b[2j" in capsys.readouterr().err


# ---------------------------------------------------------------- numbers that are none


def poisoned(folder: Path, file: str, name: str, value: float) -> Path:
    tensors = load_file(folder / file)
    tensors[name].flatten()[5] = value
    save_file(tensors, folder / file)
    return folder


HEADS = ("talker.codec_head.weight", *(f"talker.code_predictor.lm_head.{n}.weight" for n in (0, 14)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("sampled", [True, False])
def test_a_head_that_is_not_finite_is_an_error_and_no_noise(name, value, sampled, copy):
    sampling = SamplingParams(seed=1, do_sample=sampled, subtalker_dosample=sampled)
    with load_on_cpu(poisoned(copy(), TENSORS, name, value)) as engine:
        chunks = engine.stream("Hello there.", speaker=engine.speakers[0], sampling=sampling)
        with pytest.raises(SpeechError, match="not finite"):
            next(chunks)


VOCODER = ("decoder.decoder.1.block.0.alpha", "decoder.decoder.1.block.0.beta", "decoder.pre_conv.conv.weight")


@pytest.mark.attacks
@pytest.mark.parametrize("name", VOCODER)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_vocoder_that_is_not_finite_is_an_error_and_no_noise(name, value, copy):
    folder = poisoned(copy(), f"speech_tokenizer/{TENSORS}", name, value)
    with load_on_cpu(folder) as engine, pytest.raises(SpeechError, match="not finite"):
        engine.generate("Hello there.", seed=1, max_frames=4)
    checkpoint = Checkpoint.open(folder)  # the kernels clamp, so they take no such weights
    tensors = checkpoint.vocoder(torch.device("cpu"), torch.float32)
    with pytest.raises(CheckpointError, match=name):
        VocoderWeights(checkpoint.config.codec.vocoder, tensors)


def test_an_encoder_that_is_not_finite_makes_no_voice(copy):
    folder = poisoned(copy("base"), f"speech_tokenizer/{TENSORS}", "encoder.encoder.layers.0.conv.weight", torch.nan)
    sound = 0.1 * np.random.default_rng(0).standard_normal(24000).astype(np.float32), 24000
    with pytest.raises(CheckpointError, match="not finite"):
        VoiceEncoder(Checkpoint.open(folder)).encode(sound, "Hello.")
