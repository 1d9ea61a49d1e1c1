"""Text, language, speaker, instruct and reference -> prompt rows and the text rows that trail them.

A row is one position of the talker's input: a text term plus a codec term. In the non-streaming layout the
whole text stands in the prompt; in the streaming layout the text starts with the first frame and goes on
one row per frame. Layout of a prompt, after `qwen_tts` 0.1.1 (Qwen3TTSForConditionalGeneration.generate):

    block        rows    text term        codec term
    instruct     any     its ids          -                        (optional)
    role         3       <|im_start|>assistant\\n    -
    tags         3 or 4  pad              nothink / think + language
    speaker      0 or 1  pad              speaker id, or the voice's vector
    bridge       1       tts_bos          codec_pad
    text ...             see `PromptBuilder._text_block` and `_icl_block`

What stands before the first row that the text touches is an opening: computed once per voice, language and instruct.
"""

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.errors import (
    CheckpointError,
    LanguageError,
    RequestError,
    SpeakerError,
    TextError,
    TextTooLongError,
)
from qwen_megakernel.model.text import PieceEncoder, TextTokenizer, split_to_fit
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.voice import Voice

AUTO = "auto"
FRAMES_A_TOKEN = 5
"""Room for speech that `PromptBuilder.pieces` leaves. The demo voice takes 2 to 4 in any language, 8 for digits."""
KEPT_VOICES = 16
"""Openings that a `PromptBuilder` keeps, the latest used."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first rows of a prompt, which its text does not touch. Prompts that share them share this object, so that
    whoever computes something from them can keep it beside the object and find it again.

    Attributes:
        rows: how many; fewer than the prompt has.
    """

    rows: int


