"""Token ids and conditioning -> prompt rows, and the text rows that trail them.

A row is one position of the talker's input: a text term plus a codec term. In the non-streaming layout the
whole text stands in the prompt. In the streaming layout the text starts with the first frame and goes on,
one row per frame. Layout of a prompt, after `qwen_tts` 0.1.1 (Qwen3TTSForConditionalGeneration.generate):

    block        rows    text term        codec term
    instruct     any     its ids          -                        (optional)
    role         3       <|im_start|>assistant\\n    -
    tags         3 or 4  pad              nothink / think + language
    speaker      0 or 1  pad              speaker id, or the voice's vector
    bridge       1       tts_bos          codec_pad
    text ...             see `PromptBuilder.assemble` and `_icl_block`

The rows in front of the first row that the text touches are the prompt's opening. An opening depends on the
conditioning alone, so it is computed once and kept.
"""

import sys
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.choices import KEPT_VOICES
from qwen_megakernel.errors import CheckpointError, NoWordsError, SpeakerError, TextError, TextTooLongError
from qwen_megakernel.model.conditioning import AUTO, UNCONDITIONED, Conditioning
from qwen_megakernel.model.text import TextTokenizer
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.turn_text import TurnText
from spoken_text.cutting import split_to_fit
from spoken_text.languages import find_language, spellings_of
from spoken_text.stage import has_words

FRAMES_A_TOKEN = 5
"""Frames of speech per token for which `PromptBuilder.pieces` leaves room. The demo voice takes 2 to 4 in any language
and 8 for digits."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first rows of a prompt, which its text does not touch. Prompts that share these rows share this object. A
    frame decoder can therefore keep what it computed from them under the object, and find it again."""

    rows: int  # how many; fewer than the prompt has


class Tokens(NamedTuple):
    """Token ids of a text."""

    role: list[int]  # of the role in front of the text; a line break that opens the text may change its last id
    text: list[int]


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a frame decoder needs of a request. Tensors have the model's dtype and lie on its device."""

    rows: Tensor  # [T, hidden], prefilled at positions 0..T-1
    trailing: Tensor  # [R, hidden]; frame k (from 0) adds row k to the sum of its code embeddings
    pad: Tensor  # [hidden]; what frames after the R-th add
    prefix: Prefix | None = None  # the first rows, with which other prompts begin too
    text_open: bool = False  # more trailing rows will come (`FrameDecoder.extend`)
    text_at: int = 0  # position of the text's first token; the others follow it, in the prompt or beside frames


