#!/usr/bin/env python3
"""evaluate.py OUT.json VOICE ... [--only GROUP ...] [--style FILE] [--threads N]
[--measures NAME ...]: predicted opinion scores, and the words that are recognised.

A VOICE is `teacher`, a CODEC.pt (the teachers' speech after the codec alone), or whatever
`--model` takes (`demo`, a checkpoint's folder), spoken by this package's engine. Every speaker says
every group of held_out.txt. OUT.json keeps rows that it holds already; a table of all comes last.
"""

import argparse
import json
import sys
import time
import types
from pathlib import Path

import asr
import numpy as np
import teacher
import torch

MEASURES = ("distill", "dnsmos", "whisper", "pocketsphinx")


def groups():
    """By name, the held-out sentences."""
    out = {}
    for line in Path(__file__).with_name("held_out.txt").read_text().splitlines():
        if line.startswith("# "):
            texts = out.setdefault(line[2:], [])
        elif line:
            texts.append(line)
    return out


def teachers(speaker, style):
    reader, voice = teacher.Reader(), teacher.open_teacher(speaker, style)

    def say(text):
        read = reader.read(text)
        return teacher.utterance(text, read, voice.speak([s[1] for s in read]), speaker)[0] / 32768

    return say


def coded(path, speaker, style):
    """The teacher's speech after the codec."""
    from codec import load

    enc, vq, dec = load(path)
    speak = teachers(speaker, style)

    def say(text):
        with torch.no_grad():
            x = torch.tensor(speak(text), dtype=torch.float32)[None]
            return dec(vq(enc(x))[0])[0].numpy()

    return say


def engine(model, speaker):
    from qwen_megakernel import SamplingParams, TTSEngine

    opened = TTSEngine.load(model, device="cpu", max_streams=1)
    return lambda text: opened.generate(text, speaker=speaker, sampling=SamplingParams(seed=7)).samples


class Measures:
    def __init__(self, names, threads):
        self.names = names
        if "distill" in names:
            # distillmos imports torchaudio, but uses it only to read files.
            sys.modules["torchaudio"] = types.ModuleType("torchaudio")
            import distillmos

            del sys.modules["torchaudio"]
            self.distill = distillmos.ConvTransformerSQAModel().eval()
        if "dnsmos" in names:
            import speechmos.dnsmos

            self.dnsmos = speechmos.dnsmos
        if "whisper" in names:
            self.whisper = asr.Whisper(threads)

    def row(self, texts, waves):
        at16k = [asr.to_16k(w).astype(np.float32) for w in waves]
        row = {
            "level": round(float(teacher.level(np.concatenate(waves))), 1),
            "seconds": round(sum(map(len, waves)) / teacher.RATE, 1),
        }
        if "distill" in self.names:
            with torch.no_grad():
                mos = [float(self.distill(torch.from_numpy(x)[None])) for x in at16k]
            row |= {"distill": round(float(np.mean(mos)), 2), "lowest": round(min(mos), 2)}
        if "dnsmos" in self.names:
            # DNSMOS looks at 9.01 s: repeat shorter speech to just that, or it looks at each repetition many times.
            enough = [np.resize(x, max(len(x), 144160)) for x in at16k]
            overall = [float(self.dnsmos.run(x, sr=16000)["ovrl_mos"]) for x in enough]
            row["dnsmos"] = round(float(np.mean(overall)), 2)
        if "whisper" in self.names:
            heard = self.whisper.transcribe(waves)
            row |= {"whisper": asr.score(texts, heard), "heard": heard}
        if "pocketsphinx" in self.names:
            row["pocketsphinx"] = asr.score(texts, asr.transcribe(waves))
        return row


def table(result):
    print("| voice | speaker | sentences | Distill-MOS (lowest) | DNSMOS | words, whisper / pocketsphinx | dB |")
    print("|---|---|---|---:|---:|---:|---:|")
    for key, r in result.items():
        words = " / ".join(f"{100 * r[k]['recognised']:.1f} %" if k in r else "-" for k in ("whisper", "pocketsphinx"))
        opinion = f"{r['distill']:.2f} ({r['lowest']:.2f})" if "distill" in r else "-"
        print("|", " | ".join([*key.split(", "), opinion, str(r.get("dnsmos", "-")), words, str(r["level"])]), "|")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("voices", nargs="+")
    p.add_argument("--only", nargs="+", help="groups of sentences")
    p.add_argument("--style", help="am_michael.bin of the package kokoro-js")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--measures", nargs="+", default=MEASURES, choices=MEASURES)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    result = json.loads(a.out.read_text()) if a.out.exists() else {}
    measures = Measures(a.measures, a.threads)
    for voice in a.voices:
        name = Path(voice).stem
        for speaker in teacher.SPEAKERS:
            say = None
            for group, texts in groups().items():
                key = f"{name}, {speaker}, {group}"
                if key in result or (a.only and group not in a.only):
                    continue
                if say is None:
                    if voice == "teacher":
                        say = teachers(speaker, a.style)
                    else:
                        say = coded(voice, speaker, a.style) if voice.endswith(".pt") else engine(voice, speaker)
                began = time.monotonic()
                waves = [np.asarray(say(t), np.float32) for t in texts]
                said = time.monotonic()
                result[key] = measures.row(texts, waves)
                print(key, f"spoken in {said - began:.0f} s, measured in {time.monotonic() - said:.0f} s", flush=True)
                a.out.write_text(json.dumps(result, indent=1))
    table(result)


if __name__ == "__main__":
    main()
