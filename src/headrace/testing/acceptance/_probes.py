"""What a CUDA runtime does: questions with short answers, asked of a real one and of the simulated one by the same code.

`main NAME (real | simulated) [FOLDER]` answers the questions of one probe as a line of JSON. `_run` runs all of them, each in a
process of its own, and compares. A probe of RULES has the same answers wherever the simulator is right; one of FIGURES belongs to
the machine.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.testing.acceptance import _runtime as gpu
from headrace.testing.acceptance._bytes import load_bytes
from headrace.testing.acceptance._cufile import direct_storage
from headrace.testing.acceptance._loads import loads
from headrace.testing.acceptance._rates import rates
from headrace.testing.acceptance._runtime import D2D, D2H, H2D, Runtime

Answers = dict[str, object]
PAGE = 4096
MIB = 1 << 20
LARGE = 256 * MIB  # 5 to 30 ms on a bus: long enough to be overtaken by the host


def large_nbytes(runtime: Runtime) -> int:
    """Bytes of a copy that is still under way when the call has returned; the simulator's always are."""
    return 2 * MIB if runtime.is_simulated else LARGE


def register(runtime: Runtime, _: Path) -> Answers:
    """Registration: what is refused, and with which code."""
    code, answers = runtime.code, Answers()
    with gpu.mapped(MIB) as address:
        answers["register"] = code("HostRegister", address, MIB, 0)
        answers["kind of pointer"] = runtime.memory_kind(address + 5)
        flags = ctypes.c_uint()
        code("HostGetFlags", ctypes.byref(flags), address)
        answers["its flags"] = flags.value
        answers["again"] = code("HostRegister", address, MIB, 0)
        answers["a part of it"] = code("HostRegister", address + PAGE, PAGE, 0)
        answers["unregister a part"] = code("HostUnregister", address + PAGE)
        answers["unregister"] = code("HostUnregister", address)
        answers["unregister again"] = code("HostUnregister", address)
        answers["kind of pointer after"] = runtime.memory_kind(address)
        answers["zero bytes"] = code("HostRegister", address, 0, 0)
        answers["null"] = code("HostRegister", None, PAGE, 0)
        answers["unaligned"] = code("HostRegister", address + 1234, PAGE + 7, 0)
        answers["neighbour on the same page"] = code("HostRegister", address + 1234 + PAGE + 7, 100, 0)
        answers["neighbour on the next page"] = code("HostRegister", address + 2 * PAGE, PAGE, 0)
        answers["unregister unaligned"] = code("HostUnregister", address + 1234)
        for start in (address + 1234 + PAGE + 7, address + 2 * PAGE):
            code("HostUnregister", start)
    answers["unmapped pages"] = code("HostRegister", address, MIB, 0)
    return answers


def last_error(runtime: Runtime, _: Path) -> Answers:
    """The last error: how long it stays, and for whom."""
    with gpu.mapped(PAGE) as address:
        runtime.GetLastError()
        runtime.HostRegister(address, 0, 0)
        answers = Answers()
        with ThreadPoolExecutor(1) as threads:
            answers["seen by another thread"] = threads.submit(runtime.GetLastError).result()
        answers["success does not clear it"] = runtime.HostRegister(address, PAGE, 0) == 0 and runtime.GetLastError()
        answers["read again"] = runtime.GetLastError()
        runtime.code("HostUnregister", address)
    return answers


def stale(runtime: Runtime, _: Path) -> Answers:
    """Memory that is unmapped before it is unregistered."""
    address = gpu.map_memory(MIB)
    answers = Answers({"register": runtime.code("HostRegister", address, MIB, 0)})
    gpu.unmap_memory(address, MIB)
    with gpu.mapped(MIB, at=address) as again:
        if again == address:
            answers["what is mapped there next"] = runtime.code("HostRegister", again, MIB, 0)
        answers["unregister"] = runtime.code("HostUnregister", address)
    return answers


def files(runtime: Runtime, folder: Path) -> Answers:
    """Mappings of files: which can be registered, and whether a copy has the file's bytes."""
    answers = Answers()
    for place, path in (("shm", Path("/dev/shm")), ("disk", folder)):
        if not path.is_dir():
            continue
        with tempfile.NamedTemporaryFile(dir=path) as file:
            data = os.urandom(MIB)
            file.write(data)
            file.flush()
            for access, protection in (("rw", gpu.WRITABLE), ("ro", gpu.READABLE)):
                for sharing, flags in (("shared", mmap.MAP_SHARED), ("private", mmap.MAP_PRIVATE)):
                    for flag in (0, gpu.READ_ONLY):
                        with gpu.mapped(MIB, protection=protection, flags=flags, file=file.fileno()) as address:
                            question = f"{place} {sharing} {access}{' as read-only' if flag else ''}"
                            answers[question] = _registered_copy(runtime, address, flag, data)
    return answers


