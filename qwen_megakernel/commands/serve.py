"""`qwen-megakernel serve` and `wyoming`: the engine for other processes."""

import argparse
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from qwen_megakernel import TTSEngine
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.load import name_of_model
from qwen_megakernel.choices import TOKEN
from qwen_megakernel.commands.config import actions_of, printed
from qwen_megakernel.commands.options import engine_options, server_options
from qwen_megakernel.errors import BackendError, RequestError
from qwen_megakernel.server.limits import allow_files
from qwen_megakernel.server.process import bind, check_model, is_loopback, load_for_good
from qwen_megakernel.server.service import EngineService

log = logging.getLogger(__name__)

_MOST_FRONTS = 64


def serve(args: argparse.Namespace) -> int:
    try:
        from qwen_megakernel.server import app as http
        from qwen_megakernel.server.fronts.serve import Fronts
    except ModuleNotFoundError as error:
        raise BackendError(f"serving needs {error.name}: in the checkout, pip install -e '.[serve]'") from None
    if args.token is not None and not args.token.strip():
        raise BackendError("--token is empty: give a token, or leave the option out")
    if not 0 <= args.front_processes <= _MOST_FRONTS:
        raise BackendError(f"--front-processes must be 0 to {_MOST_FRONTS}, got {args.front_processes}")
    token = (args.token or "").strip() or None
    if args.print_config:
        return _print_config(args, "serve", token=token)
    if token is None and args.keys_file is None and not is_loopback(args.host):
        raise BackendError(f"--host {args.host} can be reached by others: set {TOKEN}, or listen on 127.0.0.1")
    name, config, load = _engine_of_server(args)
    if config and config.variant != "base" and (args.allow_upload or args.allow_clone):
        option = "--allow-upload" if args.allow_upload else "--allow-clone"
        raise RequestError(
            f"{option} needs a Base checkpoint, which clones voices; {name} is {config.variant}: leave it out, or "
            "name another --model"
        )
    if args.front_processes and args.allow_upload:
        words = "--allow-upload needs --front-processes 0: only one front process would know a new voice"
        raise RequestError(f"{words}. Put voices into --voices, or let requests bring them with --allow-clone")
    options = server_options(args, "serve", token=token)
    http.check_certificate(options)
    options = replace(options, limits=allow_files(options.limits))
    if args.front_processes:
        run = Fronts(load, options, model=name, config=config, count=args.front_processes).serve
    else:
        run = partial(http.serve, http.make_app(load, options, model=name, config=config))
    listener = bind(args.host, args.port)
    log.info("serving %s on http%s://%s", name, "s" * bool(args.ssl_certfile), _address(args.host, listener))
    return _end_of_server(run(listener))


def _print_config(args: argparse.Namespace, entrance: str, **changes: Any) -> int:
    server_options(args, entrance, **changes)  # refuses what is wrong
    print(printed(args, actions_of(args.parser)))
    return 0


def _address(host: str, listener: socket.socket) -> str:
    """For a URL. --port 0 has let the system choose a port."""
    return f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _engine_of_server(args: argparse.Namespace) -> tuple[str, ModelConfig | None, Callable[[], TTSEngine]]:
    """The model's name for clients, its checkpoint's config if known, and a function that loads the engine. Raises
    TTSError: the engine could never be loaded."""
    if args.voices and not args.voices.is_dir():
        raise RequestError(f"--voices: no folder {str(args.voices)!r}")
    if args.allow_foreign_voice and not args.voices:
        raise RequestError("--allow-foreign-voice needs the voices of --voices: give both")
    options = engine_options(args, max_queue=args.max_streams if args.max_queue is None else args.max_queue)
    return name_of_model(args.model), check_model(args.model, options), lambda: load_for_good(args.model, options)


def _end_of_server(code: int) -> int:
    if code:  # else the process might wait for a thread whose device does not answer
        logging.shutdown()
        os._exit(code)
    return code


def wyoming(args: argparse.Namespace) -> int:
    if args.print_config:
        return _print_config(args, "wyoming")
    try:
        from qwen_megakernel.server.wyoming import api as wyoming_api
    except ModuleNotFoundError as error:
        how = "in the checkout, pip install -e '.[wyoming]'"
        raise BackendError(f"the Wyoming server needs {error.name}: {how}") from None
    if not is_loopback(args.host):
        if not args.allow_network:
            why = "can be reached by others, and Wyoming has no token"
            raise BackendError(f"--host {args.host} {why}: on a network that you trust, give --allow-network")
    name, config, load = _engine_of_server(args)
    options = server_options(args, "wyoming")
    options = replace(options, limits=allow_files(options.limits))
    service = EngineService(load, options, model=name, config=config)
    listener = bind(args.host, args.port)
    where = _address(args.host, listener)
    if not is_loopback(args.host):
        log.warning("everybody who reaches %s can use it: Wyoming has no token", where)
    log.info("serving %s on tcp://%s once it is ready", name, where)
    return _end_of_server(wyoming_api.serve(service, listener))
