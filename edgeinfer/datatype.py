"""The tensor datatypes of the Open Inference Protocol and their sizes."""

from __future__ import annotations

ITEM_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "INT8": 1,
    "UINT16": 2,
    "INT16": 2,
    "FP16": 2,
    "BF16": 2,
    "UINT32": 4,
    "INT32": 4,
    "FP32": 4,
    "UINT64": 8,
    "INT64": 8,
    "FP64": 8,
}
"""Bytes per element of every fixed-size datatype; BYTES, of varying size, is the only other one."""