class PromptText:
    """What can be told of a checkpoint's prompts without its weights: names, token ids, and which texts fit a slot.
    Thread-safe. A method that takes a conditioning raises SpeakerError or LanguageError for an unknown name; the
    message lists the known ones."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer, *, kept_voices: int = KEPT_VOICES):
        """Raises CheckpointError: the tokenizer does not split the role as the model expects it."""
        self.config = config
        self.tokenizer = tokenizer
        # Names that a conditioning's speaker may have, in the checkpoint's order (empty unless CustomVoice).
        self.speakers: tuple[str, ...] = tuple(config.talker.speakers)
        # Names that its language may have. Dialects are chosen through their speakers; the reference implementation
        # hides them from its list too.
        self.languages: tuple[str, ...] = (AUTO, *config.talker.named_languages)
        spellings_of(self.languages)  # may take a third of a second; no request should wait for it
        self._newline = tokenizer.encode("\n")
        self._role = [config.im_start_id, *tokenizer.encode("assistant\n")]
        if len(self._role) != 3:
            raise CheckpointError(
                f"the tokenizer's files: 'assistant\\n' must be two tokens, found {len(self._role) - 1}"
            )
        self._openings: dict[tuple[object, ...], Opening] = {}  # the one that was used last is at the end
        self._kept = kept_voices
        self._lock = threading.Lock()

    def tokens(self, text: str | None, name: str = "text") -> Tokens:
        """Ids of a text that is to be spoken. `name`: what errors call it. Raises TextError: not a string, not valid
        Unicode, or blank."""
        if not isinstance(text, str):
            raise TextError(f"{name} must be a string, got {type(text).__name__}")
        if not text.strip():
            raise TextError(f"{name} must not be blank")
        ids = self._turn_ids("assistant", text)[: -1 - len(self._newline)]
        if len(ids) < 4 or self.tokenizer.is_blank(text):
            raise NoWordsError(f"{name} {text!r} has nothing to speak")
        return Tokens(ids[:3], ids[3:])

    def pieces(
        self,
        text: str,
        conditioning: Conditioning = UNCONDITIONED,
        *,
        non_streaming_mode: bool = True,
        max_positions: int,
    ) -> list[str]:
        """Cut the text at sentences into pieces. The prompt that `build` makes of a piece leaves `room` for its speech.
        Raises what `tokens` and `room` do."""
        if not isinstance(text, str):
            raise TextError(f"text must be a string, got {type(text).__name__}")
        most = self.room(conditioning, non_streaming_mode=non_streaming_mode, max_positions=max_positions)
        pieces = split_to_fit(text, lambda piece: len(self.tokens(piece).text), most, self.tokenizer.most_tokens)
        if not (spoken := [piece for piece in pieces if has_words(piece)]):
            raise NoWordsError("the text is blank or has no letter or digit: there is nothing to speak")
        return spoken

    def room(self, conditioning: Conditioning, *, non_streaming_mode: bool, max_positions: int) -> int:
        """Tokens of text that fit a slot with room for their speech: `FRAMES_A_TOKEN` frames for every token. Raises
        TextTooLongError: instruct and reference leave no room for any text."""
        opening = self.opening(conditioning)
        fixed = opening.needed(0, non_streaming_mode)
        if opening.needed(1, non_streaming_mode) > max_positions:
            raise no_room(fixed, max_positions)
        frames_fit = (max_positions - fixed) // (1 + FRAMES_A_TOKEN)
        return max(1, min(frames_fit, self.config.max_frames // FRAMES_A_TOKEN))

    def turn_text(self, conditioning: Conditioning, max_positions: int) -> TurnText:
        """What cuts a text that comes in pieces into parts that each fit a slot. Raises what `room` does."""
        room = self.room(conditioning, non_streaming_mode=False, max_positions=max_positions)
        return TurnText(lambda word: len(self.tokenizer.encode(word)), room, self.tokenizer.most_tokens)

    @property
    def kept_openings(self) -> int:
        return len(self._openings)

    def forget(self) -> None:
        """Drop every opening that was kept."""
        with self._lock:
            self._openings.clear()

    def known_speaker(self, speaker: str) -> str:
        """The speaker's name as the checkpoint spells it. Raises SpeakerError for an unknown one."""
        if not isinstance(speaker, str) or speaker.lower() not in self.speakers:
            known = ", ".join(self.speakers) if self.speakers else "none, this checkpoint has no speakers"
            raise SpeakerError(f"unknown speaker {speaker!r}; known: {known}")
        return speaker.lower()

    def known_language(self, language: str | None) -> str:
        """The language's name as the checkpoint spells it, also for a code such as "en" or "en-US"; None is "auto".
        Raises LanguageError for an unknown one."""
        return AUTO if language is None else find_language(language, self.languages)

    def _turn_ids(self, role: str, text: str) -> list[int]:
        """<|im_start|>{role}\\n{text}<|im_end|>\\n. Role and text are encoded together, as one run between
        two special tokens, because a line break that opens the text joins the one after the role."""
        inside = self.tokenizer.encode(f"{role}\n{text}")
        return [self.config.im_start_id, *inside, self.config.im_end_id, *self._newline]

    def _tag_ids(self, language: str, speaker: str | None) -> list[int]:
        talker = self.config.talker
        name = self.known_language(language)
        if speaker and name in (AUTO, "chinese"):
            name = talker.dialects.get(speaker, name)
        if name == AUTO:
            return [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        language_id = talker.languages[name]
        return [talker.codec_think_id, talker.codec_think_bos_id, language_id, talker.codec_think_eos_id]

    def opening(self, conditioning: Conditioning, role: list[int] | None = None) -> "Opening":
        """The opening of a conditioning: one that was kept, or a new one, which is then kept. `role`: ids of
        `Tokens.role`; None: those of a text that does not touch them."""
        role, voice = self._role if role is None else role, conditioning.voice
        speaker = self.known_speaker(conditioning.speaker) if conditioning.speaker else None
        tags = self._tag_ids(conditioning.language, speaker)
        key = (*role, *tags, speaker, conditioning.instruct or "", None if voice is None else voice.digest)
        with self._lock:
            opening = self._openings.pop(key, None)
            if opening is None:
                opening = Opening(self, role, tags, replace(conditioning, speaker=speaker))
            self._openings[key] = opening
            if len(self._openings) > self._kept:
                del self._openings[next(iter(self._openings))]
        return opening


class PromptBuilder(PromptText):
    """Builds prompts for one checkpoint; constant rows are made once."""

    def __init__(
        self, config: ModelConfig, tokenizer: TextTokenizer, embeddings: Embeddings, *, kept_voices: int = KEPT_VOICES
    ):
        """Raises CheckpointError: as `PromptText`."""
        super().__init__(config, tokenizer, kept_voices=kept_voices)
        self._embed = embeddings
        self._bos, self._eos, self._pad = embeddings.text([config.tts_bos_id, config.tts_eos_id, config.tts_pad_id])
        self._codec_pad, self._codec_bos = embeddings.code0([config.talker.codec_pad_id, config.talker.codec_bos_id])
        self._bridge = (self._bos + self._codec_pad)[None]
        self._closing = torch.stack([self._eos + self._codec_pad, self._pad + self._codec_bos])
        role = embeddings.text(self._role)
        self._leads: dict[tuple[object, ...], Tensor] = {}  # role, tags and speaker, for every language and speaker
        for speaker in (None, *self.speakers):
            for language in self.languages:
                tags = self._tag_ids(language, speaker)
                self._leads[(*self._role, *tags, speaker)] = self._make_lead(role, tags, speaker)

    def build(
        self,
        text: str | Tokens,
        conditioning: Conditioning = UNCONDITIONED,
        *,
        non_streaming_mode: bool = True,
        max_positions: int = sys.maxsize,
    ) -> Prompt:
        """Rows of one request. `text`: what to say, or its `tokens`. `non_streaming_mode`: True puts the whole text
        before the first frame. `max_positions`: of a slot. Raises TextError: see `tokens`. TextTooLongError: the prompt
        and one frame per text row need more than `max_positions`. Speech takes several frames for a row, so such a text
        cannot fit. Raised before anything is computed."""
        role, ids = text if isinstance(text, Tokens) else self.tokens(text)
        opening = self.opening(conditioning, role)
        needed = opening.needed(len(ids), non_streaming_mode)
        if needed > max_positions:
            raise TextTooLongError(
                f"the request needs at least {needed} positions and a slot has {max_positions} (tokens: text "
                f"{len(ids)}, instruct {len(opening.instruct_ids)}, reference {len(opening.reference_ids)} and "
                f"{opening.frame_count} frames): cut the text (TTSEngine.pieces), shorten the others, or raise "
                "max_positions"
            )
        return self.assemble(opening, ids, non_streaming_mode)

    def _lead(self, role: list[int], tags: list[int], speaker: str | None) -> Tensor:
        """Rows of the role, pad + tags, pad + speaker. They exist already, unless the text changed the role's ids."""
        kept = self._leads.get((*role, *tags, speaker))
        return self._make_lead(self._embed.text(role), tags, speaker) if kept is None else kept

    def _make_lead(self, role: Tensor, tags: list[int], speaker: str | None) -> Tensor:
        ids = [*tags, *([self.config.talker.speakers[speaker]] if speaker else [])]
        return torch.cat([role, self._pad + self._embed.code0(ids)])

    def assemble(self, opening: "Opening", ids: list[int], non_streaming_mode: bool) -> Prompt:
        """The prompt of an opening and of the ids of a whole text."""
        prefix = opening.prefixes[non_streaming_mode]
        at = opening.length + len(opening.reference_ids)  # a reference's text comes first
        if (frames := opening.frames) is not None:
            text = torch.cat([opening.reference, self._embed.text(ids), self._eos[None]])
            block, trailing = self._icl_block(text, frames, non_streaming_mode)
            return Prompt(torch.cat([opening.rows, *block]), trailing, self._pad, prefix, text_at=at)
        if non_streaming_mode:  # text and its end over codec_pad, then pad + codec_bos; nothing trails
            rows = self._embed.text_between(opening.rows, ids, self._codec_pad, self._closing)
            return Prompt(rows, self._pad[None], self._pad, prefix, text_at=at)
        text = self.text_rows(ids, closed=True)
        rows = torch.cat([opening.rows, text[:1] + self._codec_bos])
        return Prompt(rows, text[1:], self._pad, prefix, text_at=at)

    def text_rows(self, ids: list[int], closed: bool) -> Tensor:
        """Text ids -> [n, hidden]: their rows, then, if `closed`, the row that closes a text."""
        rows = [self._embed.text(ids)] if ids else []
        return torch.cat([self._pad[None][:0], *rows, *([self._eos[None]] if closed else [])])

    def _icl_block(self, text: Tensor, frames: Tensor, non_streaming_mode: bool) -> tuple[list[Tensor], Tensor]:
        """Rows behind the opening, in parts, and what trails them. The reference's text and the text share one track.
        codec_bos and the reference's frames share the other."""
        if non_streaming_mode:
            return [text + self._codec_pad, frames + self._pad], self._pad[None]
        if len(text) > len(frames):
            return [text[: len(frames)] + frames], text[len(frames) :]
        padding = self._pad.expand(len(frames) - len(text), -1)
        return [torch.cat([text, padding]) + frames], self._pad[None]


class Opening:
    """What prompts of one conditioning have in common: their rows in front of the text. The rows are made when they are
    first needed."""

    def __init__(self, builder: PromptText, role: list[int], tags: list[int], conditioning: Conditioning):
        voice, instruct = conditioning.voice, conditioning.instruct
        self._builder = builder
        self._role = role
        self._tags = tags
        self._speaker = conditioning.speaker
        # Copies, because the caller may write to a voice's tensors between this lookup and the first use.
        self._vector = None if voice is None else voice.speaker_embedding.clone()
        self._codes: Tensor | None = None
        self.instruct_ids = builder._turn_ids("user", instruct) if instruct else []
        self.reference_ids: list[int] = []  # of the text of a cloned voice's reference
        self.frame_count = 0  # of the reference
        if voice is not None and voice.ref_codes is not None:
            self._codes = voice.ref_codes.clone()
            self.reference_ids = builder.tokens(voice.ref_text, "ref_text").text
            self.frame_count = len(self._codes)
        self.length = len(self.instruct_ids) + len(role) + len(tags) + bool(self._speaker) + (voice is not None) + 1
        # In-context, the reference's text leads the text track: beside its frames in the streaming layout, in front of
        # them in the other. The prompt's last row is never part of a prefix.
        streaming = min(len(self.reference_ids), self.frame_count)
        # of a prompt in the streaming layout, and in the other
        self.prefixes = (Prefix(self.length + streaming), Prefix(self.length + len(self.reference_ids)))

    def needed(self, tokens: int, non_streaming_mode: bool) -> int:
        """Positions that a prompt with `tokens` tokens of text takes, with one frame for every text row."""
        needed = self.length + self.frame_count + tokens + 1
        return needed + len(self.reference_ids) + tokens + 1 if non_streaming_mode else needed

    @property
    def _with_rows(self) -> PromptBuilder:
        assert isinstance(self._builder, PromptBuilder), "without weights there are no rows"
        return self._builder

    @cached_property
    def rows(self) -> Tensor:
        """[length, hidden]: instruct, role, pad + tags, pad + speaker, tts_bos + codec_pad."""
        b = self._with_rows
        rows = [b._embed.text(self.instruct_ids)] if self.instruct_ids else []
        rows.append(b._lead(self._role, self._tags, self._speaker))
        if self._vector is not None:
            rows.append((b._pad + self._vector.to(b._pad))[None])
        return torch.cat([*rows, b._bridge])

    @cached_property
    def reference(self) -> Tensor:
        """[tokens, hidden], rows of the reference's text."""
        return self._with_rows._embed.text(self.reference_ids)

    @cached_property
    def frames(self) -> Tensor | None:
        """[1 + frames, hidden], rows of codec_bos and of the reference's frames; None without any."""
        b = self._with_rows
        if self._codes is None:
            return None
        return torch.cat([b._codec_bos[None], b._embed.frames(self._codes.to(b._pad.device))])


def no_room(fixed: int, max_positions: int) -> TextTooLongError:
    """The error for a conditioning that leaves no room for any text."""
    return TextTooLongError(
        f"instruct and reference alone need {fixed} positions and a slot has {max_positions}: shorten them, or raise "
        "max_positions"
    )
