"""Asks the reference implementation, `qwen-tts-hf` 0.1.1.post1 with transformers 5.15.1 (see `make oracle`).

    python oracle.py write          store what it says in vectors.safetensors, which the tests read
    python oracle.py check [SEED]   regenerate and compare with the stored vectors; then compare this package
                                    live with fresh weights, the codec at its published dims, the demo voice,
                                    a fine-tune, LoRA adapters and the recipe of docs/voices.md

Greedy and fp32 throughout. Where codes part, the oracle's own gap between its two best logits is printed; a
gap below 1e-5 is listed, anything else fails.
"""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import cases as shared  # noqa: E402
import recipe  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from qwen_check.reference import Reference, ReferenceOutput, reference_module  # noqa: E402
from qwen_check.report import parting, tie  # noqa: E402
from qwen_check.verify import request_of  # noqa: E402
from qwen_megakernel import TTSEngine  # noqa: E402
from qwen_megakernel.checkpoint.derive import merge_checkpoint  # noqa: E402
from qwen_megakernel.checkpoint.load import DEMO_FOLDER, Checkpoint  # noqa: E402
from qwen_megakernel.checkpoint.synthetic import NO_EOS, write_checkpoint  # noqa: E402
from qwen_megakernel.model.vocoder import TorchVocoder  # noqa: E402

RATE = 24000


class Oracle(Reference):
    """The reference on a CPU in fp32, and the cases."""

    def __init__(self, folder: Path):
        super().__init__(reference_module(), str(folder), torch.device("cpu"), torch.float32)

    def ask(self, case: shared.OracleCase) -> ReferenceOutput:
        voice = None
        if case.clone:
            sound, text = shared.reference_of(case.reference, case.seed)
            voice = self.voice(sound, text if case.clone == "icl" else None)
        return self.speak(case.case, case.frames, voice)


