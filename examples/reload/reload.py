"""Weights that change in a process that stays: each version is held in host memory, and loaded into the tensors that are there.

python reload.py VERSION VERSION ... [--rounds N] [--device cpu|cuda|simulated]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import torch
from model import make
from safetensors.torch import load_file

import headrace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda", "simulated"], default="cpu")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        device, weights = place(make(), args.device, stack)
        held = {url: stack.enter_context(headrace.hold(url, device=device)) for url in args.versions}
        for url, checkpoint in held.items():
            print(f"{url}: {checkpoint.held_nbytes:,} bytes {checkpoint.how}")
        addresses = {name: tensor.data_ptr() for name, tensor in weights.items()}
        for turn in range(args.rounds):
            url = args.versions[turn % len(args.versions)]
            started = time.perf_counter()
            with headrace.stream(held[url], device=device, into=weights) as stream:
                for _ in stream:
                    pass
            if args.device == "cuda":
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - started
            same = all(tensor.data_ptr() == addresses[name] for name, tensor in weights.items())
            print(f"round {turn + 1}: {url}, {stream.stats.tensors} tensors in {seconds * 1e3:.1f} ms,", end=" ")
            print(f"{'the same tensors' if same else 'OTHER TENSORS'}, {'equal' if equal(weights, url) else 'DIFFERENT'}")


def place(module: torch.nn.Module, kind: str, stack: contextlib.ExitStack) -> tuple[Any, dict[str, torch.Tensor]]:
    """A device for `device=`, and the module's parameters there."""
    if kind != "simulated":
        return kind, {name: parameter.data for name, parameter in module.to(kind).named_parameters()}
    from headrace.testing.devices import SimulatedDevice
    from headrace.testing.simulated import SimulatedRuntime

    device = SimulatedDevice(stack.enter_context(SimulatedRuntime()))
    return device, {name: device.tensor(parameter.data) for name, parameter in module.named_parameters()}


def equal(weights: dict[str, torch.Tensor], url: str) -> bool:
    """Whether the weights are what safetensors reads from the version's file."""
    expected = load_file(f"{url}/model.safetensors")
    return all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in weights.items())


if __name__ == "__main__":
    main()
