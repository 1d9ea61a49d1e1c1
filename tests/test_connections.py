"""What server/connections.py takes from uvicorn."""

import ast
import asyncio
import inspect

import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from qwen_megakernel.server.connections import HttpConnection, SocketConnection
from qwen_megakernel.server.tls import TlsConnection

OURS = {
    TlsConnection: "begin_tls _agree _pass_on",
    HttpConnection: "drop _hang_up _start_timer _last_look _stop_timer _too_late _add _too_large _crowded _taken "
    "_answer _refused",
    SocketConnection: "drop _go_on _read _count_control _fail",
}
"""Class -> its own methods. All others must be uvicorn's, or nobody would call them."""


@pytest.mark.parametrize("kind", OURS)
def test_what_connections_override_and_use_is_there_in_uvicorn(kind):
    """A release that renames one of them would end a limit without a word."""
    loop = asyncio.new_event_loop()
    theirs = kind.__base__(uvicorn.Config(Starlette()), ServerState(), {}, loop)
    loop.close()
    (tree,) = ast.parse(inspect.getsource(kind)).body
    defined = {part.name for part in tree.body if not isinstance(part, ast.Assign | ast.AnnAssign | ast.Expr)}
    assert set(OURS[kind].split()) <= defined
    parts = [part for part in ast.walk(tree) if isinstance(part, ast.Attribute)]
    used = {part.attr for part in parts if ast.unparse(part.value) in ("self", "super()")}
    ours = set(OURS[kind].split()) | kind.__annotations__.keys()
    ours |= {part.attr for part in parts if isinstance(part.ctx, ast.Store) and part.attr.startswith("_")}
    assert not {name for name in (used | defined) - ours if not hasattr(theirs, name)}
