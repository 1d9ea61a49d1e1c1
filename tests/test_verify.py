"""qwen-megakernel verify: what it compares, that it can fail, what it writes. The reference is a stand-in here, made of
this package's own engine; docs/verification.md says how it was run with the real one."""

import json
import re
import shutil
import sys
import wave
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from cases import fine_tune
from safetensors.torch import load_file
from test_bot_page import CHROMIUM, FLAGS
from torch import nn
from waiting import slow_case

from qwen_check import verify
from qwen_check.reference import INSTALL, Case, reference_audio, reference_module
from qwen_check.report import Report, parting, tie
from qwen_check.teacher_forcing import teacher_forced_logits, teacher_forced_talker
from qwen_megakernel import TTSEngine, Voice
from qwen_megakernel.backend.select import Backend
from qwen_megakernel.backend.torch_decoder import TorchFrameDecoder
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.cli import main
from qwen_megakernel.errors import BackendError
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import TorchVocoder
from qwen_megakernel.sampling_params import GREEDY, SamplingParams
from qwen_megakernel.trust.selection import Selection

FRAMES = 6
CPU = torch.device("cpu")


@dataclass
class TheirVoice:
    ref_spk_embedding: torch.Tensor
    ref_code: torch.Tensor | None
    ref_text: str | None


class StandIn:
    """As much of `qwen_tts.Qwen3TTSModel` as verify asks; `fault` says what is wrong with it."""

    fault = ""

    @classmethod
    def from_pretrained(cls, folder: str, dtype: torch.dtype) -> "StandIn":
        assert dtype == torch.float32
        return cls(folder)

    def __init__(self, folder: str):
        self.checkpoint, self.device = Checkpoint.open(folder), CPU
        self.engine = TTSEngine.load(folder, backend="torch", device="cpu")
        config = self.checkpoint.config
        self.generate_defaults = {"repetition_penalty": config.sampling.repetition_penalty}
        heads = [nn.Identity() for _ in range(16)]
        predictor = SimpleNamespace(lm_head=heads[1:])
        talker = SimpleNamespace(generate=lambda **_: None, codec_head=heads[0], code_predictor=predictor)
        ids = {"codec_eos_token_id": config.talker.codec_eos_id, "vocab_size": config.talker.vocab_size}
        stored = json.loads((self.checkpoint.folder / "config.json").read_text())["talker_config"]
        ids |= {name: stored[name] for name in ("spk_id", "spk_is_dialect")}
        self.model = SimpleNamespace(
            talker=talker,
            generate=self._generate,
            tts_model_type=config.variant,
            config=SimpleNamespace(talker_config=SimpleNamespace(**ids)),
            speech_tokenizer=SimpleNamespace(model=SimpleNamespace(decoder=self._decode)),
        )
        self._heads = heads

    def create_voice_clone_prompt(self, audio, ref_text, x_vector_only_mode) -> list[TheirVoice]:
        assert x_vector_only_mode == (ref_text is None)
        voice = self.engine.create_voice(audio, ref_text, trim=False)
        vector, codes = voice.speaker_embedding.clone(), voice.ref_codes
        vector[3] += 1e-3 * (self.fault == "vector")
        if codes is not None and self.fault == "reference codes":
            codes = codes.clone()
            codes[1, 2] ^= 1
        return [TheirVoice(vector, codes, ref_text)]

    def generate_custom_voice(self, speaker, instruct, **request):
        tables = self.model.config.talker_config
        if speaker and (speaker.lower() not in tables.spk_id or speaker.lower() not in tables.spk_is_dialect):
            raise NotImplementedError(f"Speaker {speaker} not implemented")  # as the reference does
        return self._speak(speaker=speaker, instruct=instruct, **request)

    def generate_voice_design(self, instruct, **request):
        return self._speak(instruct=instruct, **request)

    def generate_voice_clone(self, voice_clone_prompt, **request):
        vector, codes, text = (
            getattr(voice_clone_prompt[0], f"ref_{part}") for part in ("spk_embedding", "code", "text")
        )
        return self._speak(voice=Voice(vector, codes, text, self.checkpoint.fingerprint), **request)

    def _speak(
        self, text, language, non_streaming_mode, max_new_tokens, do_sample=True, subtalker_dosample=True, **who
    ):
        assert do_sample == subtalker_dosample
        sampling = SamplingParams(seed=torch.initial_seed()) if do_sample else GREEDY
        options = {"non_streaming_mode": non_streaming_mode, "max_frames": max_new_tokens - 1, "sampling": sampling}
        options |= {"language": language, "runaway_guard": False, **who}
        self.prompt = self.engine.prompt(text, **options)
        self.audio = self.engine.generate(text, **options)
        self.model.generate(input_ids=None)
        return [self.audio.samples], 24000

    def _generate(self, **_):
        rows, trailing = self.prompt.rows[None].clone(), self.prompt.trailing[None].clone()
        rows[0, 2, 1] += (self.fault == "prompt rows") * 1e-2
        trailing[0, 0, 1] += (self.fault == "trailing rows") * 1e-2
        if self.fault == "a row":
            rows = rows[:, 1:]
        self.model.talker.generate(inputs_embeds=rows, trailing_text_hidden=trailing)
        codes, config = torch.from_numpy(self.audio.codes), self.checkpoint.config.talker
        tensors = self.checkpoint.talker(CPU, torch.float32)
        logits = teacher_forced_logits(
            config, tensors, teacher_forced_talker(config, tensors, self.prompt, codes), codes
        )
        if self.fault in ("codes", "tie", "almost a tie"):
            best, second = logits[5][3].topk(2).indices
            codes = codes.clone()
            codes[3, 5] = second
            if self.fault != "codes":
                largest = float(logits[5][3].abs().max())
                logits[5][3, best] = logits[5][3, second] + largest * (3e-6 if self.fault == "tie" else 3e-5)
        for frame in range(len(codes)):
            for head, row in zip(self._heads, logits, strict=True):
                head(row[frame][None, None])
        self._heads[0](logits[0][-1][None, None])
        return [codes[:-1] if self.fault == "length" else codes], None

    def _decode(self, codes):
        config = self.checkpoint.config.codec.vocoder
        vocoder = TorchVocoder(config, self.checkpoint.vocoder(CPU, torch.float32), slots=1)
        pcm = vocoder.push([0], codes.transpose(1, 2)).clone()
        pcm[0, -7] += (self.fault == "PCM") * 1e-3
        return pcm[:, None]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch):
    """Also where it is installed."""
    monkeypatch.setattr(verify, "reference_module", lambda: None)