def collect(root: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the oracle says to every case, by "case/what"."""
    vectors: dict[str, torch.Tensor] = {}
    oracles: dict[Path, Oracle] = {}
    for case in shared.cases(seed):
        folder = case.checkpoint(root)
        if folder not in oracles:
            oracles[folder] = Oracle(folder)
        oracle = oracles[folder]
        said = oracle.ask(case)
        vectors |= {
            f"{case.name}/rows": said.rows,
            f"{case.name}/trailing": said.trailing,
            f"{case.name}/codes": said.codes.to(torch.int16),
        }
        print(f"{case.name}: {len(said.rows)} rows, {len(said.codes)} frames", flush=True)
        of = f"{folder.name}/reference{case.reference}"
        if case.clone and f"{of}/speaker_embedding" not in vectors:
            voice = oracle.voice(shared.reference_of(case.reference, seed)[0], "x")
            vectors |= {
                f"{of}/speaker_embedding": voice.ref_spk_embedding,
                f"{of}/ref_codes": voice.ref_code.to(torch.int16),
            }
        if "vocoder/pcm" not in vectors:
            codes = shared.vocoder_codes(256, seed=seed)
            # Every fifth sample keeps the file small and still meets every phase of every upsampling stage.
            vectors["vocoder/pcm"] = torch.from_numpy(oracle.decode(torch.from_numpy(codes))[::5].copy())
    return {name: tensor.contiguous() for name, tensor in vectors.items()}


def compare_with_file(vectors: dict[str, torch.Tensor]) -> None:
    stored = load_file(shared.VECTORS)
    assert stored.keys() == vectors.keys(), sorted(stored.keys() ^ vectors.keys())[:5]
    for name, tensor in vectors.items():
        if tensor.is_floating_point():
            assert (tensor - stored[name]).abs().max() <= 1e-5, name
        else:
            assert torch.equal(tensor, stored[name]), name
    print(f"stored vectors: all {len(stored)} equal what the oracle says now")


def compare_live(root: Path, seed: int) -> None:
    """This package against the oracle, both fed the same fresh checkpoints."""
    frames = differing = 0
    worst = {"rows": 0.0, "pcm": 0.0}
    engines: dict[Path, tuple[Oracle, TTSEngine]] = {}
    for case in shared.cases(seed):
        folder = case.checkpoint(root)
        if folder not in engines:
            engines[folder] = Oracle(folder), TTSEngine.load(folder, backend="torch", device="cpu", dtype=torch.float32)
        oracle, engine = engines[folder]
        said = oracle.ask(case)
        codes, pcm = said.codes, said.samples
        ours = shared.with_voice(engine, case)
        prompt, audio = engine.prompt(ours.text, **request_of(ours)), shared.ask(engine, case)
        pairs = {"rows": (prompt.rows, said.rows), "trailing": (prompt.trailing, said.trailing)}
        for name, (ours, theirs) in pairs.items():
            assert ours.shape == theirs.shape, (case.name, name, ours.shape, theirs.shape)
            worst["rows"] = max(worst["rows"], float((ours - theirs).abs().max()))
        if parting(audio.codes, codes.numpy()):
            differing += not listed_as_tie(oracle, case, audio.codes, codes.numpy())
        elif len(codes) <= 250:  # with the reference below the 300 frames that the oracle decodes at once
            # The reference cuts an in-context clip by a float division, which can be one sample early.
            n = min(len(pcm), len(audio.samples))
            assert len(pcm) - n <= 1 and len(audio.samples) == n, (len(pcm), len(audio.samples))
            worst["pcm"] = max(worst["pcm"], float(np.abs(pcm[len(pcm) - n :] - audio.samples).max()))
        frames += len(codes)
    for _, engine in engines.values():
        engine.close()
    print(f"live, seed {seed}: {len(shared.cases(seed))} cases, {frames} frames, {differing} cases with other codes")
    print(f"  prompt rows differ by at most {worst['rows']:.1e}, PCM by at most {worst['pcm']:.1e}")
    assert worst["rows"] <= 1e-5 and worst["pcm"] <= 1e-5 and not differing


def listed_as_tie(oracle: Oracle, case: shared.OracleCase, ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Print where the codes part; True if the oracle itself was undecided there."""
    frame, group = parting(ours, theirs)
    between, bound = tie(oracle.decided(frame, group, theirs[:frame, 0].tolist()))
    where = f"{len(ours)} and {len(theirs)} frames, at frame {frame} group {group}"
    print(f"  DIFFERS {case.name}: {where}, gap {between:.1e}")
    return between < bound


def compare_voice_and_vocoder(root: Path, seed: int) -> None:
    """Encoders and vocoder at the published dims, and the demo voice's vocoder."""
    folder = write_checkpoint(root / "real-codec", size="tiny", variant="base", codec="real", seed=seed)
    oracle = Oracle(folder)
    with TTSEngine.load(folder, backend="torch", device="cpu", max_streams=1) as engine:
        for seconds in (0.9, 12.3):
            samples = shared.reference_audio(seconds, seed=seed)
            expected, voice = oracle.voice(samples, "x"), engine.create_voice((samples, RATE), "x", trim=False)
            error = float((voice.speaker_embedding - expected.ref_spk_embedding).abs().max())
            equal, count = torch.equal(voice.ref_codes, expected.ref_code), voice.ref_codes.numel()
            print(f"voice of {seconds} s: vector differs by {error:.1e}, {count} reference codes equal: {equal}")
            assert error <= 1e-4 and equal
    for label, where, model, frames in (
        ("published dims", folder, oracle, 40),
        ("demo voice", DEMO_FOLDER, Oracle(DEMO_FOLDER), 150),
    ):
        checkpoint = Checkpoint.open(where)
        config = checkpoint.config.codec.vocoder
        vocoder = TorchVocoder(config, checkpoint.vocoder(torch.device("cpu"), torch.float32), slots=1)
        codes = torch.from_numpy(shared.vocoder_codes(config.codebook_size, frames, seed))
        ours = vocoder.push([0], codes[None])[0].numpy()
        theirs = model.decode(codes)
        error = float(np.abs(ours - theirs).max())
        print(f"vocoder, {label}: {frames} frames, differs by {error:.1e} (RMS {np.sqrt((theirs**2).mean()):.3f})")
        assert error <= 1e-5


def compare_demo(frames: int = 200) -> None:
    oracle = Oracle(DEMO_FOLDER)
    total = 0
    with TTSEngine.load("demo", backend="torch", device="cpu", dtype=torch.float32) as engine:
        for speaker in engine.speakers:
            for whole in (True, False):
                case = shared.OracleCase("demo", "custom_voice", "english", whole, speaker, "english", frames=frames)
                codes = oracle.ask(case).codes
                audio = shared.ask(engine, case)
                assert np.array_equal(audio.codes, codes.numpy()), (speaker, whole)
                total += len(codes)
    print(f"demo voice: {total} greedy frames equal")


def compare_fine_tune(root: Path, seed: int) -> None:
    """A fine-tune made of what the oracle itself would save, in bf16."""
    base = write_checkpoint(root / "fine-tuned", size="tiny", variant="base", seed=seed, eos_gain=NO_EOS, shards=2)
    model = Oracle(base).model
    vector = torch.randn(model.config.talker_config.hidden_size, generator=torch.Generator().manual_seed(seed))
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    folder = shared.fine_tune(base, root / "fine-tune", "Ada Lovelace", vector, state)
    oracle, total = Oracle(folder), 0
    with TTSEngine.load(folder, backend="torch", device="cpu", dtype=torch.float32, max_streams=1) as engine:
        for whole in (True, False):
            case = shared.OracleCase("tiny", "custom_voice", "english", whole, *engine.speakers, "english", frames=60)
            said, audio = oracle.ask(case), shared.ask(engine, case)
            error = float((engine.prompt(case.case.text, **request_of(case.case)).rows - said.rows).abs().max())
            assert error <= 1e-5 and np.array_equal(audio.codes, said.codes.numpy()), (whole, error)
            total += len(audio.codes)
    print(f"fine-tune: {total} greedy frames equal")


def compare_layouts(root: Path, seed: int) -> None:
    """What others save of a checkpoint."""
    case = shared.OracleCase("tiny", "custom_voice", "english", True, "ryan", "english", frames=40, seed=seed)
    plain, total = case.checkpoint(root), 0
    for name, write in shared.LAYOUTS.items():
        folder = Path(shutil.copytree(plain, root / f"layout {name}"))
        write(folder)
        said = Oracle(plain if name == "rope_parameters" else folder).ask(case)
        with TTSEngine.load(folder, backend="torch", device="cpu", dtype=torch.float32, max_streams=1) as engine:
            assert np.array_equal(shared.ask(engine, case).codes, said.codes.numpy()), name
        total += len(said.codes)
    print(f"layouts: {', '.join(shared.LAYOUTS)}: {total} greedy frames equal")


ALL_STACKS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "": {"target_modules": ALL_STACKS, "use_rslora": True},
    "talker": {"target_modules": ALL_STACKS + ["codec_head", "linear_fc2", "lm_head.3"], "task_type": "CAUSAL_LM"},
    "talker.model": {"target_modules": ALL_STACKS, "task_type": "FEATURE_EXTRACTION"},
    "talker.code_predictor": {"target_modules": ["q_proj"]},  # its class is in the file, and tells it from the talker
}
"""What of the oracle's model PEFT wraps, and how."""


