#!/usr/bin/env python3
"""as_typed.py CHECKPOINT [--every N] [--threads N]: does the voice read texts as people type them (as_typed.txt)?

Both speakers say every sentence as it is typed and in plain ASCII, and whisper base listens. The gate: as many words
are heard within 2 %, and no sentence takes more than 1.3 times as long.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

from anyascii import anyascii

HERE = Path(__file__).parent
MOST_LOST, LONGEST = 0.02, 1.3
_PLAIN = [
    (r"\s*\n\s*", " "),  # line breaks
    (r"[“”„«»\"*_]", ""),  # quotes
    (r"(^|\s)['‘](\w+)['’](?=\W|$)", r"\1\2"),
    (r"[’‘]", "'"),
    (r"\s*(—|–| - |--)\s*", ", "),
    (r"(…|\.\.\.)$", "."),
    (r"(…|\.\.\.)\s*", ", "),
    (r"\s*\(", ", "),
    (r"\)(?=[.!?,]|$)", ""),
    (r"\)", ","),
    ("&", "and"),
    ("%", " percent"),
    (r",(\s*,)+", ","),
    (r"([.!?]),", r"\1"),
]


def sentences():
    """The sentences as they are typed."""
    return [line.replace("\\n", "\n") for line in (HERE / "as_typed.txt").read_text(encoding="utf-8").splitlines()]


def plain(text):
    """The same words in ASCII, without a mark that only the eye needs."""
    for mark, instead in _PLAIN:
        text = re.sub(mark, instead, text)
    return anyascii(text).strip()


def compare(say, hear, texts):
    """Shares of the words that are heard in the texts as typed and in plain ASCII, and how many times as long each
    typed one takes. `say`: text -> fp32 samples; `hear`: a list of them -> a list of lists of words."""
    import asr

    asked = [plain(t) for t in texts]
    spoken = [[say(t) for t in some] for some in (texts, asked)]
    wanted = [Counter(asr.words(t)) for t in asked]
    shares = []
    for waves in spoken:
        heard = [Counter(words) for words in hear(waves)]
        found = sum((want & got).total() for want, got in zip(wanted, heard, strict=True))
        shares.append(found / sum(want.total() for want in wanted))
    return *shares, [len(a) / len(b) for a, b in zip(*spoken, strict=True)]


def main():
    import asr

    from qwen_megakernel import SamplingParams, TTSEngine

    p = argparse.ArgumentParser()
    p.add_argument("checkpoint")
    p.add_argument("--every", type=int, default=1, help="take one sentence of N")
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    texts, whisper, failed = sentences()[:: a.every], asr.Whisper(a.threads), False
    with TTSEngine.load(a.checkpoint) as engine:
        for speaker in ("ada", "max"):

            def say(text, speaker=speaker):
                return engine.generate(text, speaker=speaker, sampling=SamplingParams(seed=1)).samples

            def hear(waves):
                return [asr.words(text) for text in whisper.transcribe(waves)]

            typed, ascii_, longer = compare(say, hear, texts)
            worst = max(range(len(texts)), key=longer.__getitem__)
            mean = sum(longer) / len(longer)
            print(f"{speaker}: words heard as typed {typed:.1%}, in ASCII {ascii_:.1%} of {len(texts)} sentences")
            print(f"  as typed {mean:.2f} times as long, at most {longer[worst]:.2f}: {texts[worst]!r}", flush=True)
            failed |= typed < ascii_ - MOST_LOST or longer[worst] > LONGEST
    if failed:
        raise SystemExit("the gate is not passed")


if __name__ == "__main__":
    main()
