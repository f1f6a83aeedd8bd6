"""Calls that a type checker has to refuse: each line that ends in a code, for that error and no other.

It is not run. What the arguments are called, and what they may be, is checked where they are passed on as keywords too.
"""

from __future__ import annotations

import torch

import headrace


def arguments(url: str) -> None:
    headrace.open(3)  # arg-type
    headrace.open(url, verify=1.5)  # arg-type
    headrace.stream(url, order="any")  # arg-type
    headrace.load(url, order="any")  # arg-type
    headrace.load(url, ordr="file")  # call-arg
    headrace.load(url, device=0)  # arg-type
    headrace.load(url, slices=slice(0, 2))  # arg-type
    headrace.read(url, "bias")  # arg-type
    headrace.hold(url, device={"*": "cpu"})  # arg-type
    headrace.pull(url)  # call-arg


def options(url: str) -> None:
    headrace.open(url, concurency=4)  # call-arg
    headrace.open(url, concurrency="many")  # arg-type
    headrace.plan(url, direct_io="yes")  # arg-type
    headrace.stream(url, memory_limit=0.5)  # arg-type
    headrace.load(url, partition="tensors")  # arg-type
    headrace.load(url, stall_timeout_s="5s")  # arg-type
    headrace.load(url, options={"concurrency": 4})  # arg-type
    headrace.hold(url, pin=True)  # arg-type
    headrace.hold(url, in_memory="auto")  # call-arg
    headrace.pull(url, "copy", attempts=None, order="file")  # call-arg
    headrace.verify(url, progres=None)  # call-arg
    headrace.folder(url, mmap="on")  # arg-type
    headrace.save_metadata(url, "metadata", verify=True)  # call-arg
    headrace.open_sharded(url, rank=0, gds="auto", device="cuda")  # call-arg


def integrations(module: torch.nn.Module, url: str) -> None:
    headrace.load_into(module, url, slices={})  # call-arg
    headrace.load_into(module, url, progress="bar")  # arg-type
    headrace.load_into(module, 3)  # arg-type
    headrace.state_dict(url, device="cuda")  # call-arg
    headrace.state_dict(url, pin="always")  # arg-type
    headrace.patch(verify=True)  # call-arg
    headrace.local_view(url, attempts="3")  # arg-type
