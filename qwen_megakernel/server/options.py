"""What a server is started with. No web framework and no torch is imported here: the command line's help shows these
options, and Ray's arguments come from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from qwen_megakernel.choices import LOG_FORMATS, TOKEN
from qwen_megakernel.errors import BackendError
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.speech.options import RequestOptions

OPENAI_NAMES = "openai"
"""As --voice-alias: OpenAI's names of voices."""

_LONGEST_S = 86_400
_MAX_NAME = 256  # characters of a model's name
_COMMANDS = ("serve", "wyoming")
_ALL, _NAMED = ("serve", "wyoming", "ray"), ("serve", "ray")
_ALIAS = f"another name of a voice, such as alloy=ada, or {OPENAI_NAMES}: OpenAI's names"
_KEYS = "TOML file of keys that clients may send, with names and limits (docs/operating.md); read again on change"
_GRACE = "seconds after SIGTERM in which new requests are still taken, while routers learn of it"
_DRAIN = "seconds that running speech has to end after that"
_OTLP = "send traces to this OpenTelemetry collector over HTTP, such as http://localhost:4318"
_METRICS = "let Prometheus ask for metrics at this port of --host"
_CA = "certificates of authorities, PEM: every client must show a certificate by one of them"
_ORIGIN = "let web pages of this origin use the server, such as https://example.com; '*' needs a token"


class Row(NamedTuple):
    """How an option is given.

    Attributes:
        about: its line of help.
        entrances: which take it: the commands "serve" and "wyoming", and "ray", whose arguments have the fields' names.
        metavar: what help calls its value.
        typed: its name on a command line, where it has another: one value of several.
    """

    about: str
    entrances: tuple[str, ...] = ("serve",)
    metavar: str | None = None
    typed: str = ""


@dataclass(frozen=True)
class ServerOptions:
    """What a server is started with besides its model and its engine. A field with a `Row` is an option of the
    entrances that the row names.

    Attributes:
        allow_foreign_voice: the value that the engine is loaded with; on a command line it is the engine's option.
        voice_aliases: other names of voices -> existing voices.
        openai_voices: OpenAI's names of voices are names of the first voices here, in this order.
        lexicon_file: where the lexicon of `defaults` was read.
        token: clients must send it, or a key of `keys_file`; None: without such a file only requests to localhost are
            served.
        allow_origins: of web pages that may use the server, besides its own; "*" needs a token.
        defaults: options of speech for clients that leave them out.

    Raises:
        BackendError: no client could send the token or a served name, or a time is below 0.
    """

    voices: Annotated[Path | None, Row("folder of saved voices (Voice.save), each named by its file", _ALL, "DIR")] = (
        None
    )
    allow_foreign_voice: Annotated[bool, Row("an experiment: Base voices on CustomVoice", ("ray",))] = False
    served_names: Annotated[tuple[str, ...], Row("another name of the model", _NAMED, "NAME", "served-name")] = ()
    voice_aliases: Annotated[Mapping[str, str], Row(_ALIAS, _NAMED, "ALIAS=VOICE", "voice-alias")] = field(
        default_factory=dict
    )
    openai_voices: bool = False
    lexicon_file: Path | None = None
    token: Annotated[str | None, Row(f"token that clients must send; safer in the environment variable {TOKEN}")] = None
    keys_file: Annotated[Path | None, Row(_KEYS, _NAMED, "FILE")] = None
    allow_upload: Annotated[bool, Row("let clients make voices from recordings (Base)")] = False
    allow_clone: Annotated[bool, Row("let a request bring the recording of its voice along (Base)")] = False
    allow_origins: Annotated[tuple[str, ...], Row(_ORIGIN, metavar="ORIGIN", typed="allow-origin")] = ()
    ui: Annotated[bool, Row("serve a web page at /, to try the server")] = False
    log_texts: Annotated[bool, Row("log the texts too, not only lengths and times", _COMMANDS)] = False
    log_format: Annotated[str, Row(f"{' or '.join(LOG_FORMATS)}: how lines of the log are written", _ALL)] = "text"
    grace_seconds: Annotated[float, Row(_GRACE, _COMMANDS, "S")] = 0.0
    drain_seconds: Annotated[float, Row(_DRAIN, _COMMANDS, "S")] = 60.0
    otlp_endpoint: Annotated[str | None, Row(_OTLP, _ALL, "URL")] = None
    metrics_port: Annotated[int | None, Row(_METRICS, ("wyoming",), "PORT")] = None
    ssl_certfile: Annotated[Path | None, Row("certificate for TLS, PEM; read again on renewal", metavar="FILE")] = None
    ssl_keyfile: Annotated[Path | None, Row("its private key, if that is in a file of its own", metavar="FILE")] = None
    ssl_keyfile_password: Annotated[str | None, Row("password of the private key", metavar="PASSWORD")] = None
    ssl_ca_certs: Annotated[Path | None, Row(_CA, metavar="FILE")] = None
    defaults: RequestOptions = field(default_factory=RequestOptions)
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        token = self.token
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
            raise BackendError("the token must be printable ASCII without spaces around it: a header carries it")
        if self.log_format not in LOG_FORMATS:
            raise BackendError(f"log_format must be {' or '.join(LOG_FORMATS)}, got {self.log_format!r}")
        for name in ("grace_seconds", "drain_seconds"):
            if not 0 <= getattr(self, name) <= _LONGEST_S:
                raise BackendError(f"{name} must be 0 to {_LONGEST_S}, got {getattr(self, name)}")
        if self.metrics_port is not None and not 1 <= self.metrics_port <= 65535:
            raise BackendError(f"metrics_port must be 1 to 65535, got {self.metrics_port}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password or self.ssl_ca_certs):
            raise BackendError("ssl_certfile must be given with the other ssl options: they are for its TLS")
        for name in self.served_names:
            if not (name.isprintable() and name.strip() == name and 0 < len(name) <= _MAX_NAME):
                raise BackendError(f"a served name has 1 to {_MAX_NAME} printable characters, got {name[:80]!r}")


def rows_of(entrance: str) -> dict[str, tuple[Any, Row]]:
    """The options that an entrance takes: field -> its type and how it is given."""
    hints = get_type_hints(ServerOptions, include_extras=True).items()
    rows = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Annotated}
    return {name: (kind, row) for name, (kind, row) in rows.items() if entrance in row.entrances}