@pytest.fixture
def stand_in(monkeypatch):
    """A reference that agrees, unless it is given a fault."""
    module = ModuleType("qwen_tts")
    module.__version__, module.Qwen3TTSModel = "a stand-in", StandIn
    monkeypatch.setattr(verify, "reference_module", lambda: module)
    monkeypatch.setattr(StandIn, "fault", "")
    return StandIn


def run(model, output, *more) -> int:
    return main(["verify", "--model", str(model), "--output", str(output), "--device", "cpu", *map(str, more)])


def failures(printed: str) -> list[str]:
    """What was compared in the lines that fail."""
    return [line[7:67].strip() for line in printed.splitlines() if line.startswith("FAILS ")]


# ---------------------------------------------------------------- alone


def test_alone_it_compares_with_teacher_forcing_and_speaks(tmp_path, capsys):
    assert run("demo", tmp_path / "out", "--frames", FRAMES) == 0
    printed = capsys.readouterr().out
    assert INSTALL in printed and "not installed" in printed and "is not compared with fp32" in printed
    assert printed.splitlines()[-1] == "HOLDS: all 2 comparisons; the reference did not run"
    told = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert told["holds"] and not told["reference"] and len(told["checks"]) == 2 and told["versions"]["torch"]
    assert [take["by"] for take in told["takes"]] == ["ours", "ours"]
    assert all(take["rtf"] > 0 and take["ttfc_s"] > 0 for take in told["takes"])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"0{n}-ours.wav" for n in (1, 2, 3, 4)] + ["index.html", "report.json"]
    for n in (1, 2, 3, 4):
        samples, rate = soundfile.read(tmp_path / "out" / f"0{n}-ours.wav")
        assert rate == 24000 and len(samples) == FRAMES * 1920


