"""The files of deploy/ agree with each other and with the command that they start."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main
import yaml

from multirate.cli.main import app

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def test_the_services_find_each_other() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    [port] = re.findall(r"^EXPOSE (\d+)$", dockerfile, re.MULTILINE)
    server = compose["services"]["multirate"]
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    assert server["deploy"]["replicas"] == 2
    [found] = scraped["scrape_configs"][0]["dns_sd_configs"]
    assert found["names"] == ["multirate"] and found["port"] == int(port)
    assert f"dynamic a multirate {port}" in (DEPLOY / "Caddyfile").read_text("utf-8")
    for service in compose["services"].values():
        for mounted in service.get("volumes", []):
            source = mounted.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).is_file(), source
        for published in service.get("ports", []):
            assert published.startswith("127.0.0.1:"), "open to the network"


def test_the_container_starts_a_command_that_exists() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    [words] = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.MULTILINE)
    _, name, *options = yaml.safe_load(words)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {option for option in options if option.startswith("--")} <= known
    ignored = (DEPLOY.parent / ".dockerignore").read_text("utf-8").split()
    for needed in ("src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        assert f"!{needed}" in ignored and (DEPLOY.parent / needed).exists()