class Tokens(NamedTuple):
    """Ids of a text: of the role in front of it, which a line break that opens the text may touch, and its own."""

    role: list[int]
    text: list[int]


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a frame decoder needs of a request.

    Attributes:
        rows: [T, hidden], prefilled at positions 0..T-1.
        trailing: [R, hidden]; frame k (from 0) adds row k to the sum of its code embeddings.
        pad: [hidden]; what later frames add.
        prefix: rows that other prompts begin with too.
        text_open: more trailing rows will come (`FrameDecoder.extend`).
    """

    rows: Tensor
    trailing: Tensor
    pad: Tensor
    prefix: Prefix | None = None
    text_open: bool = False


class PromptBuilder:
    """Builds prompts for one checkpoint; constant rows are made once. Thread-safe.

    Attributes:
        speakers: names that `speaker` may take, in the checkpoint's order (empty unless CustomVoice).
        languages: names that `language` may take, "auto" first.
    """

    def __init__(
        self, config: ModelConfig, tokenizer: TextTokenizer, embeddings: Embeddings, *, kept_voices: int = KEPT_VOICES
    ):
        self._config, self._tokenizer, self._embed = config, tokenizer, embeddings
        self.speakers: tuple[str, ...] = tuple(config.talker.speakers)
        # Dialects are chosen through their speakers; the reference hides them from its list too.
        self.languages: tuple[str, ...] = (AUTO, *config.talker.named_languages)
        self._newline = tokenizer.encode("\n")
        self._role = [config.im_start_id, *tokenizer.encode("assistant\n")]
        if len(self._role) != 3:
            raise CheckpointError(
                f"vocab.json, merges.txt: 'assistant\\n' must be two tokens, is {len(self._role) - 1}"
            )
        self._bos, self._eos, self._pad = embeddings.text([config.tts_bos_id, config.tts_eos_id, config.tts_pad_id])
        self._codec_pad, self._codec_bos = embeddings.code0([config.talker.codec_pad_id, config.talker.codec_bos_id])
        self._bridge, self._start = (self._bos + self._codec_pad)[None], (self._pad + self._codec_bos)[None]
        role = embeddings.text(self._role)
        self._leads: dict[tuple, Tensor] = {}  # role, tags and speaker of every language with every speaker
        for speaker in (None, *self.speakers):
            for language in self.languages:
                tags = self._tag_ids(language, speaker)
                self._leads[(*self._role, *tags, speaker)] = self._make_lead(role, tags, speaker)
        self._openings: dict[tuple, _Opening] = {}  # the latest used last
        self._kept, self._lock = kept_voices, threading.Lock()

    def tokens(self, text: str) -> Tokens:
        """Ids of a text that is to be spoken.

        Raises:
            TextError: not a string, not valid Unicode, or blank.
        """
        return self._tokens(text, "text")

    def build(
        self,
        text: str | Tokens,
        *,
        language: str | None = None,
        speaker: str | None = None,
        instruct: str | None = None,
        voice: Voice | None = None,
        non_streaming_mode: bool = True,
        max_positions: int = sys.maxsize,
    ) -> Prompt:
        """Rows of one request.

        Args:
            text: what to say, or its `tokens`.
            language: a name of `languages`, any case; None is "auto".
            speaker: a name of `speakers`, any case; None or "" leaves the speaker row out.
            instruct: how to say it; None or "" leaves the block out.
            voice: speaker vector, and with reference codes and text the in-context (ICL) layout.
            non_streaming_mode: True puts the whole text before the first frame.
            max_positions: of a slot.

        Raises:
            SpeakerError, LanguageError: unknown; the known ones are listed.
            TextError: see `tokens`.
            TextTooLongError: prompt and one frame per text row need more than `max_positions`; speech takes
                several frames for a row, so such a text is hopeless. Found before anything is computed.
        """
        role, ids = text if isinstance(text, Tokens) else self.tokens(text)
        opening = self._opening(role, language, speaker, instruct, voice)
        needed = opening.needed(len(ids), non_streaming_mode)
        if needed > max_positions:
            raise TextTooLongError(
                f"the request needs at least {needed} positions and a slot has {max_positions} (tokens: text "
                f"{len(ids)}, instruct {len(opening.instruct_ids)}, reference {len(opening.reference_ids)} and "
                f"{opening.frame_count} frames): cut the text (TTSEngine.pieces), shorten the others, or raise "
                "max_positions"
            )
        return self._prompt(opening, ids, non_streaming_mode)

    def pieces(
        self,
        text: str,
        *,
        language: str | None = None,
        speaker: str | None = None,
        instruct: str | None = None,
        voice: Voice | None = None,
        non_streaming_mode: bool = True,
        max_positions: int,
    ) -> list[str]:
        """The text, cut at sentences into pieces of which `build` makes prompts that leave room for their speech, at
        `FRAMES_A_TOKEN`.

        Raises:
            SpeakerError, LanguageError: unknown; the known ones are listed.
            TextError: not a string, not valid Unicode, or blank.
            TextTooLongError: instruct and reference leave no room for any text.
        """
        if not isinstance(text, str):
            raise TextError(f"text must be a string, got {type(text).__name__}")
        opening = self._opening(self._role, language, speaker, instruct, voice)
        fixed = opening.needed(0, non_streaming_mode)
        if opening.needed(1, non_streaming_mode) > max_positions:
            raise _no_room(fixed, max_positions)
        most = min((max_positions - fixed) // (1 + FRAMES_A_TOKEN), self._config.max_frames // FRAMES_A_TOKEN)
        pieces = split_to_fit(text, lambda piece: len(self.tokens(piece).text), max(1, most))
        if not pieces:
            raise TextError("text must not be blank")
        return pieces

    @property
    def kept_openings(self) -> int:
        return len(self._openings)

    def forget(self) -> None:
        """Every opening that was kept."""
        with self._lock:
            self._openings.clear()

    def begin(
        self,
        *,
        language: str | None = None,
        speaker: str | None = None,
        instruct: str | None = None,
        voice: Voice | None = None,
        max_positions: int = sys.maxsize,
    ) -> "PromptPieces":
        """The same in the streaming layout, for text that comes in pieces."""
        return PromptPieces(self, language, speaker, instruct, voice, max_positions)

    def known_speaker(self, speaker: str) -> str:
        """The speaker's name as the checkpoint spells it.

        Raises:
            SpeakerError: unknown; the known ones are listed.
        """
        return self._known(speaker, self.speakers, "speaker", SpeakerError)

    def known_language(self, language: str | None) -> str:
        """The language's name as the checkpoint spells it; None is "auto".

        Raises:
            LanguageError: unknown; the known ones are listed.
        """
        return AUTO if language is None else self._known(language, self.languages, "language", LanguageError)

    # ------------------------------------------------------------ ids

    def _turn_ids(self, role: str, text: str) -> list[int]:
        """<|im_start|>{role}\\n{text}<|im_end|>\\n. Role and text are encoded together, as one run between
        two special tokens, because a line break that opens the text joins the one after the role."""
        inside = self._tokenizer.encode(f"{role}\n{text}")
        return [self._config.im_start_id, *inside, self._config.im_end_id, *self._newline]

    def _tokens(self, text: str, name: str) -> Tokens:
        if not isinstance(text, str):
            raise TextError(f"{name} must be a string, got {type(text).__name__}")
        if not text.strip():
            raise TextError(f"{name} must not be blank")
        ids = self._turn_ids("assistant", text)[: -1 - len(self._newline)]
        if len(ids) < 4:
            raise TextError(f"{name} {text!r} has no token to speak")
        return Tokens(ids[:3], ids[3:])

    def _tag_ids(self, language: str | None, speaker: str | None) -> list[int]:
        talker = self._config.talker
        name = self.known_language(language)
        if name in (AUTO, "chinese") and speaker in talker.dialects:
            name = talker.dialects[speaker]
        if name == AUTO:
            return [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        language_id = talker.languages[name]
        return [talker.codec_think_id, talker.codec_think_bos_id, language_id, talker.codec_think_eos_id]

    @staticmethod
    def _known(name: str, known: Sequence[str], what: str, error: type[RequestError]) -> str:
        if not isinstance(name, str) or name.lower() not in known:
            listed = ", ".join(known) if known else f"none, this checkpoint has no {what}s"
            raise error(f"unknown {what} {name!r}; known: {listed}")
        return name.lower()

    # ------------------------------------------------------------ rows

    def _lead(self, role: list[int], tags: list[int], speaker: str | None) -> Tensor:
        """Role, pad + tags, pad + speaker; made before, or now for a role that the text touched."""
        kept = self._leads.get((*role, *tags, speaker))
        return self._make_lead(self._embed.text(role), tags, speaker) if kept is None else kept

    def _make_lead(self, role: Tensor, tags: list[int], speaker: str | None) -> Tensor:
        ids = [*tags, *([self._config.talker.speakers[speaker]] if speaker else [])]
        return torch.cat([role, self._pad + self._embed.code0(ids)])

    def _opening(
        self, role: list[int], language: str | None, speaker: str | None, instruct: str | None, voice: Voice | None
    ) -> "_Opening":
        """The one that was kept, or a new one, which then is."""
        name = self.known_speaker(speaker) if speaker else None
        tags = self._tag_ids(language, name)
        key = (*role, *tags, name, instruct or "", None if voice is None else voice.digest)
        with self._lock:
            opening = self._openings.pop(key, None)
            if opening is None:
                opening = _Opening(self, role, tags, name, instruct, voice)
            self._openings[key] = opening
            if len(self._openings) > self._kept:
                del self._openings[next(iter(self._openings))]
        return opening

    def _prompt(self, opening: "_Opening", ids: list[int], non_streaming_mode: bool) -> Prompt:
        if opening.frames is None:
            block, trailing = self._text_block(ids, non_streaming_mode)
        else:
            block, trailing = self._icl_block(opening, ids, non_streaming_mode)
        return Prompt(torch.cat([opening.rows, block]), trailing, self._pad, opening.prefixes[non_streaming_mode])

    def _text_block(self, ids: list[int], non_streaming_mode: bool) -> tuple[Tensor, Tensor]:
        text = torch.cat([self._embed.text(ids), self._eos[None]])
        if non_streaming_mode:  # text and its end over codec_pad, then pad + codec_bos; nothing trails
            return torch.cat([text + self._codec_pad, self._start]), self._pad[None]
        return text[:1] + self._codec_bos, text[1:]

    def _icl_block(self, opening: "_Opening", ids: list[int], non_streaming_mode: bool) -> tuple[Tensor, Tensor]:
        """Reference text and text share one track, codec_bos and the reference frames the other."""
        text, frames = torch.cat([opening.reference, self._embed.text(ids), self._eos[None]]), opening.frames
        if non_streaming_mode:
            return torch.cat([text + self._codec_pad, frames + self._pad]), self._pad[None]
        if len(text) > len(frames):
            return text[: len(frames)] + frames, text[len(frames) :]
        padding = self._pad.expand(len(frames) - len(text), -1)
        return torch.cat([text, padding]) + frames, self._pad[None]


class _Opening:
    """What prompts of one voice, language and instruct have in common. Rows are made when they are first needed.

    Attributes:
        length: of `rows`.
        frame_count: frames of the reference.
        prefixes: of a prompt in the streaming layout and in the non-streaming one.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        role: list[int],
        tags: list[int],
        speaker: str | None,
        instruct: str | None,
        voice: Voice | None,
    ):
        self._builder, self._role, self._tags, self._speaker = builder, role, tags, speaker
        # Copies: what is made of them later must be what they were when they were looked up.
        self._vector = None if voice is None else voice.speaker_embedding.clone()
        self._codes = None if voice is None or voice.ref_codes is None else voice.ref_codes.clone()
        self.instruct_ids = builder._turn_ids("user", instruct) if instruct else []
        self.reference_ids = [] if self._codes is None else builder._tokens(voice.ref_text, "ref_text").text
        self.frame_count = 0 if self._codes is None else len(self._codes)
        self.length = len(self.instruct_ids) + len(role) + len(tags) + bool(speaker) + (voice is not None) + 1
        # In-context, the reference's text leads the text track, over its frames or, non-streaming, before them. The
        # prompt's last row is never part of a prefix.
        streaming = min(len(self.reference_ids), self.frame_count)
        self.prefixes = (Prefix(self.length + streaming), Prefix(self.length + len(self.reference_ids)))

    def needed(self, tokens: int, non_streaming_mode: bool) -> int:
        """Positions of a prompt of so many of the text's tokens, and of one frame for every text row."""
        needed = self.length + self.frame_count + tokens + 1
        return needed + len(self.reference_ids) + tokens + 1 if non_streaming_mode else needed

    @cached_property
    def rows(self) -> Tensor:
        """[length, hidden]: instruct, role, pad + tag, pad + speaker, tts_bos + codec_pad."""
        b = self._builder
        rows = [b._embed.text(self.instruct_ids)] if self.instruct_ids else []
        rows.append(b._lead(self._role, self._tags, self._speaker))
        if self._vector is not None:
            rows.append((b._pad + self._vector.to(b._pad))[None])
        return torch.cat([*rows, b._bridge])

    @cached_property
    def reference(self) -> Tensor:
        """[tokens, hidden], the reference's text."""
        return self._builder._embed.text(self.reference_ids)

    @cached_property
    def frames(self) -> Tensor | None:
        """[1 + frames, hidden], codec_bos and the reference's frames; None without any."""
        b = self._builder
        if self._codes is None:
            return None
        return torch.cat([b._codec_bos[None], b._embed.frames(self._codes.to(b._pad.device))])


