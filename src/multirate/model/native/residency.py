"""The kernel's structures for passes over experts that are not all in memory (residency.h, forecasts.h, mixture.h)."""

from __future__ import annotations

import ctypes

from multirate.model.native.library import int32, pointer

int64, double = ctypes.c_int64, ctypes.c_double

EVICTIONS = ("none", "lru", "lfu", "lrfu", "least_stale", "belady")
PREDICTORS = ("none", "previous_token", "popularity", "next_layer_gate", "accelerated", "oracle", "stream")
EVENTS = ("compute", "demand", "speculative", "stall", "predict", "token")
MOST_AHEAD, MOST_PREDICTORS = 8, 4

DONE, READ_FAILED, PAUSED = 0, 1, 2


class Counts(ctypes.Structure):
    _fields_ = [
        *((name, int64) for name in ("calls", "uses", "hits", "timely", "late", "wasted", "issued", "cancelled")),
        *((name, int64) for name in ("demand_bytes", "speculative_bytes", "errors")),
        *((name, double) for name in ("stall_seconds", "predictor_seconds", "read_seconds")),
    ]


class Event(ctypes.Structure):
    _fields_ = [("begin", double), ("end", double), *((name, int32) for name in ("kind", "row", "expert", "pad"))]


class Controls(ctypes.Structure):
    _fields_ = [
        ("counts", Counts),
        ("token", int64),
        *((name, int32) for name in ("row", "last_row", "depth", "active", "failed_key", "failure")),
        ("events", ctypes.POINTER(Event)),
        *((name, int32) for name in ("event_count", "record", "paused_layer", "predictor")),
    ]


class ExpertCachePlan(ctypes.Structure):
    _fields_ = [
        *((name, int32) for name in ("rows", "experts", "slots", "policy")),
        ("loss", double),
        *((name, pointer) for name in ("reads", "offsets", "future", "future_ends", "checksums", "checked")),
    ]


class PredictorPlan(ctypes.Structure):
    _fields_ = [
        *((name, int32) for name in ("kind", "most_depth")),
        ("threshold", double),
        *((name, pointer) for name in ("sites", "sketches", "pruned", "layer_of", "ones")),
        ("eps", ctypes.c_float),
        ("count", int32),
        *((name, pointer) for name in ("trace", "trace_ends", "trace_rows")),
        *((name, int32) for name in ("trace_calls", "pad")),
    ]


class Routers(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("routers", "norms")),
        ("eps", ctypes.c_float),
        *((name, int32) for name in ("experts", "top_k", "normalise", "hidden", "pad")),
    ]


class Mixture(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("shape", "layers")),
        ("routers", Routers),
        *((name, pointer) for name in ("row_of", "experts")),
    ]


class RoutedRows(ctypes.Structure):
    _fields_ = [(name, pointer) for name in ("normed", "logits", "ids", "weights", "parts")]
