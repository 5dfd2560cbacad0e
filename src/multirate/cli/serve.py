"""`multirate serve`: one model behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from multirate.cli import help, options
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.serving.settings import HttpSettings, ServingSettings

KEY = "MULTIRATE_API_KEY"
_EXTRA = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
load, http = (partial(typer.Option, rich_help_panel=panel) for panel in (help.LOAD, help.HTTP))


@dataclass(frozen=True)
class Load:
    """How many requests, and how long."""

    parallel: Annotated[int, load(help="Requests decoded at a time.")] = 16
    max_queue: Annotated[int, load(help="Requests that may wait; further ones get status 429.")] = (
        64
    )
    max_queue_tokens: Annotated[
        int | None, load(help="Prompt tokens that may wait in total (default: no limit).")
    ] = None
    context: Annotated[
        int | None,
        load(help="Maximum of prompt and new tokens together (default: the model's context)."),
    ] = None
    max_tokens: Annotated[
        int | None,
        load(help="Maximum of new tokens per answer (default: what the context leaves)."),
    ] = None
    prefix_memory: Annotated[
        str, load(help="Memory for prompts that begin alike, such as 2GB; 0 keeps nothing.")
    ] = "512MiB"

    def settings(self, method: str | None) -> ServingSettings:
        """UserError for values that cannot be used."""
        from multirate.experts.named_policies import parse_bytes
        from multirate.serving.settings import ServingSettings

        return ServingSettings(
            parallel=self.parallel,
            max_queue=self.max_queue,
            max_queue_tokens=self.max_queue_tokens,
            context=self.context,
            prefix_memory=parse_bytes(self.prefix_memory, "--prefix-memory") or 0,
            method=method,
        )


@dataclass(frozen=True)
class Http:
    """Who may ask, and what is logged."""

    host: Annotated[str, http(help="Address to listen on. 0.0.0.0 lets other machines in.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, http(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000
    api_key: Annotated[
        str | None,
        http(
            help=f"Key that clients must send (better in the variable {KEY}: others see options)."
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        http(
            help="Origin whose web pages may use the server, such as http://localhost:3000; * "
            "admits all (repeatable; default: none)."
        ),
    ] = None
    drain_seconds: Annotated[
        float, http(min=0, help="How long running requests may take to finish after SIGTERM.")
    ] = 30.0
    log_format: Annotated[str, http(help="text or json: one line per request, to stderr.")] = "text"
    log_prompts: Annotated[
        bool, http("--log-prompts", help="Write prompts and answers to the log.")
    ] = False

    def settings(self, most_requests: int, max_tokens: int | None) -> HttpSettings:
        """most_requests: how many fit at a time. UserError for values that cannot be used."""
        from multirate.serving.logs import FORMATS
        from multirate.serving.settings import HttpSettings

        if self.log_format not in FORMATS:
            raise UserError(f"--log-format is {self.log_format!r}; accepted: {', '.join(FORMATS)}")
        return HttpSettings(
            api_key=self.api_key if self.api_key is not None else os.environ.get(KEY) or None,
            cors_origins=tuple(self.cors_origin or ()),
            max_tokens=max_tokens,
            max_answers=min(HttpSettings.max_answers, most_requests),
            drain_seconds=self.drain_seconds,
            log_prompts=self.log_prompts,
        )


def command(
    model: options.Model = None,
    *,
    accelerator: options.Accelerator = None,
    method: Annotated[
        str | None,
        typer.Option(help="Method that drafts (default: the accelerator's, else text lookup)."),
    ] = None,
    requests: Load,
    http: Http,
    tuned: options.Tuned = True,
    machine: options.Machine,
) -> None:
    """Serve a model over HTTP, for OpenAI's clients.

    The text of a request is the same as without drafts, whatever else runs. Ctrl-C or SIGTERM
    finishes running requests and exits.
    """
    check_extra()
    serving = requests.settings(method)
    asked = http.settings(serving.parallel + serving.max_queue, requests.max_tokens)
    from multirate.serving.connections import bound

    with bound(http.host, http.port) as listener:  # before the model is loaded, which takes longer
        engine = _engine(model, accelerator, method, tuned, machine)
        _serve(engine, model, serving, asked, http, listener)


def check_extra() -> None:
    """UserError if a package of the extra [serve] is missing."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {', '.join(missing)}: run pip install 'multirate[serve]'")


def _engine(
    model: str | None,
    accelerator: str | None,
    method: str | None,
    tuned: bool,
    machine: options.Machine,
) -> Engine:
    _, engine = machine.attach(model)
    engine.uses_tuned = tuned
    options.add_accelerator(engine, model, accelerator, method)
    if method is not None:
        engine.spec_of(method)
    return engine


def _serve(
    engine: Engine,
    model: str | None,
    serving: ServingSettings,
    asked: HttpSettings,
    http: Http,
    listener: socket.socket,
) -> None:
    from multirate.loading.names import DEFAULT
    from multirate.serving import logs
    from multirate.serving.app import make_app
    from multirate.serving.connections import Server
    from multirate.serving.model import ServedModel
    from multirate.serving.scheduler import start

    served = ServedModel.of(engine, model or DEFAULT, serving)
    served.grammars.prepare()
    logs.start(http.log_format)
    scheduler = start(engine, serving)
    server = Server(make_app(served, scheduler, asked), scheduler, asked)
    if asked.api_key is None and not _local(http.host):
        options.note(f"note: everyone who reaches {http.host} may use this server; see --api-key")
    port = listener.getsockname()[1]
    logs.log.info("serving", extra={"fields": {"model": served.name, "url": url(http.host, port)}})
    server.run([listener])


def url(host: str, port: int) -> str:
    """Where the server is reached from this machine."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