def compare_adapters(root: Path, seed: int) -> None:
    """The oracle with adapters that PEFT has merged, rounded to bf16, against ours of the saved adapters."""
    total = 0
    torch.manual_seed(seed)
    for size in ("tiny", "tiny-adapter"):
        folder = write_checkpoint(root / f"adapted-{size}", size=size, seed=seed, eos_gain=NO_EOS)
        for wrap, how in ADAPTERS.items():
            oracle, out = Oracle(folder), root / f"{size}-{wrap}-adapter"
            wrapped = get_peft_model(oracle.model.get_submodule(wrap), LoraConfig(r=4, lora_alpha=8, **how))
            with torch.no_grad():
                for name, parameter in wrapped.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(0, 0.05)
                wrapped.save_pretrained(out)
                wrapped.merge_and_unload()
                for parameter in oracle.model.talker.parameters():
                    parameter.copy_(parameter.bfloat16())
            case = shared.OracleCase(size, "custom_voice", "english", True, "ryan", "english", frames=40)
            codes, options = oracle.ask(case).codes.numpy(), {"backend": "torch", "device": "cpu", "max_streams": 1}
            with TTSEngine.load(folder, dtype=torch.float32, adapters=[out], **options) as engine:
                assert np.array_equal(shared.ask(engine, case).codes, codes), (size, wrap)
            with TTSEngine.load(folder, dtype=torch.float32, **options) as engine:
                assert not np.array_equal(shared.ask(engine, case).codes, codes), "the adapter changes nothing"
            merge_checkpoint(folder, [out], merged := root / f"{size}-{wrap}-merged")
            assert np.array_equal(Oracle(merged).ask(case).codes.numpy(), codes), (size, wrap, "the merged checkpoint")
            total += len(codes)
    print(f"adapters, merged by PEFT, by us and by us on disk: {total} greedy frames equal")


