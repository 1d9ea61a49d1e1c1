"""narrate: a book's pieces through an engine into files."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from qwen_megakernel import TTSEngine
from qwen_megakernel.commands.book_files import BookFiles
from qwen_megakernel.commands.book_sound import Binder, Leveller, Pauses, in_order
from qwen_megakernel.commands.book_text import Book, Piece
from qwen_megakernel.commands.subtitles import Cue
from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.engine.utterance import ChunkStream
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.speech.request import SpeechRequest
from qwen_megakernel.speech.retries import say_well
from qwen_megakernel.speech.words import SpeechRate, weight, words_of
from qwen_megakernel.text.spoken_text import SpokenText


class Progress:
    """Shows when each chunk came, or estimated percent and time left. The estimate uses the words' letters and the
    length of earlier pieces. It stays below 100 % until the end, because a piece may take longer than estimated."""

    MOST = 0.99

    def __init__(self, pieces: list[str], speed: float, *, each_chunk: bool):
        self._speed = speed
        self._each_chunk = each_chunk
        self._weights = [sum(map(weight, words_of(piece))) for piece in pieces]
        self._rate = SpeechRate()
        self._number = 0  # of the current piece
        self._seconds = 0.0  # of that piece so far, at the model's own speed

    def __enter__(self) -> "Progress":
        self._start = time.monotonic()
        shown = "speaking {percentage:3.0f} %|{bar}| about {remaining} left, by the text's length{postfix}"
        hidden = True if self._each_chunk else None  # None: a bar in terminals only
        self._bar = tqdm(total=sum(self._weights), bar_format=shown, smoothing=0, leave=False, disable=hidden)
        self._bar.set_postfix_str(f"piece 1 of {len(self._weights)}")
        return self

    def chunk(self, chunk: Chunk) -> None:
        if self._each_chunk:
            print(f"{1000 * (time.monotonic() - self._start):8.1f} ms  {len(chunk.codes)} frames", file=sys.stderr)
        self._seconds += self._speed * len(chunk.samples) / chunk.sample_rate
        self._show()

    def piece_ends(self) -> None:
        self._rate.learn(self._weights[self._number], self._seconds)
        self._number, self._seconds = self._number + 1, 0.0
        if self._number < len(self._weights):
            self._bar.set_postfix_str(f"piece {self._number + 1} of {len(self._weights)}", refresh=False)
            self._show()

    def _show(self) -> None:
        said = min(self._seconds / self._rate.seconds, self._weights[self._number])
        said = min(sum(self._weights[: self._number]) + said, self.MOST * self._bar.total)
        self._bar.update(said - self._bar.n)

    def __exit__(self, *_error: object) -> None:
        self._bar.close()


@dataclass
class Narrated:
    """What was spoken.

    Attributes:
        frames: number of the model's frames.
        seconds: seconds of sound, with pauses.
        wall_s: seconds that speaking took.
        ttfc_s: the first piece's TTFC.
        ends: how pieces ended, each kind once.
        retries: how often a piece was spoken again.
        held_down: number of pieces below the wanted loudness, because of their peaks.
    """

    frames: int = 0
    seconds: float = 0.0
    wall_s: float = 0.0
    ttfc_s: float | None = None
    ends: list[str] = field(default_factory=list)
    retries: int = 0
    held_down: int = 0

    def add(self, audio: Audio) -> None:
        if not self.ends:
            self.ttfc_s = audio.ttfc_s
        self.frames += len(audio.codes)
        self.retries += audio.attempts - 1
        if audio.finish_reason not in self.ends:
            self.ends.append(audio.finish_reason)


def narrate(
    engine: TTSEngine,
    book: Book,
    pieces: Sequence[Piece],
    request_of: Callable[[Piece], SpeechRequest],
    files: BookFiles,
    progress: Progress,
    pauses: Pauses | None,
    loudness: float | None,
) -> Narrated:
    """Speak the pieces and write them in order. Twice as many are open at once as the engine has slots.

    Args:
        pieces: the book's pieces, each of which fits a slot.
        request_of: how to speak a piece. With retries a piece is heard only once it is whole.
        pauses: between pieces; None: there is one piece, and it stays as the engine speaks it.
        loudness: of each piece, in LUFS; None: unchanged.

    Raises:
        TTSError: a piece cannot be spoken, or its sound cannot be written.
    """
    leveller = None if loudness is None else Leveller(loudness, engine.sample_rate)
    binder = Binder(lambda samples: files.write(pcm16(samples)), engine.sample_rate, pauses, leveller)
    told, began = Narrated(), time.monotonic()
    begun: Piece | None = None
    ended: Piece | None = None  # the last piece that ended

    def stream(piece: Piece) -> ChunkStream:
        return ChunkStream(engine.begin(text_of(piece), request_of(piece)))

    def text_of(piece: Piece) -> SpokenText:
        if pauses is not None:
            return SpokenText(piece.text)
        return SpokenText(piece.text, piece.pause_s, book.after_s, ends_at_pause=book.after_s > 0)  # the only piece

    def hear(piece: Piece, first: ChunkStream) -> Iterator[Chunk | Audio]:
        request = request_of(piece)
        if request.retries:
            yield from _heard_well(engine, text_of(piece), first, request)
        else:
            yield from first
            yield first.utterance.result()

    for piece, heard in in_order(pieces, stream, hear, 2 * engine.slots):
        if piece is not begun:
            if (begun is None or piece.chapter != begun.chapter) and files.begin_chapter():
                binder.new_file()
            begun = piece
            binder.begin(piece)
        if isinstance(heard, Chunk):
            progress.chunk(heard)
            binder.add(heard.samples)
            continue
        first, last = binder.end()
        if ended is None or ended.chapter != piece.chapter:
            files.mark_chapter(first, book.titles[piece.chapter] or str(piece.chapter + 1))
        cue = Cue(first, last, book.sentences[piece.sentence])
        files.add_cue(cue, goes_on=ended is not None and ended.sentence == piece.sentence)
        ended = piece
        told.add(heard)
        progress.piece_ends()
    if pauses is not None:
        binder.silence(book.after_s)
    told.held_down = leveller.held_down if leveller else 0
    told.seconds, told.wall_s = binder.seconds, time.monotonic() - began
    return told


def _heard_well(
    engine: TTSEngine, text: SpokenText, first: ChunkStream, request: SpeechRequest
) -> Iterator[Chunk | Audio]:
    """A whole piece as one chunk. `first`: the first attempt, which has already begun."""
    begun = [first]

    def say(request: SpeechRequest) -> Audio:
        return (begun.pop().utterance if begun else engine.begin(text, request)).result()

    audio = say_well(say, request, engine.count_retry)
    yield Chunk(audio.samples, audio.codes, audio.sample_rate)
    yield audio