def _registered_copy(runtime: Runtime, address: int, flag: int, data: bytes) -> object:
    code = runtime.code("HostRegister", address, len(data), flag)
    if code:
        return code
    target = runtime.made("Malloc", len(data))
    runtime.code("MemcpyAsync", target, address, len(data), H2D, runtime.stream())
    found = runtime.fetched(target, len(data))
    runtime.code("HostUnregister", address)
    runtime.code("Free", target)
    return "0, equal" if found == data else "0, WRONG BYTES"


def late(runtime: Runtime, _: Path) -> Answers:
    """Is the source of a queued copy read later? It is overwritten right after the call."""
    answers, large = Answers(), large_nbytes(runtime)
    for kind in ("pinned", "pageable"):
        with gpu.mapped(large) as address:
            ctypes.memset(address, 1, large)
            if kind == "pinned":
                runtime.code("HostRegister", address, large, 0)
            target, stream = runtime.made("Malloc", large), runtime.stream()
            runtime.code("MemcpyAsync", target, address, large, H2D, stream)
            if kind == "pinned":  # with a pageable source the driver may wait, or not
                answers["pinned: done when the call returns"] = runtime.code("StreamQuery", stream) == 0
            ctypes.memset(address + large - MIB, 2, MIB)
            found = runtime.fetched(target + large - MIB, MIB)
            answers[f"{kind}: overwriting the source changes what arrives"] = found != b"\1" * MIB
            runtime.code("HostUnregister", address)
            runtime.code("Free", target)
    return answers


def order(runtime: Runtime, _: Path) -> Answers:
    """Events and streams."""
    answers, stream, other, large = Answers(), runtime.stream(), runtime.stream(), large_nbytes(runtime)
    never = runtime.made("EventCreateWithFlags", gpu.DISABLE_TIMING)
    answers["query of an event never recorded"] = runtime.code("EventQuery", never)
    answers["waiting for it"] = runtime.code("EventSynchronize", never)
    answers["a stream waits for it"] = runtime.code("StreamWaitEvent", stream, never, 0)
    milliseconds = ctypes.c_float()
    timed = runtime.made("EventCreateWithFlags", 0)
    answers["time to an event never recorded"] = runtime.code("EventElapsedTime", ctypes.byref(milliseconds), timed, timed)
    with gpu.mapped(large) as address:
        runtime.code("HostRegister", address, large, 0)
        ctypes.memset(address, 3, large)
        span, tensor = runtime.made("Malloc", large), runtime.made("Malloc", PAGE)
        runtime.MemcpyAsync(span, address, large, H2D, stream)
        event = runtime.recorded(stream)
        answers["query of queued work"] = runtime.EventQuery(event)
        answers["it leaves a last error"] = runtime.GetLastError()
        runtime.code("StreamWaitEvent", other, event, 0)
        answers["destroy an event that is waited for"] = runtime.code("EventDestroy", event)
        runtime.code("MemcpyAsync", tensor, span + large - PAGE, PAGE, D2D, other)
        answers["the waiting stream sees the copy"] = runtime.fetched(tensor, PAGE) == b"\3" * PAGE
        untimed = runtime.recorded(stream)
        runtime.code("EventSynchronize", untimed)
        answers["time between events without timing"] = runtime.code(
            "EventElapsedTime", ctypes.byref(milliseconds), untimed, untimed
        )
        runtime.code("HostUnregister", address)
    return answers


