"""A load test of OpenAI-compatible servers, for locust: the clients ask questions in a fixed order,
each the next one as soon as it has an answer, and read the streamed answers.

    locust -f load.py --headless --users 4 --spawn-rate 100 --host http://127.0.0.1:8000 \\
        --questions question.jsonl --requests 32 --max-tokens 128 --out result.json

Writes one JSON object: tokens per second over all clients, times to the first token and between
pieces, errors, and a hash of each answer (null: there is none). Only servers on this machine.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from locust import HttpUser, events, task
from locust.env import Environment
from locust.exception import StopUser

state: dict[str, Any] = {}
lock = threading.Lock()


@events.init_command_line_parser.add_listener
def options(parser: Any) -> None:
    parser.add_argument("--questions", help="JSONL with `turns` or `question`")
    parser.add_argument("--first", type=int, default=0, help="Ask the questions from this one on")
    parser.add_argument("--requests", type=int, default=32, help="How many requests in total")
    parser.add_argument("--max-tokens", type=int, default=128, help="Of each answer")
    parser.add_argument("--model-name", default="", help="For servers that insist on one")
    parser.add_argument("--out", help="Where to write the result")


@events.init.add_listener
def begin(environment: Environment, **_: Any) -> None:
    given = environment.parsed_options
    host = urlparse(given.host or "").hostname or ""
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise SystemExit(f"--host is {given.host!r}; accepted: an address of this machine")
    lines = [json.loads(line) for line in Path(given.questions).read_text("utf-8").splitlines()]
    questions = [line["turns"][0] if "turns" in line else line["question"] for line in lines]
    random.Random(0).shuffle(questions)  # files have one kind after the other
    state.update(questions=questions, next=0, done=[], idle=0, begin=None, end=None, errors=[])


class Client(HttpUser):
    """Asks until all questions are asked."""

    @task
    def ask(self) -> None:
        given = self.environment.parsed_options
        with lock:
            number = state["next"]
            if number >= given.requests:
                state["idle"] += 1
                if state["idle"] == given.num_users:
                    self.environment.runner.quit()
                raise StopUser
            state["next"] += 1
            state["begin"] = state["begin"] or time.perf_counter()
        place = (given.first + number) % len(state["questions"])
        question = state["questions"][place]
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": given.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if given.model_name:
            body["model"] = given.model_name
        sent, pieces, text, usage = time.perf_counter(), list[float](), "", None
        path = "/v1/chat/completions"
        # a connection each: llama-server closes kept ones just when the next question comes
        closing = {"Connection": "close"}
        with self.client.post(
            path, json=body, headers=closing, stream=True, timeout=600, catch_response=True
        ) as response:
            if response.status_code != 200:
                state["errors"].append(response.status_code)
                return
            for line in response.iter_lines(chunk_size=None):
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        pieces.append(time.perf_counter())
                        text += piece
        with lock:
            state["end"] = time.perf_counter()
            state["done"].append((number, sent, pieces, text, usage))


@events.quitting.add_listener
def write(environment: Environment, **_: Any) -> None:
    done, given = sorted(state["done"]), environment.parsed_options
    seconds = state["end"] - state["begin"] if done else 0.0
    tokens = sum(usage["completion_tokens"] for *_, usage in done)
    first = [pieces[0] - sent for _, sent, pieces, *_ in done if pieces]
    gaps = [b - a for _, _, pieces, *_ in done for a, b in itertools.pairwise(pieces)]
    texts = {number: hashlib.sha256(text.encode()).hexdigest()[:12] for number, *_, text, _ in done}
    result = {
        "clients": given.num_users,
        "answers": len(done),
        "errors": state["errors"],
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
        "first_token_p50": _percentile(first, 50),
        "first_token_p99": _percentile(first, 99),
        "between_pieces_p99": _percentile(gaps, 99),
        "between_pieces_most": round(max(gaps, default=0.0), 4),
        "texts": [texts.get(number) for number in range(given.requests)],
    }
    text = json.dumps(result)
    print(text)
    if given.out:
        Path(given.out).write_text(text + "\n", "utf-8")


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return round(values[0], 4) if values else 0.0
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 4)
