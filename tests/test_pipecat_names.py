"""Pipecat's underscore names that `qwen_megakernel/pipecat/` uses: each is there, and each has a reason.

Pipecat may change such a name in any release. Then this fails, before a conversation does.
"""

import ast
import inspect
from pathlib import Path

import pytest
from pipecat.services.tts_service import WebsocketTTSService
from pipecat.utils.context.aggregated_frame_sequencer import AggregatedFrameSequencer, _AggregatedFrameSlot

from qwen_megakernel.pipecat.local import MegakernelTTSService
from qwen_megakernel.pipecat.remote import MegakernelWebsocketTTSService

FOLDER = Path(inspect.getfile(MegakernelTTSService)).parent

BOTH = {
    "_settings": "Pipecat's settings pattern: the store of which a service declares the type",
    "_update_settings": "hook: a change is checked as a whole before it is applied",
    "_classify_error": "hook: which errors make a service unusable",
    "_text_aggregator": "our `Sentences` in its place; text that waits in it is spoken when the writer stalls",
    "_turn_context_id": "ends a turn's context early, when settings change or the writer stalls",
    "_aggregated_frame_sequencer": "matches words with sentences; `finalize` when a context's text ends",
    "_word_timestamp_tracker": "`last_pts` is the earliest time of a context's words: behind the sound before it",
    "_push_sequencer_frames": "sends what `finalize` returns in the order of the audio",
    "_audio_context_manager": "`get` waits for a context's next item; a new one for a second pipeline",
    "_next_audio_context_item": "override: a context is open while sound may come, not for a fixed time",
    "_record_context_audio_outcome": "override: a context whose error was reported does not count as silent",
    "_apply_force_complete": "override: words that were not heard do not go into the LLM's context",
    "_handle_interruption": "forgets texts and playback of an earlier pipeline",
    "_cancelling": "Pipecat never takes it back, and a second pipeline's frames would be dropped",
}
REMOTE = {
    "_websocket": "where `WebsocketService` looks for the socket",
    "_websocket_connect": "connects within Pipecat's limits for closing and sending",
    "_connect": "hook: connect, then begin to receive",
    "_disconnect": "hook: end the tasks, then close the socket",
    "_connect_websocket": "abstract in Pipecat",
    "_disconnect_websocket": "abstract in Pipecat",
    "_receive_messages": "abstract in Pipecat",
    "_receive_task_handler": "Pipecat's loop that receives and connects again",
    "_reconnect_websocket": "override: texts that wait for the new socket keep their contexts",
    "_close_connection_contexts": "closes the contexts of a socket when it breaks",
    "_report_error": "tells `on_connection_error` and the pipeline",
    "_call_event_handler": "tells `on_connected` and `on_disconnected`",
}
SLOT = {
    "_slots": "`AggregatedFrameSequencer` has no other way to leave out a sentence that failed",
}


@pytest.fixture(scope="module")
def theirs() -> set[str]:
    """Underscore names of Pipecat's service, as an instance has them."""

    class Bare(WebsocketTTSService):
        pass

    Bare.__abstractmethods__ = frozenset()
    return {name for name in dir(Bare()) if name.startswith("_") and not name.startswith(("__", "_abc_"))}


def used() -> set[str]:
    """Underscore names that this folder's modules define as functions or ask of an object."""
    nodes = [node for path in FOLDER.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_pipecat_has_each_name(theirs):
    missing = sorted(name for name in {**BOTH, **REMOTE} if name not in theirs)
    assert not missing, "this Pipecat has them no more: see what took their place"
    slot = _AggregatedFrameSlot.__dataclass_fields__
    assert AggregatedFrameSequencer()._slots == [] and {"spoken", "context_id", "complete"} <= slot.keys()


def test_no_other_is_used(theirs):
    """Nor do ours bear by chance a name that Pipecat has."""
    assert used() & theirs == {*BOTH, *REMOTE}
    assert not {"_slots"} - used()


def test_overrides_take_what_pipecat_gives():
    for service in (MegakernelTTSService, MegakernelWebsocketTTSService):
        for name in {*BOTH, *REMOTE}:
            ours, pipecats = (getattr(cls, name, None) for cls in (service, WebsocketTTSService))
            if inspect.isfunction(ours) and inspect.isfunction(pipecats):
                assert [*inspect.signature(ours).parameters] == [*inspect.signature(pipecats).parameters], name
