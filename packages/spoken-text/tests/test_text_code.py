"""Names as programs write them: files, functions, hashes and keys."""

import hashlib
import random
import secrets
import uuid

import pytest
from test_text_rules import DE, EN, FR, ZH, normalized

from spoken_text.code import is_secret

ROWS = [
    (EN, "Edit config.yaml, then README.md.", "Edit config dot yaml, then README dot md."),
    (EN, "See docs/user_guide/setup.md or ./run.sh.", "See docs user guide setup dot md or run dot sh."),
    (EN, "Look into /etc/nginx/nginx.conf and ~/bin.", "Look into etc nginx nginx dot conf and bin."),
    (EN, r"Open C:\Users\ann\notes.txt now.", "Open C Users ann notes dot txt now."),
    (EN, "An error in main.cpp:42.", "An error in main dot cpp forty-two."),
    (EN, "Node.js and song.mp3", "Node dot js and song dot mp three"),
    (EN, "Set it in .bashrc.", "Set it in dot bashrc."),
    (EN, "Call readFile() or np.array() or std::sort().", "Call read File or np dot array or std dot sort."),
    (EN, "He lived in 44 a.C. (and/or later).", "He lived in forty-four a.C. (and/or later)."),
    (EN, "TCP/IP, 50 km/h, e.g. this", "TCP/IP, fifty kilometers per hour, e.g. this"),
    (EN, "I like YouTube.So do they.", "I like YouTube.So do they."),
    (EN, "Commit 6e232d7 fixed it.", "Commit fixed it."),
    (EN, "(550e8400-e29b-41d4-a716-446655440000) is it", "is it"),
    (EN, "Use sk-abC123DEF456ghi789XYZ here.", "Use here."),
    (EN, "Your booking is A1B2C3D4.", "Your booking is A one B two C three D four."),
    (EN, "It is at s3://bucket/a/b5.bin", "It is at bucket"),
    (EN, "MAC 00:1B:44:11:3A:B7, IP 2001:db8::1", "MAC 00:1B:44:11:3A:B7, IP 2001:db8::1"),
    (EN, "At 10:30 and 2:05:10", "At ten thirty and two hours five minutes ten seconds"),
    (DE, "In config.yaml steht es.", "In config Punkt yaml steht es."),
    (FR, "Ouvrez notes.txt.", "Ouvrez notes point txt."),
    (ZH, "打开config.yaml文件", "打开config点yaml文件"),
    (None, "Edit config.yaml: 6e232d7", "Edit config.yaml: "),
]


@pytest.mark.parametrize(("language", "text", "said"), ROWS)
def test_a_name(language, text, said):
    assert normalized(language, text) == said


def test_hashes_and_keys_are_left_out_and_words_and_numbers_are_not():
    dice = random.Random(seed := random.randrange(2**32))
    print(f"{seed=}")
    for _ in range(200):
        number = str(dice.getrandbits(128))
        digest = hashlib.sha256(number.encode()).hexdigest()
        assert is_secret(digest) and is_secret(str(uuid.UUID(int=dice.getrandbits(128))))
        assert normalized(EN, f"a {digest} b") == "a b"
        assert not is_secret(number) and not is_secret(number.upper())
        assert not is_secret("".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randrange(1, 40))))
    assert is_secret(secrets.token_hex(32))
