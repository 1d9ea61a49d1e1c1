"""A LiveKit agent that speaks through our server. Start the server with `qwen-megakernel serve --model demo`. Then
`python examples/livekit_agent.py console --text` lets you type to the agent, and `dev` connects it to a LiveKit room.

The voice is LiveKit's own client for Qwen3-TTS. It sends each word as the LLM writes it. docs/livekit.md
says what to install.
"""

import os

from livekit.agents import DEFAULT_API_CONNECT_OPTIONS, Agent, AgentServer, AgentSession, JobContext, cli, llm
from livekit.plugins import baseten

SERVER = os.environ.get("TTS_URL", "ws://127.0.0.1:8000/v1/audio/speech/stream")
TOKEN = os.environ.get("QWEN_MEGAKERNEL_TOKEN", "none")  # the client wants one; a server without a token takes any


def voice() -> baseten.TTS:
    """The voice. task_type is the checkpoint's: CustomVoice for the demo voice."""
    options = {"task_type": "CustomVoice", "voice": "ada", "word_timestamps": True}
    return baseten.TTS(model="qwen3-tts", model_endpoint=SERVER, api_key=TOKEN, **options)


class Echo(llm.LLM):
    """A stub in the place of your LLM, such as livekit.plugins.openai.LLM()."""

    def chat(self, *, chat_ctx, tools=None, conn_options=DEFAULT_API_CONNECT_OPTIONS, **_):
        return EchoStream(self, chat_ctx=chat_ctx, tools=tools or [], conn_options=conn_options)


class EchoStream(llm.LLMStream):
    async def _run(self) -> None:
        heard = [message.text_content for message in self._chat_ctx.messages() if message.role == "user"]
        words = f"You said: {heard[-1]}" if heard else "Hello there, what can I do for you?"
        for word in words.split():
            delta = llm.ChoiceDelta(role="assistant", content=f"{word} ")
            self._event_ch.send_nowait(llm.ChatChunk(id="echo", delta=delta))


server = AgentServer()


@server.rtc_session()
async def call(context: JobContext) -> None:
    # Add stt=, such as livekit.plugins.deepgram.STT(), and the agent hears. Without one it is typed to.
    session = AgentSession(llm=Echo(), tts=voice(), use_tts_aligned_transcript=True)
    await session.start(Agent(instructions=""), room=context.room)
    session.generate_reply()


if __name__ == "__main__":
    cli.run_app(server)