def test_a_teacher_forced_pass_with_other_weights_says_so(tmp_path, tiny, monkeypatch, capsys):
    """Weights are loaded for the engine first, then for the teacher-forced pass."""
    talker, loads = Checkpoint.talker, []

    def load(self, *args):
        loads.append(args)
        tensors = talker(self, *args)
        if len(loads) == 2:
            tensors["talker.code_predictor.lm_head.4.weight"] = -tensors["talker.code_predictor.lm_head.4.weight"]
        return tensors

    monkeypatch.setattr(Checkpoint, "talker", load)
    assert run(tiny("custom_voice", eos_gain=0.0), tmp_path / "out", "--frames", FRAMES) == 1
    printed = capsys.readouterr().out
    assert "at frame 0, group 5: gap" in printed and printed.splitlines()[-1] == "FAILS: 3 of 3"
    assert not json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))["holds"]


@pytest.mark.parametrize("later", [0.0, 3e-6, 1.0, float("nan")])
def test_a_tie_hides_no_later_error(later, tmp_path, capsys):
    """All that differs must be a tie: at frame 0 it is one, at frame 7 a gap of `later`."""
    report, rng = Report(tmp_path, 24000, []), torch.Generator().manual_seed(np.random.randint(2**31))
    logits = [torch.rand(9, 50, generator=rng) for _ in range(16)]
    ours = torch.randint(50, (9, 16), generator=rng)
    for group, row in enumerate(logits):
        row[torch.arange(9), ours[:, group]] = 2.0
    other = (ours + 1) % 50
    logits[4][0, other[0, 4]] = 2.0 + 1e-6
    logits[9][7, other[7, 9]] = 2.0 + later
    logits[9][7, ours[7, 9]] = 2.0 - 1e-6 * (later == 0)
    report.teacher_forced_codes("codes", ours.numpy(), logits)
    (check,) = report.checks
    assert check["holds"] == (later < 1e-5)
    assert ("at frame 0, group 4" if check["holds"] else "at frame 7, group 9") in check["figure"]
    assert "2 of 144 differ" in check["figure"]


def test_two_equal_logits_have_no_gap():
    assert f"{tie(torch.tensor([3.0, 1.0, 3.0]))[0]:.1e}" == "0.0e+00"


@pytest.mark.slow
def test_weights_may_be_given_as_a_set(tmp_path):
    parts = {"predictor", "lm_heads"}
    verify.verify("demo", output=str(tmp_path / "a"), device="cpu", weights=parts, frames=2)
    verify.verify("demo", output=str(tmp_path / "b"), device="cpu", weights={"talker"}, frames=2)
    told = [json.loads((tmp_path / name / "report.json").read_text())["weights"] for name in "ab"]
    assert told == ["fp8-predictor", ["talker"]]