def train(model: torch.nn.Module, steps: int = 4) -> None:
    """Some steps with the loss of the reference's fine-tuning script, on random texts and codes."""
    talker, config = model.talker, model.talker.config
    ids, codes = torch.randint(0, 99, (2, 9)), torch.randint(0, 99, (2, 9, config.num_code_groups))
    optimizer = torch.optim.AdamW([p for p in talker.parameters() if p.requires_grad], lr=0.03)
    losses = []
    for _ in range(steps):
        rows = talker.text_projection(talker.model.text_embedding(ids)) + talker.model.codec_embedding(codes[..., 0])
        for group, table in enumerate(talker.code_predictor.get_input_embeddings(), 1):
            rows = rows + table(codes[..., group])
        out = talker(
            inputs_embeds=rows, attention_mask=torch.ones_like(ids), labels=codes[..., 0], output_hidden_states=True
        )
        hidden = out.hidden_states[0][-1][:, :-1].flatten(0, 1)
        _, others = talker.forward_sub_talker_finetune(codes[:, 1:].flatten(0, 1), hidden)
        loss = out.loss + 0.3 * others
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"recipe: {steps} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0]


def compare_recipe(root: Path, seed: int) -> None:
    """What docs/voices.md says of adapters and fine-tunes, with the oracle's model and a training."""
    torch.manual_seed(seed)
    reference_module()  # else it could not be imported without sox and torchaudio
    total, root, options = 0, root / "recipe", {"backend": "torch", "device": "cpu", "max_streams": 1}
    base = write_checkpoint(root / "base", size="tiny", variant="base", seed=seed, eos_gain=NO_EOS)
    with contextlib.chdir(root), TTSEngine.load(base, **options) as engine:
        timbre = engine.create_voice((shared.reference_of(0, seed)[0], RATE), trim=False)
        timbre.save("me.safetensors")
        recipe.follow({"TTSEngine": TTSEngine, "timbre": timbre, "train": train})["adapted"].close()
    merge_checkpoint(base, [root / "my-adapter"], root / "my-base")
    cases = (
        (root / "my-base", (), shared.OracleCase("tiny", "base", "english", True, clone="xvector", frames=60)),
        (base, [root / "my-adapter"], shared.OracleCase("tiny", "base", "english", True, clone="xvector", frames=60)),
        (root / "my-voice", (), shared.OracleCase("tiny", "custom_voice", "english", True, "ada lovelace", frames=60)),
    )
    for folder, adapters, case in cases:
        said = Oracle(root / "my-base" if adapters else folder).ask(case)
        with TTSEngine.load(folder, dtype=torch.float32, adapters=adapters, **options) as engine:
            assert np.array_equal(shared.ask(engine, case).codes, said.codes.numpy()), (folder, adapters)
        total += len(said.codes)
    print(f"recipe: {total} greedy frames equal")


def main() -> None:
    command, *rest = sys.argv[1:] or [""]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if command == "write":
            save_file(collect(root), shared.VECTORS)
            print(f"{shared.VECTORS}: {shared.VECTORS.stat().st_size} bytes")
        elif command == "check":
            seed = int(rest[0]) if rest else int(np.random.default_rng().integers(1, 10**6))
            compare_with_file(collect(root))
            compare_live(root, seed)
            compare_voice_and_vocoder(root, seed)
            compare_demo()
            compare_fine_tune(root, seed)
            compare_layouts(root, seed)
            compare_adapters(root, seed)
            compare_recipe(root, seed)
        else:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
