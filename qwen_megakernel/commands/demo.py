"""The options of demo_pipeline.py. They are here so that its help comes before Pipecat would be imported."""

import argparse

from qwen_megakernel.commands.options import (
    add_engine_options,
    add_output_options,
    add_voice_options,
    refuse_unknown_options,
)


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """The parser. `about`: what the script does."""
    parser = argparse.ArgumentParser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # Pipecat's runner has -v too
    )
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log everything")
    voice = parser.add_argument_group("voice")
    add_engine_options(voice)
    add_voice_options(voice, "demo")
    voice.add_argument("--tokens", action="store_true", help="speak while the text comes, not sentence by sentence")
    voice.add_argument("--rate", type=int, choices=(8000, 16000, 24000, 48000), default=24000, help="output rate, Hz")
    text = parser.add_argument_group("text in, sound out")
    text.add_argument("--text", help="what to say; default: standard input")
    add_output_options(text)
    bot = parser.add_argument_group("bot")
    bot.add_argument("--bot", action="store_true", help="serve a voice bot; options of Pipecat's runner apply too")
    bot.add_argument("--local-audio", action="store_true", help="this machine's microphone and loudspeaker (PyAudio)")
    bot.add_argument("--llm-url", help="base URL of an OpenAI-compatible server; its key is taken from OPENAI_API_KEY")
    bot.add_argument("--llm-model", default="gpt-4.1-mini", help="default: %(default)s")
    bot.add_argument("--stt", metavar="MODULE:CLASS", help="a Pipecat speech-to-text service")
    bot.add_argument("--stt-options", metavar="JSON", default="{}", help='its arguments; "$NAME": from the environment')
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """The options of a command line. With --bot others are left to Pipecat's runner. If it has wrong ones, it ends the
    process as argparse does, with the usage."""
    args, others = parser.parse_known_args(argv)
    if others and (not args.bot or args.local_audio):
        refuse_unknown_options(parser, others)
        parser.error(f"unknown arguments: {' '.join(others)}")
    return args
