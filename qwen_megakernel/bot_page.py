"""`bot_page.run()`: a web page to talk to a bot with. Its code is in pipecat/bot_page.py."""

from qwen_megakernel.pipecat.bot_page import run

__all__ = ["run"]
