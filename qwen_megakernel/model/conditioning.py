"""Who speaks and how: what a request is conditioned on, besides its text."""

from dataclasses import dataclass

from qwen_megakernel.model.voice import Voice

AUTO = "auto"  # the language that leaves the choice to the model


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What the talker is conditioned on besides the text. `PromptBuilder` turns it into the rows that open a prompt."""

    speaker: str | None = None  # a name of the checkpoint (CustomVoice), any case; None or "" leaves the row out
    language: str = AUTO  # a name of the checkpoint or its code, any case, or "auto"
    instruct: str | None = None  # how to say it (VoiceDesign, 1.7B CustomVoice); None or "" leaves the block out
    voice: Voice | None = None
    """A cloned voice (Base): the speaker vector, and with the reference's codes and text the in-context (ICL) layout.
    On CustomVoice, where that is allowed, the vector alone."""


UNCONDITIONED = Conditioning()  # no speaker, no instruct, no voice; the model chooses the language
