"""This package against what the reference implementation said (tests/oracle/vectors.safetensors).

The checkpoints are synthetic and rewritten here from their seeds. `make oracle` makes the same comparison
live, with fresh weights.
"""

from dataclasses import replace
from itertools import product

import cases as shared
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model.vocoder import TorchVocoder

CASES = shared.cases()
RATE, BEYOND = 24000, 16


@pytest.fixture(scope="module")
def vectors() -> dict[str, torch.Tensor]:
    return load_file(shared.VECTORS)


@pytest.fixture
def spy_on_start(monkeypatch):
    """Collects every prompt that an engine hands to its frame decoder."""

    def attach(engine) -> list:
        prompts, start = [], engine.probes.decoder.start
        monkeypatch.setattr(
            engine.probes.decoder,
            "start",
            lambda slot, prompt, *how: (prompts.append(prompt), start(slot, prompt, *how)),
        )
        return prompts

    return attach


def whole_and_begun() -> list:
    """`make test` speaks whole, of each checkpoint, one case and all that end by themselves; the others until their
    text is given and a little longer. `make test-all` speaks every case whole."""
    spoken, rows = set(), []
    for case in CASES:
        checkpoint = (case.size, case.variant)
        if whole := bool(case.eos_gain) or checkpoint not in spoken:
            spoken.add(checkpoint)
        else:
            rows.append(pytest.param(case, False, id=f"{case.name}/begun", marks=pytest.mark.brief))
        rows.append(pytest.param(case, True, id=case.name, marks=[] if whole else pytest.mark.slow))
    return rows


@pytest.mark.parametrize("case, whole", whole_and_begun())
def test_prompt_rows_and_greedy_codes_equal_the_oracle(
    case, whole, vectors, checkpoint_root, engine_for, spy_on_start, count_frames
):
    frames = case.frames if whole else len(vectors[f"{case.name}/trailing"]) + BEYOND
    engine = engine_for(case.checkpoint(checkpoint_root))
    prompts = spy_on_start(engine)
    audio = shared.ask(engine, replace(case, frames=frames))
    for what in ("rows", "trailing"):
        expected, ours = vectors[f"{case.name}/{what}"], getattr(prompts[0], what)
        assert ours.shape == expected.shape
        assert (ours - expected).abs().max() <= 1e-5
    codes = vectors[f"{case.name}/codes"].numpy()[:frames]
    assert np.array_equal(audio.codes, codes)
    assert audio.finish_reason == ("length" if len(codes) == frames else "eos")
    assert len(audio.samples) == len(codes) * 1920
    count_frames(len(codes))


def test_the_cases_end_early_late_and_not_at_all(vectors):
    lengths = {case.name: len(vectors[f"{case.name}/codes"]) for case in CASES}
    held_off = {lengths[c.name] for c in CASES if not c.eos_gain}
    free = [lengths[c.name] for c in CASES if c.eos_gain]
    assert held_off == {200}
    assert min(free) <= 10 and any(30 <= n < 200 for n in free)


@pytest.mark.parametrize("reference", range(len(shared.REFERENCES)))
@pytest.mark.parametrize("size", ["tiny", "tiny-adapter"])
def test_voice_equals_the_oracle(size, reference, vectors, checkpoint_root, engine_for):
    case = next(c for c in CASES if c.clone and c.size == size)
    folder = case.checkpoint(checkpoint_root)
    voice = engine_for(folder).create_voice((shared.reference_of(reference, 0)[0], RATE), "x", trim=False)
    of = f"{folder.name}/reference{reference}"
    assert (voice.speaker_embedding - vectors[f"{of}/speaker_embedding"]).abs().max() <= 1e-4
    assert torch.equal(voice.ref_codes, vectors[f"{of}/ref_codes"].long())


def test_clones_are_compared_in_both_layouts_with_every_reference():
    compared = {(c.size, c.clone, c.non_streaming_mode, c.reference) for c in CASES if c.clone}
    sizes, kinds, references = ("tiny", "tiny-adapter"), ("icl", "xvector"), range(len(shared.REFERENCES))
    assert compared == set(product(sizes, kinds, (True, False), references))


def test_vocoder_equals_the_oracle(vectors, checkpoint_root):
    checkpoint = Checkpoint.open(CASES[0].checkpoint(checkpoint_root))
    config = checkpoint.config.codec.vocoder
    vocoder = TorchVocoder(config, checkpoint.vocoder(torch.device("cpu"), torch.float32), slots=1)
    codes = torch.from_numpy(shared.vocoder_codes(config.codebook_size))
    pcm = vocoder.push([0], codes[None])[0]
    expected = vectors["vocoder/pcm"]
    assert expected.square().mean() > 1e-4, "the oracle's PCM is silent: this comparison would prove nothing"
    assert (pcm[::5] - expected).abs().max() <= 1e-5
