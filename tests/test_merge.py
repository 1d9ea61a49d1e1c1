"""`qwen-megakernel merge`, and the recipe of docs/voices.md from training to a bot, every step of it."""

import asyncio
import contextlib
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pipelines
import pytest
import recipe
import soundfile
import torch
from cases import reference_audio
from lora import edit_config, stand_in, train, write_adapter
from pipecat.frames.frames import TTSSpeakFrame
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from serving import ready

from qwen_megakernel import CheckpointError, SamplingParams, TTSEngine
from qwen_megakernel.checkpoint.derive import merge_checkpoint, quantize_checkpoint
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.synthetic import NO_EOS
from qwen_megakernel.checkpoint.tensors import talker_tensors
from qwen_megakernel.choices import WEIGHTS
from qwen_megakernel.cli import main
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.pipecat_tts import MegakernelTTSSettings as Settings
from qwen_megakernel.sampling_params import GREEDY

CPU = torch.device("cpu")
FILE = "model.safetensors"
ENGINE = {"backend": "torch", "device": "cpu", "max_streams": 1}


def everywhere(folder: Path) -> list[tuple[str, int, int]]:
    """Every layer of a checkpoint whose name ends in _proj."""
    shapes = talker_tensors(Checkpoint.open(folder).config.talker)
    return [(name.removesuffix(".weight"), *shape) for name, shape in shapes.items() if "_proj.weight" in name]


def stored_as(folder: Path, out: Path, dtype: torch.dtype) -> Path:
    """A copy of a checkpoint in another dtype, with values that this dtype alone can hold."""
    shutil.copytree(folder, out)
    tensors = {name: t.float() * (1 + 1e-3 * torch.randn(t.shape)) for name, t in load_file(folder / FILE).items()}
    save_file({name: t.to(dtype) for name, t in tensors.items()}, out / FILE, {"format": "pt"})
    return out


def codes(folder: Path, adapters=()) -> np.ndarray:
    with TTSEngine.load(folder, adapters=adapters, **ENGINE) as engine:
        return engine.generate("Hello.", voice=engine.placeholder_voice(), sampling=GREEDY, max_frames=8).codes


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_a_merged_checkpoint_is_the_one_with_adapters_to_the_bit(tiny, tmp_path, stored, capsys):
    base = stored_as(tiny("custom_voice", eos_gain=0.0), tmp_path / "base", stored)
    one = write_adapter(tmp_path / "one", everywhere(base), strength=0.1)
    two, out = write_adapter(tmp_path / "two", strength=0.3), tmp_path / "out"
    assert main(["merge", str(base), str(one), str(two), str(out)]) == 0
    assert re.search(r"merged  .*two into 1 layers\nwrote   .*out\n$", capsys.readouterr().out)
    adapted, merged = Checkpoint.open(base, [one, two]), Checkpoint.open(out)
    assert merged.fingerprint == adapted.fingerprint, "a saved voice fits both"
    for dtype, fp8 in ((torch.float32, "bf16"), (torch.bfloat16, "bf16"), (torch.bfloat16, "fp8")):
        expected, ours = (each.talker(CPU, dtype, WEIGHTS[fp8]) for each in (adapted, merged))
        assert expected.keys() == ours.keys()
        assert all(torch.equal(ours[name].float(), expected[name].float()) for name in expected), (dtype, fp8)
    said = codes(out)
    assert np.array_equal(said, codes(base, [one, two])) and not np.array_equal(said, codes(base))
    before, after = load_file(base / FILE), load_file(out / FILE)
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(adapted._adapted)
    assert {tensor.dtype for tensor in after.values()} == {stored}
    with safe_open(base / FILE, "pt") as a, safe_open(out / FILE, "pt") as b:
        assert a.metadata() == b.metadata()


def test_every_other_file_is_the_bases(tiny, tmp_path):
    """Shards and their index too; nothing else that lies there, no pickle, no link."""
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(tiny("base", shards=2), base)
    for name in ("notes.txt", "pytorch_model.bin", "old.safetensors"):
        (base / name).write_text("not ours")
    (base / "tokenizer.json").symlink_to(base / "vocab.json")
    shapes = load_file(next(base.glob("model-00001*")))
    weight = next(name for name in shapes if name.endswith("_proj.weight") and name.startswith("talker."))
    adapter = write_adapter(tmp_path / "adapter", [(weight.removesuffix(".weight"), *shapes[weight].shape)])
    merge_checkpoint(base, [adapter], out)
    there = {path.relative_to(base) for path in base.rglob("*")} - {
        Path("notes.txt"), Path("pytorch_model.bin"), Path("old.safetensors")
    }  # fmt: skip
    assert {path.relative_to(out) for path in out.rglob("*")} == there
    assert not [path for path in out.rglob("*") if path.is_symlink()]
    files = [path for path in there if (base / path).is_file()]
    changed = [path.name for path in files if (base / path).read_bytes() != (out / path).read_bytes()]
    assert len(changed) == 1 and changed[0].startswith("model-00001")