def test_a_take_without_audio_fails(tmp_path):
    report = Report(tmp_path, 24000, [Case("Hm.", True)])
    report.take(0, "reference", np.zeros(0, np.float32), 1.0)
    report.write({"model": "m"})
    told = json.loads((tmp_path / "report.json").read_text())
    assert report.failed == 1 and not told["takes"] and told["checks"][0]["figure"] == "none"
    report.take(0, "ours", np.zeros(9, np.float32), float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        report.write({"model": "m"})


def test_codes_part_where_they_part():
    codes = np.random.default_rng().integers(0, 99, (9, 16))
    other = codes.copy()
    other[4, 3] += 1
    other[4, 2:] += other[4, 2:] % 2
    other[5] += 1
    frame, group = parting(codes, other)
    assert frame == 4 and np.array_equal(codes[4, :group], other[4, :group]) and codes[4, group] != other[4, group]
    assert parting(codes, codes.copy()) is None
    assert parting(codes, codes[:7]) == parting(codes[:7], codes) == (7, 0)
    assert parting(codes[:7], other) == (frame, group)


# ---------------------------------------------------------------- with a reference


@pytest.fixture
def design(tiny, tmp_path, stand_in):
    """design(fault) -> the exit code, for a VoiceDesign checkpoint and a reference with this fault."""

    def verify_with(fault: str) -> int:
        stand_in.fault = fault
        return run(tiny("voice_design", eos_gain=0.0), tmp_path / "out", "--frames", FRAMES)

    return verify_with


@pytest.mark.parametrize(
    "size, variant",
    [
        ("tiny", "voice_design"),
        slow_case("tiny", "custom_voice"),
        slow_case("tiny-adapter", "custom_voice"),
        slow_case("tiny-adapter", "base"),
    ],
)
def test_a_reference_that_agrees_holds(variant, size, tmp_path, tiny, stand_in, capsys):
    assert run(tiny(variant, size=size), tmp_path / "out", "--frames", FRAMES) == 0
    printed = capsys.readouterr().out
    checks = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))["checks"]
    requests = {"custom_voice": 3 + (size == "tiny-adapter"), "voice_design": 2, "base": 3}[variant]
    assert len(checks) == 4 * requests + 3 * (variant == "base")
    assert printed.splitlines()[-1] == f"HOLDS: all {len(checks)} comparisons"
    assert ("instruct" in printed) == (variant == "voice_design" or (variant, size) == ("custom_voice", "tiny-adapter"))
    assert ("nobody's" in printed) == (variant == "base")
    for pair in range(1, 2 * requests + 1):
        of = [tmp_path / f"out/{pair:02}-{by}.wav" for by in ("reference", "ours")]
        assert all(path.is_file() for path in of)
        greedy = pair > requests
        assert not greedy or of[0].read_bytes() == of[1].read_bytes()


@pytest.mark.slow
def test_a_fine_tune_whose_speaker_has_capitals_is_compared(tmp_path, tiny, stand_in, capsys):
    base = tiny("base", eos_gain=0.0)
    made = fine_tune(base, tmp_path / "made", "Ada Lovelace", torch.randn(64), load_file(base / "model.safetensors"))
    assert run(made, tmp_path / "out", "--frames", FRAMES) == 0
    assert "ada lovelace, auto, whole text: codes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fault, fails, told",
    [
        slow_case("prompt rows", "prompt rows", ""),
        slow_case("trailing rows", "trailing rows", ""),
        ("codes", "codes", "differ from frame 3 of 6 and 6 on, group 5"),
        slow_case("PCM", "PCM of the same codes", ""),
        slow_case("length", "codes", "differ from frame 5 of 6 and 5"),
        slow_case("a row", "prompt rows", "the same shape"),
    ],
)
def test_a_reference_that_disagrees_fails_on_the_line_that_says_so(fault, fails, told, design, capsys):
    assert design(fault) == 1
    printed = capsys.readouterr().out
    requests = ("auto, instruct, whole text", "english, instruct, text beside frames")
    assert failures(printed) == [f"{request}: {fails}" for request in requests]
    assert printed.splitlines()[-1] == "FAILS: 2 of 8"
    assert told in printed and ("differ from frame" in printed) == (fails == "codes")


@pytest.mark.parametrize("fault, holds", [slow_case("tie", True), ("almost a tie", False)])
def test_a_tie_is_listed_and_holds(fault, holds, design, capsys):
    rc = design(fault)
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if "differ from frame 3 of 6 and 6 on, group 5, gap " in line]
    assert (rc == 0) == holds and len(told) == 2
    assert all("later frames were not compared" in line for line in told)
    for line in told:
        between, bound = map(float, re.search(r"gap (\S+) .* below (\S+)$", line).groups())
        assert 0 < between < 1e-2 and (between < bound) == holds == line.startswith("ok")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["vector", slow_case("reference codes")])
def test_another_voice_fails_once_and_not_in_what_it_says(fault, tmp_path, tiny, stand_in, capsys):
    stand_in.fault = fault
    assert run(tiny("base", eos_gain=0.0), tmp_path / "out", "--frames", FRAMES) == 1
    expected = ["xvector: speaker vector", "icl: speaker vector"] if fault == "vector" else ["icl: reference codes"]
    assert failures(capsys.readouterr().out) == expected


