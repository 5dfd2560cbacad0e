"""Metrics under vLLM's names, with what the scheduler counted and what was measured here."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from multirate.serving.metrics import Metrics
from multirate.serving.requests import Counters
from serving.conftest import client, running, saying
from serving.test_clients import connect


def parsed(text: str) -> dict[str, float]:
    """Name and further labels → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            if sample.name.startswith(("vllm:", "multirate:")):
                assert sample.labels.pop("model_name") == "bytes"
            found[" ".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def test_the_schedulers_counters() -> None:
    scheduler = saying("x")
    counted = Counters(2, 3, 4, 50, 6, 70, 8, 9, 10, 5, [3, 2], kept_bytes=11)
    scheduler.counters = lambda: counted  # type: ignore[method-assign]
    found = parsed(client(scheduler)("GET", "/metrics").text)
    assert {
        name: found[f"vllm:{name}"]
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "prompt_tokens_total",
            "generation_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
            "spec_decode_num_accepted_tokens_per_pos_total 0",
            "spec_decode_num_accepted_tokens_per_pos_total 1",
        )
    } == {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "prompt_tokens_total": 50,
        "generation_tokens_total": 70,
        "prefix_cache_queries_total": 50,
        "prefix_cache_hits_total": 6,
        "spec_decode_num_drafts_total": 9,
        "spec_decode_num_draft_tokens_total": 10,
        "spec_decode_num_accepted_tokens_total": 5,
        "spec_decode_num_accepted_tokens_per_pos_total 0": 3,
        "spec_decode_num_accepted_tokens_per_pos_total 1": 2,
    }
    assert found["multirate:decode_steps_total"] == 8
    assert found["multirate:waiting_tokens"] == 4
    assert found["multirate:kept_prefix_bytes"] == 11
    assert found["process_resident_memory_bytes"] > 0


def test_times_and_ends_of_requests() -> None:
    with running(saying("abcde", sizes=(1, 2), seconds=0.02)) as server:
        client = connect(server)
        client.completions.create(model="bytes", prompt="x")
        client.completions.create(model="bytes", prompt="x", max_tokens=1)
        found = parsed(client.with_options(base_url=server.url).get("/metrics", cast_to=str))
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert 0.04 <= found["vllm:time_to_first_token_seconds_sum"] < 2
    assert found["vllm:inter_token_latency_seconds_count"] == 5
    # Steps of 2, 1 and 2 tokens after the first: a token's share of a step is counted each time.
    assert 0.06 <= found["vllm:inter_token_latency_seconds_sum"] < 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:request_success_total stop"] == 1
    assert found["vllm:request_success_total length"] == 1


def test_two_servers_count_apart() -> None:
    one, other = Metrics(saying("x"), "a"), Metrics(saying("x"), "b")
    one.first_token(1.0)
    name = "vllm:time_to_first_token_seconds_count"
    assert one.registry.get_sample_value(name, {"model_name": "a"}) == 1
    assert other.registry.get_sample_value(name, {"model_name": "b"}) == 0
