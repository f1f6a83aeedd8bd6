"""What callers call the places that tensors go to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, cast

from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.devices.base import Device

SHARED: Final = "shared-cpu"


def is_device(device: object) -> bool:
    """Whether it is a `Device` rather than the name of one."""
    return hasattr(device, "copy_async")


def open_device(device: object) -> Device:
    """The device that a caller named or gave; not the host. Raises `DeviceError` where there is none."""
    if is_device(device):
        return cast("Device", device)
    from headrace.devices import cuda  # imports torch

    _, _, index = name_of_device(device).partition(":")
    return cuda.open_device(int(index) if index else None)


def name_of_device(device: object) -> str:
    """How a plan calls a device. Nothing is opened: a plan can be made where the device is not.

    Raises:
        OptionError: there is no such kind of device.
    """
    if is_device(device):
        return cast("Device", device).name
    name = str(device)
    if name in ("cpu", SHARED) or re.fullmatch(r"cuda(:\d{1,3})?", name):
        return name
    raise OptionError(
        f"device {name!r} is not supported; load to 'cpu' and move the tensors, or to 'cuda', 'cuda:N' or 'shared-cpu'",
        option="device",
    )