@pytest.mark.slow
def test_a_voice_of_ones_own_is_cloned(tmp_path, tiny, stand_in, capsys):
    soundfile.write(tmp_path / "me.wav", reference_audio(1.2, 16000, seed=2), 16000)
    model, audio = tiny("base", eos_gain=0.0), ["--ref-audio", tmp_path / "me.wav", "--frames", FRAMES]
    assert run(model, tmp_path / "a", *audio) == 0
    printed = capsys.readouterr().out
    assert "icl" not in printed and "in-context cloning is not compared" in printed and "nobody" not in printed
    assert run(model, tmp_path / "b", *audio, "--ref-text", "What I say.") == 0
    assert "icl: reference codes" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_seed_gives_the_same_takes(tmp_path, tiny, stand_in):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(tiny("voice_design"), tmp_path / name, "--frames", FRAMES, "--seed", seed) == 0
    for by in ("reference", "ours"):
        a, b, c = ((tmp_path / name / f"01-{by}.wav").read_bytes() for name in "abc")
        assert a == b != c


# ---------------------------------------------------------------- the kernel's errors


class KernelStandIn(TorchFrameDecoder):
    """Shows its hidden states and logits as the kernel does, with an error of its own."""

    error = 0.0

    def observe(self):
        self.hidden = torch.zeros(1, self.config.stack.hidden_size)
        self.logits = torch.full((1, 16, self.config.vocab_size), torch.nan)
        self.said = []
        return self.hidden, self.logits

    def start(self, slot, prompt, sampling, pages=()):
        rows = {name: getattr(prompt, name).float() for name in ("rows", "trailing", "pad")}
        self.prompt = replace(prompt, **rows)
        super().start(slot, self.prompt, sampling)

    def collect(self):
        (codes,) = super().collect()
        if codes is not None:
            self.said.append(torch.from_numpy(codes))
            forced = self.config, self.exact
            hidden = teacher_forced_talker(*forced, self.prompt, torch.stack(self.said))[-1:]
            logits = teacher_forced_logits(*forced, hidden, self.said[-1][None])
            self.hidden.copy_(hidden * (1 + self.error * torch.randn(hidden.shape)))
            for group, row in enumerate(logits):
                self.logits[0, group, : row.shape[1]] = row[0] * (1 + self.error * torch.randn(row[0].shape))
        return [codes]


