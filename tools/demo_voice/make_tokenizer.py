#!/usr/bin/env python3
"""make_tokenizer.py TEXTS.gz OUT_DIR MERGES: byte-level BPE in the files that the published
checkpoints use (vocab.json, merges.txt, tokenizer_config.json), special tokens right after the base
vocabulary."""

import gzip
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from qwen_megakernel.model.folding import FOLDS

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre():
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def stored(folder):
    """vocab {token: id}, and merges [(left, right)]."""
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[1:]
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return vocab, [tuple(line.split(" ")) for line in lines if line]


def load(folder, dropout=None):
    """The tokenizer as the `tokenizers` library sees it, for training (dropout: BPE-dropout)."""
    t = Tokenizer(models.BPE(*stored(Path(folder)), dropout=dropout))
    t.normalizer, t.pre_tokenizer = normalizers.NFC(), pre()
    return t


def special(folder):
    v = json.loads((Path(folder) / "vocab.json").read_text(encoding="utf-8"))
    n = len(v)
    s = {t: n + i for i, t in enumerate(SPECIALS)}
    return dict(
        size=n + len(SPECIALS),
        role=[s["<|im_start|>"], v["assistant"], v["\u010a"]],
        pad=s["<tts_pad>"],
        bos=s["<tts_text_bos>"],
        eos=s["<tts_text_eod>"],
        im_start=s["<|im_start|>"],
        im_end=s["<|im_end|>"],
        assistant=v["assistant"],
    )


def write(out, vocab, merges):
    """The tokenizer's files: vocab {token: id} in the order of ids, merges [(left, right)]."""
    out.mkdir(parents=True, exist_ok=True)
    n = len(vocab)
    (out / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (out / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in merges),
        encoding="utf-8",
    )
    plain = set(SPECIALS[14:26])
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "add_bos_token": False,
                "add_prefix_space": False,
                "added_tokens_decoder": {
                    str(n + i): {
                        "content": t,
                        "lstrip": False,
                        "normalized": False,
                        "rstrip": False,
                        "single_word": False,
                        "special": t not in plain,
                    }
                    for i, t in enumerate(SPECIALS)
                },
                "additional_special_tokens": [t for t in SPECIALS[1:] if t not in plain],
                "bos_token": None,
                "clean_up_tokenization_spaces": False,
                FOLDS: True,
                "eos_token": "<|im_end|>",
                "errors": "replace",
                "model_max_length": 131072,
                "pad_token": "<|endoftext|>",
                "split_special_tokens": False,
                "tokenizer_class": "Qwen2Tokenizer",
                "unk_token": None,
            },
            indent=1,
            ensure_ascii=False,
        ),
        encoding="utf-8",
    )


def extend(folder, out, texts):
    """A tokenizer that makes one token of every character of `texts`, and of "’s" and the like, too. Ids of the base
    vocabulary stay; special tokens move behind the new ones."""
    vocab, merges = stored(folder)
    for text in texts:
        while len(parts := _tokens(vocab, merges, text)) > 1:
            merges.append(tuple(parts[:2]))
            vocab["".join(parts[:2])] = len(vocab)
    write(out, vocab, merges)


def _tokens(vocab, merges, text):
    t = Tokenizer(models.BPE(vocab, merges))
    t.pre_tokenizer = pre()
    return t.encode(text).tokens


if __name__ == "__main__":
    texts = gzip.open(sys.argv[1], "rt").read().strip("\n").split("\n")
    out = Path(sys.argv[2])
    # the role word must be one token
    tok = Tokenizer(models.BPE())
    tok.normalizer, tok.pre_tokenizer = normalizers.NFC(), pre()
    tok.train_from_iterator(
        texts + ["assistant"] * 20000,
        trainers.BpeTrainer(
            vocab_size=256 + int(sys.argv[3]),
            min_frequency=2,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    m = json.loads(tok.to_str())["model"]
    vocab = dict(sorted(m["vocab"].items(), key=lambda kv: kv[1]))
    assert "assistant" in vocab and vocab["\u010a"] == 198
    write(out, vocab, [tuple(a.split(" ")) if isinstance(a, str) else tuple(a) for a in m["merges"]])
    n = len(vocab)
    t = load(out)
    s = texts[:5000]
    print(
        n,
        "base ids;",
        sum(map(len, s)) / sum(len(t.encode(x).ids) for x in s),
        "chars per token;",
        t.encode("Hello there, how can I help you today?").tokens,
        special(out),
    )
