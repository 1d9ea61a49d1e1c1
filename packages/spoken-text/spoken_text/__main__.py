"""The command line: `python -m spoken_text --language de "Das kostet 5 €."`"""

import argparse
import logging
import sys

from spoken_text import Lexicon, Pause, TextFrontEnd
from spoken_text.errors import RequestError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("spoken-text", description="Print a text as it is read aloud.")
    parser.add_argument("text", nargs="*", help="the text; without it: standard input")
    parser.add_argument("--language", help="name or code, such as german or de; default: the text's own")
    parser.add_argument("--lexicon", metavar="FILE", help="how to read words, .json or .csv")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        lexicon = Lexicon.load(args.lexicon) if args.lexicon else None
        front_end = TextFrontEnd(args.language, "auto", lexicon)
        text = " ".join(args.text) if args.text else sys.stdin.read()
        parts = front_end.whole(text)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("".join(f"[pause {part.seconds:g}s]" if isinstance(part, Pause) else part for part in parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
