"""Several copies of the server behind one address, by Ray Serve: placing, routing, restarting and
scaling them is Ray's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multirate.errors import UserError
from multirate.serving import logs
from multirate.serving.app import make_app
from multirate.serving.model import ServedModel
from multirate.serving.scheduler import start
from multirate.serving.settings import HttpSettings, ServingSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from multirate.engine import Engine

NAME = "multirate"


@dataclass(frozen=True)
class Replicas:
    """How many copies there are.

    number: without `autoscaling`, which has fields of Ray's AutoscalingConfig.
    cpus: of each copy, and its number of threads; None: the machine's, shared out.
    """

    number: int = 1
    autoscaling: Mapping[str, Any] | None = None
    cpus: int | None = None

    def options(self, serving: ServingSettings, settings: HttpSettings) -> dict[str, Any]:
        """Ray's options of the deployment. Raises UserError for wrong ones."""
        from pydantic import ValidationError
        from ray.serve.config import AutoscalingConfig

        copies: dict[str, Any] = {"num_replicas": self.number}
        most = self.number
        if self.autoscaling is not None:
            try:
                config = AutoscalingConfig(**self.autoscaling)
            except (ValidationError, TypeError) as error:
                raise UserError(
                    f"--autoscaling is {dict(self.autoscaling)!r}; accepted: fields of Ray's "
                    f"AutoscalingConfig, such as min_replicas and max_replicas ({error})"
                ) from None
            copies, most = {"autoscaling_config": config}, config.max_replicas
        cpus = self.cpus or max((os.cpu_count() or 1) // most, 1)
        return {
            **copies,
            "ray_actor_options": {"num_cpus": cpus},
            # a copy refuses by itself what its queue does not hold
            "max_ongoing_requests": serving.parallel + 2 * serving.max_queue,
            "graceful_shutdown_timeout_s": settings.drain_seconds,
        }


class Replica:
    """One copy. load: makes its engine, in its own process."""

    def __init__(
        self,
        load: Callable[[], Engine],
        given: str,
        serving: ServingSettings,
        settings: HttpSettings,
        log_format: str,
    ) -> None:
        logs.start(log_format)
        engine = load()
        self._settings = settings
        self._scheduler = start(engine, serving)
        served = ServedModel.of(engine, given, serving)
        self._app = make_app(served, self._scheduler, settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def check_health(self) -> None:
        """Ray replaces a copy where this raises an error."""
        if not self._scheduler.alive:
            raise RuntimeError("the decoding thread has ended")

    def __del__(self) -> None:
        # Ray has waited for its requests
        if hasattr(self, "_scheduler"):
            self._scheduler.drain(self._settings.drain_seconds)


def run(
    load: Callable[[], Engine],
    given: str,
    serving: ServingSettings,
    settings: HttpSettings,
    replicas: Replicas,
    host: str,
    port: int,
    log_format: str = "text",
    blocking: bool = True,
) -> None:
    """Serves until interrupted (blocking), on the cluster that RAY_ADDRESS names, or one of this
    machine alone. Raises UserError for wrong settings of Ray.
    """
    import ray
    from ray import serve

    options = replicas.options(serving, settings)
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": host, "port": port})
    deployment: Any = serve.deployment(serve.ingress()(Replica), name=NAME, **options)
    application = deployment.bind(load, given, serving, settings, log_format)
    try:
        serve.run(application, name=NAME, route_prefix="/", blocking=blocking)
    finally:
        if blocking:
            serve.shutdown()
            ray.shutdown()
