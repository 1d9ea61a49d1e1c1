"""OfflineLLM: an LLM stub for bots that need no key. Its code is in pipecat/offline_llm.py."""

from qwen_megakernel.pipecat.offline_llm import OfflineLLM, answer

__all__ = ["OfflineLLM", "answer"]