@pytest.mark.slow
@pytest.mark.parametrize("error, ratio_holds", [slow_case(1e-5, True), (0.3, False), slow_case(float("nan"), False)])
def test_the_kernel_may_be_no_further_from_fp32_than_bf16(error, ratio_holds, tmp_path, tiny, monkeypatch, capsys):
    def make(config, tensors, **slots):
        exact = {name: tensor.float() for name, tensor in tensors.items()}
        kernel = KernelStandIn(config, exact, Embeddings(config.talker, exact), **slots)
        kernel.config, kernel.exact, kernel.error = config.talker, exact, error
        return kernel

    class Pretended(Backend):
        def frame_decoder(self, tensors, **slots):
            config = self.checkpoint.config
            return Embeddings(config.talker, tensors), make(config, tensors, **slots)

    class Chosen(Selection):
        def choose(self, checkpoint):
            return Pretended("megakernel", checkpoint, self.device, self.dtype)

    monkeypatch.setattr(verify, "Selection", Chosen)
    rc = run(tiny("custom_voice", eos_gain=0.0), tmp_path / "out", "--frames", 3)
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "kernel, 3 frames: error of" in line]
    assert len(lines) == 3 and "is not compared with fp32" not in printed
    assert (rc == 0) == ratio_holds and all(line.startswith("ok") == ratio_holds for line in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_on_a_gpu_the_kernel_is_compared(weights, tmp_path, capsys):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    assert main(["verify", "--model", "demo", "--output", str(tmp_path / "out"), "--weights", weights]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^ok +kernel, \d+ frames: error of ", printed, re.M)) == 3


# ---------------------------------------------------------------- what is refused


@pytest.mark.slow
def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        assert run("nobody/has-this", tmp_path / name) == 1, "refused before a model is looked for"
        assert "nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert run("demo", tmp_path / "empty", "--frames", 2) == 0
    assert run("demo", tmp_path / "empty", "--frames", 2) == 1


@pytest.mark.parametrize("name", ["/proc/x", "file.py/x", "x" * 300])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_computed(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "file.py").write_text("mine")
    monkeypatch.setattr(verify, "speak_in_fp32", lambda *_: pytest.fail("computed"))
    assert run("demo", tmp_path / name, "--frames", 2) == 1
    error = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert error.startswith("error: --output: cannot write in ") and "name another folder" in error


@pytest.mark.parametrize("gone", ["wav", "report"])
def test_a_folder_that_goes_away_is_told(gone, tmp_path, monkeypatch, capsys):
    method = getattr(Report, {"wav": "wav", "report": "write"}[gone])

    def without_folder(report, *args):
        shutil.rmtree(tmp_path / "out")
        method(report, *args)

    monkeypatch.setattr(Report, method.__name__, without_folder)
    assert run("demo", tmp_path / "out", "--frames", 2) == 1
    assert "error: --output: cannot write in " in capsys.readouterr().err


@pytest.mark.slow
def test_the_reference_reads_the_snapshot_that_ours_read(tmp_path, tiny, stand_in, monkeypatch):
    folder = tiny("voice_design")
    open_, asked = Checkpoint.open, []
    monkeypatch.setattr(Checkpoint, "open", lambda model, *_: open_(folder if model == "some/voice" else model))
    monkeypatch.setattr(stand_in, "from_pretrained", lambda model, dtype: (asked.append(model), StandIn(folder))[1])
    assert run("some/voice", tmp_path / "out", "--frames", 2) == 0
    assert asked == [str(folder)]


def test_the_folder_is_named_after_the_model(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny("voice_design"), tmp_path / "some-voice")
    assert main(["verify", "--model", "some-voice/", "--device", "cpu", "--frames", "2"]) == 0
    assert (tmp_path / "verify-some-voice/index.html").is_file()


@pytest.mark.parametrize(
    "args, message",
    [
        (["--ref-text", "x"], "give both"),
        (["--ref-audio", "x.wav"], "no recording 'x.wav': No such file"),
        (["--ref-audio", __file__, "--ref-text", " "], "is for Base checkpoints"),
        (["--frames", "0"], "1 to 1000"),
        (["--frames", "1001"], "1 to 1000"),
        (["--seed", "-1"], "seed must be"),
        (["--backend", "megakernel"], "cannot run here"),
        (["--model", "./nowhere"], "no folder"),
    ],
)
def test_what_is_refused_leaves_no_folder(args, message, tmp_path, capsys):
    assert run("demo", tmp_path / "out", *args) == 1
    error = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists()


def test_an_fp8_checkpoint_is_refused(tmp_path, capsys):
    assert main(["quantize", "demo", str(tmp_path / "fp8")]) == 0
    assert run(tmp_path / "fp8", tmp_path / "out") == 1
    assert "verify the bf16 checkpoint" in capsys.readouterr().err


def test_a_reference_that_cannot_load_says_what_works(tmp_path, stand_in, monkeypatch, capsys):
    def from_pretrained(*_args, **_kwargs):
        raise AttributeError("property 'upsample' has no setter")

    monkeypatch.setattr(stand_in, "from_pretrained", from_pretrained)
    assert run("demo", tmp_path / "out", "--frames", 2) == 1
    error = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert error.startswith("error: qwen_tts cannot load") and "no setter" in error and INSTALL in error


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(source): a package `qwen_tts`, gone afterwards with all that its import brought."""
    before = set(sys.modules)

    def install(source: str) -> None:
        (tmp_path / "site/qwen_tts").mkdir(parents=True)
        (tmp_path / "site/qwen_tts/__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.delitem(sys.modules, "qwen_tts", raising=False)

    yield install
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("qwen_tts", "sox", "torchaudio"):
            del sys.modules[name]


def test_what_only_25_hz_needs_may_be_missing(installed):
    installed("import sox, torchaudio.compliance.kaldi as kaldi\n__version__ = '1'")
    assert reference_module().__version__ == "1"


@pytest.mark.parametrize("source", ["import a_module_that_nobody_has", "raise OSError('a_module_that_nobody_has')"])
def test_a_reference_that_cannot_be_imported_is_not_passed_over(source, installed):
    installed(source)
    with pytest.raises(BackendError, match="a_module_that_nobody_has.*pip install"):
        reference_module()


# ---------------------------------------------------------------- the page

HOSTILE = (
    "</script><script>document.title = 'mine'</script><img src=x onerror=\"document.title = 'mine'\">&amp;'\\u003c"
)


def write_page(folder, both=True):
    cases = [
        Case(HOSTILE, True, Conditioning(HOSTILE, instruct=HOSTILE)),
        Case("你好, again.", False, Conditioning("ada")),
    ]
    report = Report(folder, 24000, cases)
    for pair in range(4):
        for by in ("reference", "ours")[not both :]:
            report.wav(pair, by, reference_audio(0.5, seed=pair))
    report.write({"model": HOSTILE})
    return (folder / "index.html").read_text(encoding="utf-8")


def test_a_text_cannot_leave_its_place_in_the_page(tmp_path):
    page = write_page(tmp_path / "out")
    assert page.count("<script") == page.count("</script") == 2 and "<img" not in page
    data = page.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    told = json.loads(data)
    assert told["model"] == told["pairs"][0]["text"] == told["pairs"][0]["instruct"] == HOSTILE
    assert told["pairs"][1]["text"] == "你好, again." and len(told["pairs"]) == 4
    for pair in told["pairs"]:
        for name in pair["files"].values():
            with wave.open(str(tmp_path / "out" / name)) as file:
                assert file.getnframes() == 12000
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_plays_hides_and_reveals(tmp_path):
    """Hidden until revealed and shuffled by row, counted in the end; nothing is asked for but the folder's files."""
    from playwright.sync_api import sync_playwright

    write_page(tmp_path / "out")
    write_page(tmp_path / "alone", both=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        page = browser.new_page()
        asked_for, problems, orders = [], [], set()
        page.on("request", lambda request: asked_for.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        for _ in range(12):
            page.goto((tmp_path / "out/index.html").as_uri())
            sources = page.locator("audio").evaluate_all("all => all.map((audio) => audio.getAttribute('src'))")
            orders.add(tuple(source[3:-4] for source in sources))
        assert len(orders) > 1, "shuffled anew"
        assert "Greedy, both in fp32" in page.inner_text("body")
        assert page.title() == "Which is better?" and page.locator("section").count() == 4
        assert page.locator("section p").first.inner_text() == HOSTILE
        assert not page.locator("section img").count()
        words = page.inner_text("body")
        assert "ours" not in words and "A is better" in words
        durations = page.locator("audio").evaluate_all(
            """all => Promise.all(all.map(async (audio) => {
                 audio.muted = true;
                 await audio.play();
                 await new Promise((done) => { audio.onended = done; });
                 return audio.currentTime;
               }))"""
        )
        assert len(durations) == 8 and all(abs(seconds - 0.5) < 0.05 for seconds in durations)
        rows = page.locator("section")
        rows.nth(0).get_by_role("button", name="A is better").click()
        rows.nth(0).get_by_role("button", name="B is better").click()  # a choice can be changed
        rows.nth(2).get_by_role("button", name="no difference").click()
        assert "reference" not in page.inner_text("#counts")
        page.get_by_role("button", name="Reveal").click()
        chosen = sources[1][3:-4]
        ours = int(chosen == "ours")
        counts = page.locator("#counts li").all_inner_texts()
        assert counts[0].endswith(f"reference {1 - ours}, ours {ours}, no difference 0, not judged 1")
        assert counts[1].endswith("reference 0, ours 0, no difference 1, not judged 1")
        assert page.locator("section .name").all_inner_texts() == [source[3:-4] for source in sources]
        assert page.locator("section button:enabled").count() == 0
        page.goto((tmp_path / "alone/index.html").as_uri())
        assert page.locator("audio").count() == 4 and not page.locator("section button").count()
        assert not page.get_by_role("button", name="Reveal").is_visible()
        assert "both" not in page.inner_text("body") and "Greedy, in fp32" in page.inner_text("body")
        browser.close()
    assert not problems
    assert all(url.startswith(tmp_path.as_uri()) for url in asked_for)