def _no_room(fixed: int, max_positions: int) -> TextTooLongError:
    return TextTooLongError(
        f"instruct and reference alone need {fixed} positions and a slot has {max_positions}: shorten them, or raise "
        "max_positions"
    )


class PromptPieces:
    """A prompt in the streaming layout whose text arrives in pieces: the prompt as soon as the first frame could be
    made, then the text rows that trail it, equal to those that `PromptBuilder.build` makes of the whole text (see
    `text.PieceEncoder` for the one exception).

    Attributes:
        prompt: None until the text so far is enough for it. Its `trailing` is what was known then.
        ended: no more text will come.
        tokenise_s: seconds that tokenising took until now.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        language: str | None,
        speaker: str | None,
        instruct: str | None,
        voice: Voice | None,
        max_positions: int,
    ):
        self._builder, self._max_positions = builder, max_positions
        self._voice = (language, speaker, instruct, voice)
        self._opening = builder._opening(builder._role, *self._voice)
        self._reference = self._opening.reference_ids
        self._fixed = self._opening.needed(0, non_streaming_mode=False)
        if self._fixed >= max_positions:
            raise _no_room(self._fixed, max_positions)
        self._text = PieceEncoder(builder._tokenizer.encode, "assistant\n")
        self._ids = [builder._config.im_start_id]  # with the role's, then the text's
        self._blank = True
        self._given = 0  # text rows, the reference's and the closing one counted, that went into prompt or trailing
        self.prompt: Prompt | None = None
        self.ended = False
        self.tokenise_s = 0.0

    @property
    def held(self) -> int:
        """Characters that wait for what comes next."""
        return self._text.held

    def push(self, piece: str) -> Tensor:
        """Take a piece of the text.

        Returns:
            [n, hidden], text rows that trail what was there before; none while there is no prompt yet.

        Raises:
            TextError: not valid Unicode; nothing was taken.
            TextTooLongError: the text no longer fits a slot.
        """
        start = time.perf_counter()
        ids = self._text.push(piece)
        self.tokenise_s += time.perf_counter() - start
        self._blank &= not piece.strip()
        return self._advance(ids)

    def flush(self) -> Tensor:
        """What was held back, as if a boundary followed; rows as `push` gives them."""
        return self._advance(self._text.flush())

    def end(self) -> Tensor:
        """The text is complete; rows as `push` gives them, the closing one last.

        Raises:
            TextError: the text was blank.
        """
        ids = self._text.flush()
        if self._blank or len(self._ids) + len(ids) < 4:
            raise TextError("text must not be blank")
        self.ended = True
        return self._advance(ids)

    def _advance(self, ids: list[int]) -> Tensor:
        needed = self._fixed + len(self._ids) + len(ids) - 3
        if needed > self._max_positions:
            raise TextTooLongError(
                f"the text so far needs at least {needed} positions and a slot has {self._max_positions}: "
                "say the rest in another utterance, or raise max_positions"
            )
        self._ids += ids
        builder, text = self._builder, self._reference + self._ids[3:]
        none = builder._pad[None][:0]
        if self.prompt is None:
            if self._blank or len(self._ids) < 4 or not (self.ended or len(text) > self._opening.frame_count):
                return none
            opening = builder._opening(self._ids[:3], *self._voice)
            prompt = builder._prompt(opening, self._ids[3:], False)
            if not self.ended:  # what closes the text is not known yet
                prompt = replace(prompt, trailing=prompt.trailing[:-1], text_open=True)
            self.prompt, self._given = prompt, len(text)
            return none
        fresh = text[self._given :]
        self._given = len(text)
        rows = [builder._embed.text(fresh)] if fresh else []
        return torch.cat([none, *rows, *([builder._eos[None]] if self.ended else [])])
