"""`bot_page.run()`: a web page to talk to a bot with. Its code is in pipecat/bot_page.py."""

from qwen_megakernel.pipecat.bot_page import TurnLog, check_port, log_to_console, run

__all__ = ["TurnLog", "check_port", "log_to_console", "run"]
