"""Thousands of short requests of clients that often leave: is every text right, is no request lost,
and does the memory come back?

    python lab/recipes/serving/soak.py --url http://127.0.0.1:8000 --pid PID --requests 10000

Asks each of a few questions alone first. Then `--clients` ask at random, streamed or not, and some
leave at a random place. A text that differs from the first one, and any answer but 200 and 429, are
failures: exit code 1. The memory (--pid: the server's process) is compared with what it was after
the first tenth of the requests, when all places have been used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx
import psutil

QUESTIONS = 40


def body(number: int, stream: bool) -> dict[str, Any]:
    """Some are alike at the beginning, some are sampled."""
    rng = random.Random(number)
    common = "You are a helpful assistant who answers in one sentence. "
    prompt = common[: rng.randrange(len(common))] + f"Question {number}: name {number} things."
    return {
        "prompt": prompt,
        "max_tokens": rng.choice([1, 4, 16, 48]),
        "temperature": rng.choice([0, 0, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "seed": number,
        "stream": stream,
    }


class Soak:
    def __init__(self, client: httpx.AsyncClient, requests: int, leaving: float) -> None:
        self.client, self.left, self.leaving = client, requests, leaving
        self.until = float("inf")
        self.known: dict[int, str] = {}
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.unanswered = 0

    async def alone(self) -> None:
        """What each question is answered with."""
        for number in range(QUESTIONS):
            answer = await self.client.post("/v1/completions", json=body(number, False))
            self.known[number] = answer.json()["choices"][0]["text"]

    async def ask(self, rng: random.Random) -> None:
        while self.left > 0 and time.monotonic() < self.until:
            self.left -= 1
            number = rng.randrange(QUESTIONS)
            leaves = rng.random() < self.leaving
            try:
                if rng.random() < 0.5:
                    await self.streamed(number, rng.randrange(8) if leaves else None)
                else:
                    await self.whole(number, rng.random() * 0.05 if leaves else 60.0)
            except (httpx.HTTPError, TimeoutError) as error:
                self.unanswered += 1
                self.wrong.append(f"{type(error).__name__}: {error}")

    async def whole(self, number: int, seconds: float) -> None:
        ask = self.client.post("/v1/completions", json=body(number, False))
        try:
            answer = await asyncio.wait_for(ask, seconds)
        except TimeoutError:
            self.seen["left"] += 1
            if seconds > 1:
                raise
            return
        if await self.told(answer):
            self.compare(number, answer.json()["choices"][0]["text"])

    async def streamed(self, number: int, most: int | None) -> None:
        text, count = "", 0
        ask = self.client.stream("POST", "/v1/completions", json=body(number, True))
        async with ask as answer:
            if not await self.told(answer):
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += "".join(one["text"] for one in json.loads(line[6:])["choices"])
                    count += 1
                if count == most:
                    self.seen["left"] += 1
                    if not self.known[number].startswith(text):
                        self.wrong.append(f"question {number}: {text!r}")
                    return
        self.compare(number, text)

    async def told(self, answer: httpx.Response) -> bool:
        self.seen[str(answer.status_code)] += 1
        if answer.status_code == 429:
            await asyncio.sleep(min(float(answer.headers["retry-after"]), 0.05))
        elif answer.status_code != 200:
            self.wrong.append(f"status {answer.status_code}: {await answer.aread()!r}")
        return answer.status_code == 200

    def compare(self, number: int, text: str) -> None:
        if text != self.known[number]:
            self.wrong.append(f"question {number}: {text!r}, not {self.known[number]!r}")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="At most")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--leaving", type=float, default=0.3, help="Share of clients that leave")
    parser.add_argument("--growth", type=float, default=0.05, help="Of the memory, at most")
    given = parser.parse_args()
    server = psutil.Process(given.pid)
    limits = httpx.Limits(max_connections=given.clients)
    async with httpx.AsyncClient(base_url=given.url, timeout=120, limits=limits) as client:
        soak, begin = Soak(client, given.requests // 10, given.leaving), time.monotonic()
        await soak.alone()
        memory = []
        for share in (0.1, 0.9):
            soak.left = round(given.requests * share)
            soak.until = time.monotonic() + given.seconds * share
            await asyncio.gather(*(soak.ask(random.Random(n)) for n in range(given.clients)))
            while await running(client):
                await asyncio.sleep(0.1)
            memory.append(server.memory_info().rss)
    growth = memory[1] / memory[0] - 1
    result = {
        "requests": given.requests,
        "seconds": round(time.monotonic() - begin, 1),
        "answers": dict(soak.seen),
        "wrong": len(soak.wrong),
        "unanswered": soak.unanswered,
        "memory_mib": [round(one / 2**20, 1) for one in memory],
        "growth": round(growth, 4),
    }
    print(json.dumps(result))
    for one in soak.wrong[:10]:
        print(one, file=sys.stderr)
    return int(bool(soak.wrong) or growth > given.growth)


async def running(client: httpx.AsyncClient) -> bool:
    """Whether the server is still at work."""
    metrics = (await client.get("/metrics")).text
    counts = [
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))
    ]
    return any(counts)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
