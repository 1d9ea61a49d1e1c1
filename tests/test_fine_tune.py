"""A checkpoint as the reference's fine-tuning script leaves it: a Base turned into a speaker of its own."""

import json
from pathlib import Path

import cases as shared
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qwen_megakernel import CheckpointError, TTSEngine
from qwen_megakernel.checkpoint.config import GREEDY
from qwen_megakernel.checkpoint.fp8 import WEIGHTS
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.quantize import quantize_checkpoint
from qwen_megakernel.cli import main
from qwen_megakernel.model.voice import Voice

CPU = torch.device("cpu")
NAME = "Ada Lovelace"
SIZES = ["tiny", "tiny-adapter"]


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """made(size, trained) -> a Base in shards, the fine-tune of it, and the speaker's vector. `trained`: how far its
    weights went."""

    def make(size: str, trained: float = 0.0) -> tuple[Path, Path, torch.Tensor]:
        base, folder = tiny("base", size=size, shards=2, eos_gain=0.0), tmp_path_factory.mktemp("fine-tune")
        state = {name: t for path in base.glob("model-*.safetensors") for name, t in load_file(path).items()}
        hidden = state["talker.model.norm.weight"].shape[0]
        state["talker.codec_head.weight"] = (1 + trained) * state["talker.codec_head.weight"]
        vector = torch.randn(hidden).bfloat16()
        return base, shared.fine_tune(base, folder, NAME, vector, state), vector.float()

    return make


def engine_of(folder: Path) -> TTSEngine:
    return TTSEngine.load(folder, backend="torch", device="cpu", max_streams=1)


@pytest.mark.parametrize("size", SIZES)
def test_it_speaks_as_its_base_does_with_the_same_vector(made, size):
    """Before any training: the row of the table is the vector, in the same place of the prompt."""
    base, folder, vector = made(size)
    how = {"language": "english", "non_streaming_mode": True}
    request = how | {"sampling": GREEDY, "max_frames": 12}
    with engine_of(base) as engine:
        voice = Voice(vector, None, None, Checkpoint.open(base).fingerprint)
        expected = engine.prompt("Hello there.", voice=voice, **how)
        codes = engine.generate("Hello there.", voice=voice, **request).codes
    with engine_of(folder) as engine:
        assert (engine.variant, engine.speakers) == ("custom_voice", ("ada lovelace",))
        for speaker in (NAME, "ada lovelace", None):
            assert torch.equal(engine.prompt("Hello there.", speaker=speaker, **how).rows, expected.rows)
            assert np.array_equal(engine.generate("Hello there.", speaker=speaker, **request).codes, codes)
        without = engine.prompt("Hello there.", speaker="", **how)
        assert len(without.rows) == len(expected.rows) - 1, "the speaker has a row of its own"


@pytest.mark.parametrize("size", SIZES)
def test_the_trained_file_wins_over_shards_that_the_copy_brought(made, size, tmp_path):
    base, folder, _ = made(size, trained=0.5)
    assert (folder / "model.safetensors.index.json").exists() and len(list(folder.glob("model-*.safetensors"))) == 2
    checkpoint = Checkpoint.open(folder)
    assert [path.name for path in checkpoint.files[0]] == ["model.safetensors"]
    head = "talker.codec_head.weight"
    trained, untrained = (one.talker(CPU, torch.float32)[head] for one in (checkpoint, Checkpoint.open(base)))
    assert torch.allclose(trained, 1.5 * untrained, rtol=2**-7)
    quantize_checkpoint(folder, tmp_path / "fp8", WEIGHTS["fp8"])
    assert [path.name for path in (tmp_path / "fp8").glob("*.safetensors*")] == ["model.safetensors"]
    assert Checkpoint.open(tmp_path / "fp8").config.talker.speakers.keys() == {"ada lovelace"}


def test_the_command_line_lists_it_and_speaks_with_it(made, tmp_path, capsys):
    _, folder, _ = made("tiny")
    config = json.loads((folder / "generation_config.json").read_text()) | {"max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(config))
    speak = ["speak", "--model", str(folder), "--device", "cpu"]
    assert main([*speak, "--list-speakers"]) == 0
    assert "custom_voice\n  ada lovelace\n" in capsys.readouterr().out
    said = ["--text", "Hello there.", "--output", str(tmp_path / "out.wav")]
    assert main([*speak, *said, "--speaker", NAME]) == 0 and (tmp_path / "out.wav").stat().st_size > 8 * 1920
    assert main([*speak, *said, "--speaker", "Charles"]) == 1
    assert "unknown speaker 'Charles'; known: ada lovelace" in capsys.readouterr().err


def test_it_has_a_fingerprint_and_no_encoder_of_its_own(made):
    base, folder, _ = made("tiny")
    assert Checkpoint.open(folder).fingerprint != Checkpoint.open(base).fingerprint
    assert Checkpoint.open(folder).config.speaker_encoder is None


def test_names_that_differ_by_case_alone_are_refused(made):
    _, folder, _ = made("tiny")
    config = json.loads((folder / "config.json").read_text())
    config["talker_config"]["spk_id"]["ADA lovelace"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="spk_id has 'ada lovelace' twice"):
        Checkpoint.open(folder)
