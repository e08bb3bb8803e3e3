"""Kvant: an LLM inference engine whose KV cache format is decided once, explained and honoured."""

from __future__ import annotations

__version__ = "0.1.0"
