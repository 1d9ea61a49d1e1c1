#!/usr/bin/env python3
"""unpack.py CHECKPOINT OUT_DIR: the inverse of export.py. OUT_DIR gets `tts.pt`, `codec.pt` (decoder and codebooks,
no encoder) and `tok`, so that a training can go on from a checkpoint."""

import re
import shutil
import sys
from pathlib import Path

import torch
from make_tokenizer import special
from safetensors.torch import load_file
from tts import G


def decoder(folder):
    """Decoder weights under train_codec.py's names, and the codebooks [16, 128, 48]."""
    stored = load_file(folder / "speech_tokenizer" / "model.safetensors")
    dec, books = {}, [None] * G
    for name, value in stored.items():
        if not name.startswith("decoder."):
            continue
        name = name.removeprefix("decoder.")
        if not name.startswith("quantizer."):
            dec[name] = value
        elif name == "quantizer.rvq_first.output_proj.weight":
            dec["output_proj.weight"] = value
        elif name.endswith("embedding_sum"):
            rest = re.search(r"rvq_rest\.vq\.layers\.(\d+)", name)
            books[int(rest[1]) + 1 if rest else 0] = value
    return dec, torch.stack(books)


def main():
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    (out / "tok").mkdir(parents=True, exist_ok=True)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(folder / name, out / "tok" / name)
    net = {name.removeprefix("talker."): value for name, value in load_file(folder / "model.safetensors").items()}
    text = "model.text_embedding.weight"
    net[text] = net[text][: special(out / "tok")["size"]].clone()
    torch.save({"net": net}, out / "tts.pt")
    dec, books = decoder(folder)
    torch.save({"dec": dec, "books": books}, out / "codec.pt")


if __name__ == "__main__":
    main()
