"""Tests inside vLLM itself: `scripts/test --vllm` runs them, in an environment of their own. Elsewhere they are not collected."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

try:
    distribution("vllm")
    collect_ignore_glob: list[str] = []
except PackageNotFoundError:
    collect_ignore_glob = ["*.py"]
