"""Audiobooks with Qwen3-TTS: EPUB, text and Markdown to chapters, sound files and subtitles."""

__version__ = "0.4.0"
