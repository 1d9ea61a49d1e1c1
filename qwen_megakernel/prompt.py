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
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_megakernel.config import ModelConfig
from qwen_megakernel.errors import RequestError, TextTooLongError
from qwen_megakernel.text import PieceEncoder, TextTokenizer
from qwen_megakernel.transformer import Embeddings
from qwen_megakernel.voice import Voice

AUTO = "auto"


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a frame decoder needs of a request.

    Attributes:
        rows: [T, hidden], prefilled at positions 0..T-1.
        trailing: [R, hidden]; frame k (from 0) adds row k to the sum of its code embeddings.
        pad: [hidden]; what later frames add.
    """

    rows: Tensor
    trailing: Tensor
    pad: Tensor


class PromptBuilder:
    """Builds prompts for one checkpoint; constant rows are made once.

    Attributes:
        speakers: names that `speaker` may take, in the checkpoint's order (empty unless CustomVoice).
        languages: names that `language` may take, "auto" first.
    """

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer, embeddings: Embeddings):
        self._config, self._tokenizer, self._embed = config, tokenizer, embeddings
        self.speakers: tuple[str, ...] = tuple(config.talker.speakers)
        # Dialects are chosen through their speakers; the reference hides them from its list too.
        self.languages: tuple[str, ...] = (AUTO, *sorted(n for n in config.talker.languages if "dialect" not in n))
        self._newline = tokenizer.encode("\n")
        self._bos, self._eos, self._pad = embeddings.text([config.tts_bos_id, config.tts_eos_id, config.tts_pad_id])
        self._codec_pad, self._codec_bos = embeddings.code0([config.talker.codec_pad_id, config.talker.codec_bos_id])

    def build(
        self,
        text: str,
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
            text: what to say; not blank.
            language: a name of `languages`, any case; None is "auto".
            speaker: a name of `speakers`, any case; None or "" leaves the speaker row out.
            instruct: how to say it; None or "" leaves the block out.
            voice: speaker vector, and with reference codes and text the in-context (ICL) layout.
            non_streaming_mode: True puts the whole text before the first frame.
            max_positions: of a slot.

        Raises:
            RequestError: unknown speaker or language (the known ones are listed), blank text.
            TextTooLongError: prompt and one frame per text row need more than `max_positions`; speech takes
                several frames for a row, so such a text is hopeless. Found before anything is computed.
        """
        role, ids = self._role_and_text(text, "text")
        instruct_ids = self._turn_ids("user", instruct) if instruct else []
        codes = None if voice is None else voice.ref_codes
        reference = [] if codes is None else self._role_and_text(voice.ref_text, "ref_text")[1]
        frames = 0 if codes is None else len(codes)
        tags = self._tag_rows(language, speaker, voice)
        needed = len(instruct_ids) + len(role) + len(tags) + 1 + frames + len(ids) + 1
        if non_streaming_mode:
            needed += len(reference) + len(ids) + 1
        if needed > max_positions:
            raise TextTooLongError(
                f"the request needs at least {needed} positions and a slot has {max_positions} (tokens: "
                f"text {len(ids)}, instruct {len(instruct_ids)}, reference {len(reference)} and {frames} frames): "
                "split the text at sentences (text.split_sentences), shorten the others, or raise max_positions"
            )
        rows = [self._embed.text(role), tags]
        if instruct:
            rows.insert(0, self._embed.text(instruct_ids))
        if codes is None:
            block, trailing = self._text_block(ids, non_streaming_mode)
        else:
            block, trailing = self._icl_block(reference + ids, codes, non_streaming_mode)
        return Prompt(torch.cat([*rows, block]), trailing, self._pad)

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
            RequestError: unknown; the known ones are listed.
        """
        return self._known(speaker, self.speakers, "speaker")

    def known_language(self, language: str | None) -> str:
        """The language's name as the checkpoint spells it; None is "auto".

        Raises:
            RequestError: unknown; the known ones are listed.
        """
        return AUTO if language is None else self._known(language, self.languages, "language")

    # ------------------------------------------------------------ ids

    def _turn_ids(self, role: str, text: str) -> list[int]:
        """<|im_start|>{role}\\n{text}<|im_end|>\\n. Role and text are encoded together, as one run between
        two special tokens, because a line break that opens the text joins the one after the role."""
        inside = self._tokenizer.encode(f"{role}\n{text}")
        return [self._config.im_start_id, *inside, self._config.im_end_id, *self._newline]

    def _role_and_text(self, text: str, name: str) -> tuple[list[int], list[int]]:
        """The three ids of the role rows, and the ids of the text itself."""
        if not isinstance(text, str):
            raise RequestError(f"{name} must be a string, got {type(text).__name__}")
        if not text.strip():
            raise RequestError(f"{name} must not be blank")
        ids = self._turn_ids("assistant", text)[: -1 - len(self._newline)]
        if len(ids) < 4:
            raise RequestError(f"{name} {text!r} has no token to speak")
        return ids[:3], ids[3:]

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
    def _known(name: str, known: Sequence[str], what: str) -> str:
        if not isinstance(name, str) or name.lower() not in known:
            listed = ", ".join(known) if known else f"none, this checkpoint has no {what}s"
            raise RequestError(f"unknown {what} {name!r}; known: {listed}")
        return name.lower()

    # ------------------------------------------------------------ rows

    def _tag_rows(self, language: str | None, speaker: str | None, voice: Voice | None) -> Tensor:
        """Tags, speaker and bridge: pad + tag, pad + speaker, tts_bos + codec_pad."""
        name = self.known_speaker(speaker) if speaker else None
        rows = [self._pad + self._embed.code0(self._tag_ids(language, name))]
        if name:
            rows.append(self._pad + self._embed.code0([self._config.talker.speakers[name]]))
        if voice is not None:
            rows.append((self._pad + voice.speaker_embedding.to(self._pad))[None])
        return torch.cat([*rows, (self._bos + self._codec_pad)[None]])

    def _text_block(self, ids: list[int], non_streaming_mode: bool) -> tuple[Tensor, Tensor]:
        text = torch.cat([self._embed.text(ids), self._eos[None]])
        if non_streaming_mode:  # text and its end over codec_pad, then pad + codec_bos; nothing trails
            start = (self._pad + self._codec_bos)[None]
            return torch.cat([text + self._codec_pad, start]), self._pad[None]
        return text[:1] + self._codec_bos, text[1:]

    def _icl_block(self, ids: list[int], codes: Tensor, non_streaming_mode: bool) -> tuple[Tensor, Tensor]:
        """Reference text and text share one track, codec_bos and the reference frames the other."""
        text = torch.cat([self._embed.text(ids), self._eos[None]])
        frames = torch.cat([self._codec_bos[None], self._embed.frames(codes.to(text.device))])
        if non_streaming_mode:
            return torch.cat([text + self._codec_pad, frames + self._pad]), self._pad[None]
        if len(text) > len(frames):
            return text[: len(frames)] + frames, text[len(frames) :]
        padding = self._pad.expand(len(frames) - len(text), -1)
        return torch.cat([text, padding]) + frames, self._pad[None]


class PromptPieces:
    """A prompt in the streaming layout whose text arrives in pieces: the prompt as soon as the first frame could be
    made, then the text rows that trail it, equal to those that `PromptBuilder.build` makes of the whole text (see
    `text.PieceEncoder` for the one exception).

    Attributes:
        prompt: None until the text so far is enough for it. Its `trailing` is what was known then.
        ended: no more text will come.
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
        self._builder, self._voice, self._max_positions = builder, voice, max_positions
        self._head = [builder._tag_rows(language, speaker, voice)]
        instruct_ids = builder._turn_ids("user", instruct) if instruct else []
        self._instruct = [builder._embed.text(instruct_ids)] if instruct_ids else []
        codes = None if voice is None else voice.ref_codes
        self._reference = [] if codes is None else builder._role_and_text(voice.ref_text, "ref_text")[1]
        self._frames = 0 if codes is None else len(codes)
        self._fixed = len(instruct_ids) + 3 + len(self._head[0]) + self._frames + 2
        self._text = PieceEncoder(builder._tokenizer.encode, "assistant\n")
        self._ids = [builder._config.im_start_id]  # with the role's, then the text's
        self._blank = True
        self._given = 0  # text rows, the reference's and the closing one counted, that went into prompt or trailing
        self.prompt: Prompt | None = None
        self.ended = False

    @property
    def held(self) -> int:
        """Characters that wait for what comes next."""
        return self._text.held

    def push(self, piece: str) -> Tensor:
        """Take a piece of the text.

        Returns:
            [n, hidden], text rows that trail what was there before; none while there is no prompt yet.

        Raises:
            RequestError: not valid Unicode; nothing was taken.
            TextTooLongError: the text no longer fits a slot.
        """
        ids = self._text.push(piece)
        self._blank &= not piece.strip()
        return self._advance(ids)

    def flush(self) -> Tensor:
        """What was held back, as if a boundary followed; rows as `push` gives them."""
        return self._advance(self._text.flush())

    def end(self) -> Tensor:
        """The text is complete; rows as `push` gives them, the closing one last.

        Raises:
            RequestError: the text was blank.
        """
        ids = self._text.flush()
        if self._blank or len(self._ids) + len(ids) < 4:
            raise RequestError("text must not be blank")
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
            if self._blank or len(self._ids) < 4 or not (self.ended or len(text) > self._frames):
                return none
            codes = self._voice.ref_codes if self._frames else None
            rows = [*self._instruct, builder._embed.text(self._ids[:3]), *self._head]
            block, trailing = (
                builder._text_block(text, False) if codes is None else builder._icl_block(text, codes, False)
            )
            if not self.ended:  # what closes the text is not known yet
                trailing = trailing[:-1]
            self.prompt, self._given = Prompt(torch.cat([*rows, block]), trailing, builder._pad), len(text)
            return none
        fresh = text[self._given :]
        self._given = len(text)
        rows = [builder._embed.text(fresh)] if fresh else []
        return torch.cat([none, *rows, *([builder._eos[None]] if self.ended else [])])
