"""The API on Ray Serve: one replica per GPU behind Serve's proxies, each with an engine and the app of `make_app`.

Start it with `serve run qwen_megakernel.serve_ray:app model=... max_replicas=4`, or with `serve deploy` and one of
examples/ray.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import ConfigDict, Field, GetPydanticSchema, create_model, model_validator
from pydantic_core.core_schema import literal_schema
from ray import serve
from ray.serve import Application
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_megakernel.checkpoint.load import name_of_model
from qwen_megakernel.choices import BACKENDS, DEMO, NORMALIZE, PARTS, TOKEN, WEIGHTS
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.app import make_app
from qwen_megakernel.server.guard import OPEN, error_response
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.logs import set_up
from qwen_megakernel.server.metrics import Metrics
from qwen_megakernel.server.options import ServerOptions, rows_of
from qwen_megakernel.server.process import is_loopback, load_for_good
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.options import read_options
from spoken_text.lexicon import Lexicon

log = logging.getLogger(__name__)

_SPARE_REQUESTS = 4  # a replica's requests that need no slot: health, voices, metrics, silent sockets
_EXPORT_S = 10.0  # between two reports to Ray, which asks its replicas as often
_TARGET_LOAD = 0.7  # average share of a replica's slots in use; above it Serve starts another replica


def _one_of(names: Iterable[str]) -> GetPydanticSchema:
    """For strings of a constant, which type checkers do not let `Literal` take."""
    return GetPydanticSchema(lambda _type, _handler: literal_schema(list(names)))


_ROWS: dict[str, Any] = {
    name: (kind, Field(getattr(ServerOptions(), name), description=row.about))
    for name, (kind, row) in rows_of("ray").items()
}
_ServerArgs: Any = create_model("_ServerArgs", __config__=ConfigDict(extra="forbid"), **_ROWS)


class Args(_ServerArgs):
    """Arguments: name=value for `serve run`, or `args` in a config file. Those of `ServerOptions` are among them. Files
    and folders must be on every machine."""

    model: str = Field(DEMO, description="Folder, hub id or 'demo'.")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cuda: one GPU a replica, which Ray chooses.")
    backend: Annotated[str, _one_of(BACKENDS)] = "auto"
    weights: Annotated[str, _one_of(WEIGHTS)] | list[Annotated[str, _one_of(PARTS)]] | None = Field(
        None, description="See docs/fp8.md; without it: as the checkpoint has them."
    )
    max_streams: int = Field(64, ge=1, description="Utterances of one replica at once.")
    max_positions: int = Field(1024, ge=1, description="Positions of one utterance: prompt and frames.")
    kv_memory: float | None = Field(None, gt=0, description="GiB of keys and values for all utterances of one replica.")
    normalize: Annotated[str, _one_of(NORMALIZE)] = Field(
        "off", description="auto turns digits and Markdown into words, docs/text.md."
    )
    lexicon: Path | None = Field(None, description="File of words and how to read them.")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int | None = Field(None, ge=1, description="Ray starts more than min_replicas when they are needed.")
    drain_s: float = Field(60.0, gt=0, description="Seconds that utterances have to end once their replica is stopped.")

    @model_validator(mode="after")
    def _replicas(self) -> "Args":
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, below min_replicas {self.min_replicas}: raise it")
        return self


def app(args: Args) -> Application:
    """The application. Serve calls this on some machine of the cluster, and `build` in every replica."""
    token = os.environ.get(TOKEN) or None

    def build() -> FastAPI:
        return _make_app(args, token)

    @serve.ingress(build)
    class Replica:
        app: FastAPI  # set by Ray

        def check_health(self) -> None:
            """
            Raises:
                RuntimeError: the engine is gone; after three such errors Serve starts another replica.
            """
            service: EngineService = self.app.state.service
            if service.gone.is_set():
                raise RuntimeError(f"the engine is {service.state}: {service.error}")

    deployment: Any = serve.deployment(Replica, name="qwen_megakernel", **_options(args))  # Ray types it otherwise
    return deployment.bind()


def _options(args: Args) -> dict[str, Any]:
    """The deployment's options. A config file's `deployments` can override each of them."""
    most = args.max_replicas or args.min_replicas
    load = math.ceil(_TARGET_LOAD * args.max_streams)
    scaling = {"min_replicas": args.min_replicas, "max_replicas": most, "target_ongoing_requests": load}
    replicas = {"num_replicas": most} if most == args.min_replicas else {"autoscaling_config": scaling}
    return {
        **replicas,
        # Serve's router draws two replicas at random and takes the one with fewer ongoing requests. It skips replicas
        # that have this many. So each request finds a slot in its replica or waits for the next free one. An open
        # WebSocket counts as one ongoing request, whether it is silent or speaks several contexts.
        "max_ongoing_requests": args.max_streams + _SPARE_REQUESTS,
        # Per proxy, which refuses more with a 503. Serve also counts requests that have a free slot but are not sent
        # yet. With a limit as small as the number of slots, it would refuse the first requests of a burst.
        "max_queued_requests": Limits().connections,
        "ray_actor_options": {"num_gpus": 1} if args.device == "cuda" else {"num_cpus": 1},
        "graceful_shutdown_timeout_s": args.drain_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
    }


def _make_app(args: Args, token: str | None) -> FastAPI:
    """A replica's app. It takes no uploads, because only this replica would know the voice. Serve sends requests to the
    replica once the app has started."""
    set_up(args.log_format)
    logging.getLogger("qwen_megakernel").setLevel(logging.INFO)
    passed = {"backend", "device", "weights", "max_streams", "max_positions", "kv_memory", "allow_foreign_voice"}
    queue = max(args.max_streams, _SPARE_REQUESTS)  # room for every request that the router sends
    options = EngineOptions(**args.model_dump(include=passed), max_queue=queue)
    lexicon = Lexicon.load(args.lexicon) if args.lexicon else None
    defaults = read_options({"normalize": args.normalize, "lexicon": lexicon}, "serve")
    given = {name: getattr(args, name) for name in _ROWS} | {"drain_seconds": args.drain_s}
    given["lexicon_file"] = args.lexicon
    server = ServerOptions(**given, token=token, defaults=defaults)
    model = name_of_model(args.model)
    api = make_app(lambda: load_for_good(args.model, options), server, model=model, until_ready=True)
    threading.Thread(target=_export, args=(api.state.metrics,), name="qwen_megakernel metrics", daemon=True).start()
    api.add_middleware(_NameReplica, replica=serve.get_replica_context().replica_tag)
    if token is None and args.keys_file is None:
        words = "without %s and keys_file the server answers only clients on their proxy's own machine"
        log.warning(words, TOKEN)
        api.add_middleware(_OnlyLoopback)
    return api


def _export(metrics: Metrics) -> None:
    """Tell Ray our metrics, for its own endpoint, which has those of all replicas and names each. Never returns."""
    from ray.serve.metrics import Gauge

    gauges: dict[str, Any] = {}
    while True:
        _tell(metrics, gauges, Gauge)
        time.sleep(_EXPORT_S)


def _tell(metrics: Metrics, gauges: dict[str, Any], gauge: Callable[..., Any]) -> None:
    """`gauge`: makes one of Ray. All of ours are gauges there: Ray's counters and histograms take single events only,
    and Prometheus' queries do not ask for the type."""
    for family in metrics.families():
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            if sample.name not in gauges:
                gauges[sample.name] = gauge(sample.name, family.documentation, tuple(sample.labels))
            gauges[sample.name].set(sample.value, dict(sample.labels))


class _NameReplica:
    """Adds the replica's name to each answer. Serve names the replica's log after it."""

    def __init__(self, app: ASGIApp, replica: str):
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                MutableHeaders(scope=message)["X-Replica"] = self._replica
            await send(message)

        await self._app(scope, receive, send_named)


class _OnlyLoopback:
    """Serves only clients on their proxy's own machine, for servers without a token. A client can forge the Host header
    that the Guard checks, but not its address, which the proxy reports."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = (scope.get("client") or ("",))[0]
        if scope["type"] == "lifespan" or scope["path"] in OPEN or is_loopback(host):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # it was not accepted, so the client gets a 403
        else:
            words = f"without a token the server answers only the proxy's own machine, not {host!r}; set {TOKEN}"
            await error_response(ApiError(403, "forbidden", words))(scope, receive, send)
