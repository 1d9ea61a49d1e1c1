"""The bytes of a text file as text: tells encodings apart, and names files that hold no text."""

import codecs
import re

from qwen_megakernel.errors import RequestError

HEAD = 4096  # bytes that tell a file's kind

_CONVERT = "convert it to EPUB, such as with Calibre"
_RECOGNISE = "recognise its text first, such as with tesseract"
_UNPACK = "unpack it, and name the text file in it"
_SAVE = "save it as plain text (UTF-8) in a word processor"
_NAME = "name a file with text"
_KINDS = (
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document (DOC)", _SAVE),
    (rb"\{\\rtf", "a rich text document (RTF)", _SAVE),
    (rb".{60}BOOKMOBI", "a Kindle book (MOBI)", _CONVERT),
    (rb"\x89PNG\r\n", "an image (PNG)", _RECOGNISE),
    (rb"\xff\xd8\xff", "an image (JPEG)", _RECOGNISE),
    (rb"GIF8[79]a.{0,7}[\0-\x1f]", "an image (GIF)", _RECOGNISE),
    (rb"RIFF.{4}WEBP", "an image (WebP)", _RECOGNISE),
    (rb"II\*\0|MM\0\*", "an image (TIFF)", _RECOGNISE),
    (rb"BM.{4}\0\0\0\0", "an image (BMP)", _RECOGNISE),
    (rb".{4}ftyp(?:avif|hei|mif1)", "an image (HEIF)", _RECOGNISE),
    (rb"AT&TFORM", "scanned pages (DjVu)", _RECOGNISE),
    (rb"RIFF.{4}WAVE|ID3[\2-\4]|OggS\0|fLaC\0|.{4}ftyp|\xff[\xfb\xf3\xf2]|\x1aE\xdf\xa3", "sound or video", _NAME),
    (rb"PK\x03\x04|PK\x05\x06", "a ZIP archive", _UNPACK),
    (rb"\x1f\x8b|BZh\d1AY|7z\xbc\xaf|Rar!\x1a|\xfd7zXZ|\x28\xb5\x2f\xfd", "a compressed file", _UNPACK),
)
"""The beginning of a file, its kind, and what to do."""

_BOMS = (  # UTF-32's little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_LEGACY = "cp1252 cp1250 iso8859_2 cp1251 koi8_r cp866 cp1253 cp1254 cp1255 cp1256 cp932 euc_jp gb18030 big5 cp949"
"""What charset-normalizer may choose from. Among all that it knows it often finds a rare encoding of the Baltic."""

_ALPHABETS = (
    "äöüß éèàùâêîôûëïüÿçæœ áéíóúüñ áéíóúâêôãõàüç àèéìíîòóùú åäöæøéü áðéíóúýþæö äöåšž àèéíòóúïüç éëïöüáó"
).split()
"""Letters beyond ASCII of languages for which Windows-1252 is used. charset-normalizer confuses it with others."""
_IN_WORDS = re.compile(r"(?<=[^\W\d_])[\xa1-\xb4\xb6\xb8-\xbf](?=[^\W\d_])")  # signs that no word has inside
_MARKS = frozenset("\xa0\xad€‚„…‘’“”•–—™¡£§©ª«®°·º»¿´½¼¾×²³")


def foreign_kind(head: bytes) -> tuple[str, str] | None:
    """What a file is and what to do with it, by its first `HEAD` bytes; None if it may be text."""
    for begin, kind, how in _KINDS:
        if re.match(begin, head, re.S):
            return kind, how
    if b"\0" in head and not head.startswith(tuple(bom for bom, _ in _BOMS)):
        return "a binary file", _NAME
    return None


def check_text(head: bytes, where: str) -> None:
    """Raises RequestError: these first bytes are not a text's. `where`: names the file in the message."""
    if found := foreign_kind(head):
        raise not_text(where, *found)


def not_text(where: str, kind: str, how: str) -> RequestError:
    return RequestError(f"{where}: expected text, Markdown or EPUB, got {kind}; {how}")


def decoded(data: bytes, where: str) -> tuple[str, str | None]:
    """The text, and the encoding's name if it had to be guessed. Without a byte order mark it is UTF-8, or a legacy
    encoding such as Windows-1252. Raises RequestError: no encoding fits. `where`: names the file in the message."""
    for bom, marked in _BOMS:
        if data.startswith(bom):
            try:
                return data.decode(marked), None
            except UnicodeDecodeError:
                shown = marked.removesuffix("-sig").upper()
                told = f"{where}: it begins as {shown}, but other bytes follow"
                raise RequestError(f"{told}; save it as UTF-8 again") from None
    try:
        return data.decode(), None
    except UnicodeDecodeError as error:
        _refuse_damaged(data, error, where)
    if name := _guessed(data):
        return data.decode(name), name
    raise RequestError(f"{where}: expected text, got bytes that no known encoding explains; save it as UTF-8")


def _refuse_damaged(data: bytes, error: UnicodeDecodeError, where: str) -> None:
    """Raises RequestError: the text is UTF-8 but for a few bytes. Another encoding would garble all of it."""
    text = data.decode(errors="replace")
    good = sum(len(run) for run in re.findall(r"[^\0-\x7f\ufffd]+", text))
    if good > 3 * text.count("\ufffd"):
        line = data.count(b"\n", 0, error.start) + 1
        why = f"line {line} has the byte 0x{data[error.start]:02x}, which is not UTF-8, and the rest is UTF-8"
        raise RequestError(f"{where}: {why}; correct that line")


def _guessed(data: bytes) -> str | None:
    from charset_normalizer import from_bytes  # imported here, because few texts need it

    if _is_western(data):
        return "cp1252"
    for name in ("cp932", "euc_jp"):
        if _is_japanese(data, name):
            return name
    found = from_bytes(data, cp_isolation=_LEGACY.split(), enable_fallback=False)
    best = min(found, key=lambda match: len(_IN_WORDS.findall(str(match))), default=None)  # of equal ones the first
    return best.encoding if best else None


def _is_western(data: bytes) -> bool:
    """Do nearly all letters beyond ASCII belong to one language for which Windows-1252 is used?"""
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        return False
    beyond = re.sub(r"[\0-\x7f]", "", text)
    letters = [c for c in beyond.lower() if c not in _MARKS]
    if len(letters) > 0.5 * sum(map(str.isalpha, text)) or re.search(r"[a-z][¡ª²³º¿][a-z]|\b[³¿¹][a-z]", text):
        return False
    return any(sum(c in alphabet for c in letters) >= 0.95 * len(letters) for alphabet in _ALPHABETS)


def _is_japanese(data: bytes, name: str) -> bool:
    """Are there many hiragana? In no other language's text do bytes give so many."""
    try:
        beyond = re.sub(r"[\0-\x7f]", "", data.decode(name))
    except UnicodeDecodeError:
        return False
    return 5 * len(re.findall("[\u3041-\u3096]", beyond)) > len(beyond)