def copies(runtime: Runtime, _: Path) -> Answers:
    """Copies that are refused."""
    answers, stream = Answers(), runtime.stream()
    target = runtime.made("Malloc", 4 * MIB)
    with gpu.mapped(4 * MIB) as address:
        for half in (0, 2 * MIB):
            runtime.code("HostRegister", address + half, MIB, 0)
        runtime.code("HostRegister", address + MIB, MIB, 0)
        answers["in one registration"] = runtime.code("MemcpyAsync", target, address, MIB, H2D, stream)
        answers["from one registration into the next"] = runtime.code("MemcpyAsync", target, address + MIB // 2, MIB, H2D, stream)
        answers["out of a registration"] = runtime.code("MemcpyAsync", target, address + 5 * MIB // 2, MIB, H2D, stream)
        answers["wrong direction"] = runtime.code("MemcpyAsync", target, address, PAGE, D2H, stream)
        answers["no such direction"] = runtime.code("MemcpyAsync", target, address, PAGE, 9, stream)
        answers["zero bytes"] = runtime.code("MemcpyAsync", target, address, 0, H2D, stream)
        answers["device works after all that"] = runtime.code("DeviceSynchronize")
        for start in (0, MIB, 2 * MIB):
            runtime.code("HostUnregister", address + start)
    return answers


def memory(runtime: Runtime, _: Path) -> Answers:
    """Allocating and freeing."""
    answers, pointer, total = Answers(), ctypes.c_void_p(1), ctypes.c_size_t()
    answers["allocate nothing"] = runtime.code("Malloc", ctypes.byref(pointer), 0)
    answers["its pointer is null"] = pointer.value is None
    free = ctypes.c_size_t()
    runtime.code("MemGetInfo", ctypes.byref(free), ctypes.byref(total))
    answers["more than there is"] = runtime.code("Malloc", ctypes.byref(pointer), total.value + MIB)
    answers["kind of device pointer"] = runtime.memory_kind(device := runtime.made("Malloc", PAGE))
    answers["free"] = runtime.code("Free", device)
    answers["free again"] = runtime.code("Free", device)
    host = runtime.made("HostAlloc", PAGE, 0)
    answers["kind of allocated host pointer"] = runtime.memory_kind(host)
    answers["unregister what was allocated"] = runtime.code("HostUnregister", host)
    answers["free host"] = runtime.code("FreeHost", host)
    answers["free host again"] = runtime.code("FreeHost", host)
    answers["device that does not exist"] = runtime.code("SetDevice", 99)
    return answers


def machine(runtime: Runtime, folder: Path) -> Answers:
    """The machine, the device and its attributes."""
    names = {
        99: "host register",
        100: "host page tables",
        113: "read-only registration",
        116: "GPUDirect RDMA",
        40: "copy engines",
    }
    answers = Answers({"library": runtime.path, "kernel": os.uname().release, "disk folder": str(folder)})
    answers["runtime, driver"] = f"{runtime.number('RuntimeGetVersion')}, {runtime.number('DriverGetVersion')}"
    answers["devices"] = runtime.number("GetDeviceCount")
    for attribute, name in names.items():
        answers[f"attribute {attribute}: {name}"] = runtime.number("DeviceGetAttribute", attribute, 0)
    address = ctypes.create_string_buffer(32)
    runtime.code("DeviceGetPCIBusId", address, 32, 0)
    answers["bus"] = address.value.decode()
    node = Path("/sys/bus/pci/devices", address.value.decode().lower(), "numa_node")
    answers["NUMA node"] = node.read_text().strip() if node.exists() else "not told"
    answers["memlock"] = str(resource.getrlimit(resource.RLIMIT_MEMLOCK))
    answers["/proc/modules, nvidia-fs"] = f"{Path('/proc/modules').exists()}, {Path('/proc/driver/nvidia-fs').exists()}"
    return answers


def torch_and_us(runtime: Runtime, _: Path) -> Answers:
    """What torch makes of what was done behind its back."""
    import torch

    answers = Answers({"torch": torch.__version__})
    with gpu.mapped(LARGE) as address:
        runtime.code("HostRegister", address, LARGE, 0)
        source = torch.frombuffer((ctypes.c_char * LARGE).from_address(address), dtype=torch.uint8)
        answers["registered memory is pinned for torch"] = source.is_pinned()
        target = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
        source.fill_(1)
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        answers["a non-blocking copy of it is late"] = bool((target != 1).any().item())
        floats, halves = source.view(torch.float32), torch.empty(LARGE // 4, dtype=torch.bfloat16, device="cuda")
        answers["converting copy, blocking, GB/s of source"] = _rate(lambda: halves.copy_(floats), runtime, LARGE)
        answers["converting copy, non-blocking, GB/s of source"] = _rate(
            lambda: halves.copy_(floats, non_blocking=True), runtime, LARGE
        )
        answers["conversion on the device, GB/s of source"] = _rate(
            lambda: halves.copy_(target.view(torch.float32)), runtime, LARGE
        )
        runtime.code("HostUnregister", address)
    runtime.HostRegister(None, 0, 0)  # the error stays
    try:
        torch.zeros(4, device="cuda").add_(1)
        answers["the next operation after a failed registration"] = "works"
    except RuntimeError as error:
        answers["the next operation after a failed registration"] = f"raises: {str(error)[:60]}"
    runtime.GetLastError()
    return answers


def _rate(call: Callable[[], object], runtime: Runtime, nbytes: int) -> float:
    call()
    runtime.DeviceSynchronize()
    start = time.perf_counter()
    call()
    runtime.DeviceSynchronize()
    return round(nbytes / (time.perf_counter() - start) / 1e9, 1)


def pin_cost(runtime: Runtime, _: Path) -> Answers:
    """Seconds per GiB to page-lock memory, by what was done to it before."""
    nbytes, answers = 1 << 30, Answers()
    for name, steps in (("cold", ()), ("populated", (gpu.POPULATE,)), ("huge pages, populated", (gpu.HUGE_PAGES, gpu.POPULATE))):
        with gpu.mapped(nbytes) as address:
            start = time.perf_counter()
            for step in steps:
                _advise_in_threads(address, nbytes, step)
            ready = time.perf_counter()
            code = runtime.code("HostRegister", address, nbytes, 0)
            done = time.perf_counter()
            answers[f"{name}: prepare, register"] = f"{ready - start:.3f}, {done - ready:.3f}" if not code else f"error {code}"
            runtime.code("HostUnregister", address)
    start = time.perf_counter()
    pointer = runtime.made("HostAlloc", nbytes, 0)
    answers["cudaHostAlloc"] = f"{time.perf_counter() - start:.3f}"
    runtime.code("FreeHost", pointer)
    return answers


def _advise_in_threads(address: int, nbytes: int, advice: int) -> None:
    part = nbytes // 8
    threads = [threading.Thread(target=gpu.advise, args=(address + index * part, part, advice)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def bus(runtime: Runtime, _: Path) -> Answers:
    """GB/s to the device, by size of copy and number of streams; microseconds for a small copy."""
    nbytes, answers = 1 << 30, Answers()
    target = runtime.made("Malloc", nbytes)
    with gpu.mapped(nbytes) as address:
        ctypes.memset(address, 3, nbytes)
        answers["pageable"] = _rate(lambda: runtime.Memcpy(target, address, nbytes, H2D), runtime, nbytes)
        runtime.code("HostRegister", address, nbytes, 0)
        for count in (1, 2, 4):
            streams = [runtime.stream() for _ in range(count)]
            for size in (64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB):
                turns = min(nbytes // size, 2048)

                def copy(turns: int = turns, size: int = size, streams: list[int] = streams) -> None:
                    for turn in range(turns):
                        place = turn * size
                        runtime.MemcpyAsync(target + place, address + place, size, H2D, streams[turn % len(streams)])

                answers[f"pinned, {size >> 10} KiB, {count} streams"] = _rate(copy, runtime, turns * size)
        start, turns = time.perf_counter(), 20_000
        for turn in range(turns):
            runtime.MemcpyAsync(target + turn * 4096, address + turn * 4096, 2048, H2D, streams[0])
        runtime.DeviceSynchronize()
        answers["2 KiB copies, microseconds each"] = round((time.perf_counter() - start) / turns * 1e6, 2)
        runtime.code("HostUnregister", address)
    return answers


Probe = Callable[[Runtime, Path], Answers]
RULES: dict[str, tuple[Probe, float]] = {  # and the seconds after which a probe is given up
    "register": (register, 30),
    "last error": (last_error, 30),
    "stale": (stale, 30),
    "files": (files, 30),
    "late": (late, 30),
    "order": (order, 30),
    "copies": (copies, 30),
    "memory": (memory, 30),
    "load bytes": (load_bytes, 90),
}
FIGURES: dict[str, tuple[Probe, float]] = {
    "machine": (machine, 20),
    "torch": (torch_and_us, 40),
    "pin cost": (pin_cost, 40),
    "bus": (bus, 60),
    "direct storage": (direct_storage, 40),
    "loads": (loads, 120),
    "rates": (rates, 60),
}


def main() -> None:
    """Answer the questions of the probe in the first argument."""
    name, kind, *folder = sys.argv[1:]
    runtime = gpu.real() if kind == "real" else gpu.simulated(kind.removeprefix("simulated"))
    probe, _ = (RULES | FIGURES)[name]
    answers = probe(runtime, Path(*folder) if folder else Path(tempfile.gettempdir()))
    sys.stdout.write(json.dumps(answers) + "\n")