def test_what_cannot_be_merged_leaves_nothing(tiny, tmp_path, monkeypatch, capsys):
    base, adapter = tiny("custom_voice"), write_adapter(tmp_path / "adapter")
    huge = write_adapter(tmp_path / "huge", strength=4e37)  # finite before the product
    dora = write_adapter(tmp_path / "dora")
    edit_config(dora, use_dora=True)
    quantize_checkpoint(base, tmp_path / "fp8", WEIGHTS["fp8"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for words, told in (
        ([base, adapter, "full"], "full exists already; name a new folder"),
        ([base, adapter, "no/such"], "cannot be written"),
        (["fp8", adapter, "out"], "an adapter cannot be merged into FP8 weights; load the bf16 checkpoint"),
        ([base, adapter, huge, "out"], "merged is not finite"),
        ([base, dora, "out"], "use_dora must be off, found 'True'; merge it where it was trained"),
        ([base, "full", "out"], "no adapter_config.json"),
        (["nowhere", adapter, "out"], "no folder 'nowhere'"),
    ):
        assert main(["merge", *map(str, words)]) == 1
        assert told in capsys.readouterr().err, words
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="out .*No space left"):
        patch.setattr(Checkpoint, "adapted", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
        merge_checkpoint(base, [adapter], Path("out"))
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------- the recipe


SPEAKER, SEED = "Ada Lovelace", 3
TEXT = "Hello there."


@pytest.fixture(scope="module")
def followed(tiny, tmp_path_factory):
    """A folder in which the recipe was followed, and the voice that it used. `my-base` is merged, `dora-base` is what
    the page says of kinds of PEFT that are refused."""
    folder = tmp_path_factory.mktemp("followed")
    shutil.copytree(tiny("base", eos_gain=NO_EOS), folder / "base")
    with TTSEngine.load(folder / "base", **ENGINE) as engine:
        timbre = engine.create_voice((reference_audio(), 24000))
    timbre.save(folder / "me.safetensors")
    small = SimpleNamespace(
        load=partial(TTSEngine.load, **ENGINE, max_positions=64)
    )  # what the page says fills its slot
    names = {"TTSEngine": small, "timbre": timbre, "train": train}
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "qwen_tts", stand_in())
        recipe.follow(dict(names))["adapted"].close()
        assert main(["merge", "base", "my-adapter", "my-base"]) == 0
        first, *_, last = [block for section in recipe.SECTIONS for block in recipe.blocks(section)]
        exec(first.replace("lora_alpha=32", "lora_alpha=32, use_dora=True").replace("my-ad", "dora-ad"), names)
        kept, count = re.subn(r"\n# The speaker\. Without these lines.*?\n\n", "\n", last, flags=re.S)
        assert count == 1
        exec(kept.replace("my-voice", "dora-base"), names)
    return folder, timbre


def pcm(folder: Path, adapters=(), **request) -> bytes:
    with TTSEngine.load(folder, adapters=adapters, **ENGINE) as engine:
        request = {"sampling": SamplingParams(seed=SEED), "max_frames": 12} | request
        return pcm16(engine.generate(TEXT, **request).samples)


@pytest.mark.slow
def test_an_adapter_speaks_the_same_loaded_and_merged(followed, monkeypatch):
    folder, timbre = followed
    monkeypatch.chdir(folder)
    speak = f"speak --device cpu --seed {SEED} --max-frames 12 --voice me.safetensors --text".split() + [TEXT]
    assert main([*speak, "--model", "base", "--adapter", "my-adapter", "--output", "loaded.wav"]) == 0
    assert main([*speak, "--model", "my-base", "--output", "merged.wav"]) == 0
    assert main([*speak, "--model", "base", "--output", "plain.wav"]) == 0
    loaded, merged, plain = (soundfile.read(f"{name}.wav")[0] for name in ("loaded", "merged", "plain"))
    assert len(merged) and np.array_equal(loaded, merged) and not np.array_equal(merged, plain)
    assert pcm(folder / "my-base", voice=timbre) == pcm(folder / "base", ["my-adapter"], voice=timbre)


@pytest.mark.slow
def test_a_refused_kind_of_peft_is_merged_where_it_was_trained(followed, monkeypatch):
    folder, timbre = followed
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError, match=r"use_dora .*docs/voices.md"):
        Checkpoint.open("base", ["dora-adapter"])
    with TTSEngine.load("dora-base", **ENGINE) as engine:
        again = engine.create_voice((reference_audio(), 24000))
        assert engine.variant == "base" and torch.equal(again.speaker_embedding, timbre.speaker_embedding)
    assert pcm(folder / "dora-base", voice=timbre) != pcm(folder / "base", voice=timbre)


@pytest.mark.slow
@pytest.mark.parametrize("made", ["my-base", "my-voice"])
def test_a_server_and_a_bot_speak_with_it(followed, made):
    folder, timbre = followed
    voice = {"voice": timbre} if made == "my-base" else {"speaker": SPEAKER}
    expected, options = pcm(folder / made, **voice), {"seed": SEED, "max_frames": 12}
    named = "me" if made == "my-base" else SPEAKER
    voices = folder if made == "my-base" else None
    with ready(lambda: TTSEngine.load(folder / made, **ENGINE), model=made, voices=voices) as server:
        body = {"model": made, "voice": named, "input": TEXT} | options
        answer = server.post(response_format="pcm", **body)
        assert answer.status_code == 200 and answer.content == expected, answer.text
    settings = Settings(voice=Voice.load(folder / "me.safetensors") if made == "my-base" else SPEAKER, **options)
    service = MegakernelTTSService(model=str(folder / made), engine_options=ENGINE, settings=settings)
    down, _ = asyncio.run(pipelines.play(service, [TTSSpeakFrame(TEXT)]))
    assert pipelines.pcm(down).tobytes() == expected
