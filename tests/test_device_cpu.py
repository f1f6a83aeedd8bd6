"""Host memory as torch tensors: what is made of a span, exact allocations, and what a destination accepts."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from headrace._dtypes import DTYPES
from headrace.devices.cpu import CpuTarget
from headrace.devices.tensors import torch_form
from headrace.errors import OptionError

TARGET = CpuTarget()


class Owner(bytearray):
    """Memory that can be watched."""


def wrap(owner: Any, dtype: str, shape: tuple[int, ...], position: int = 0) -> torch.Tensor:
    nbytes = DTYPES[dtype].bits * torch.Size(shape).numel() // 8
    (tensor,) = TARGET.wrap(owner, [dtype], [shape], [position], [nbytes])
    assert isinstance(tensor, torch.Tensor)
    return tensor


def words(nbytes: int) -> bytes:
    return bytes(range(1, nbytes + 1))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype)
        for shape in [(), (8,), (2, 4), (2, 1, 4), (0,), (4, 0)]
        for dtype in DTYPES
        if shape or DTYPES[dtype].bits >= 8  # what is less than a byte has no place
    ],
    ids=str,
)
def test_tensors_are_views_of_their_place_in_the_span(dtype: str, shape: tuple[int, ...]) -> None:
    nbytes = DTYPES[dtype].bits * torch.Size(shape).numel() // 8
    owner = Owner(words(128) + bytes(64))
    tensor = wrap(owner, dtype, shape, position=16)
    kind, dimensions = torch_form(dtype, shape, nbytes)
    assert (tensor.dtype, tuple(tensor.shape)) == (kind, tuple(dimensions))
    assert tensor.is_contiguous()
    assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(owner[16 : 16 + nbytes])
    if nbytes:
        tensor.reshape(-1).view(torch.uint8)[0] = 255
        assert owner[16] == 255


def test_each_tensor_holds_the_owner_and_nothing_else_does() -> None:
    owner = Owner(64)
    alive = weakref.ref(owner)
    tensors = TARGET.wrap(owner, ["F32", "I16"], [(2,), (3,)], [0, 8], [8, 6])  # type: ignore[arg-type]
    del owner
    tensors.pop()
    assert alive() is not None
    storage = tensors.pop().untyped_storage()
    assert alive() is not None
    del storage
    assert alive() is None


def test_tensors_have_storages_and_versions_of_their_own() -> None:
    first, second = TARGET.wrap(Owner(16), ["F32", "F32"], [(2,), (2,)], [0, 8], [8, 8])  # type: ignore[arg-type]
    first.add_(1)
    assert (first._version, second._version) == (1, 0)
    assert [t.untyped_storage().nbytes() for t in (first, second)] == [8, 8]
    assert [t.storage_offset() for t in (first, second)] == [0, 0]
    assert first._base is None
    assert not first._is_view()


@pytest.mark.parametrize("dtype", ["F32", "F4", "F6_E2M3", "BOOL"])
@pytest.mark.parametrize("shape", [(4, 8), (0,)], ids=str)
def test_tensors_made_under_inference_mode_are_none_of_it(dtype: str, shape: tuple[int, ...]) -> None:
    with torch.inference_mode():
        made = wrap(Owner(256), dtype, shape)
        nbytes = DTYPES[dtype].bits * torch.Size(shape).numel() // 8
        allocated, _ = TARGET.allocate(dtype, shape, nbytes)
        assert torch.is_inference_mode_enabled()
    assert not made.is_inference()
    assert not allocated.is_inference()
    assert not made.requires_grad


def test_empty_tensors_need_no_owner() -> None:
    assert wrap(None, "F32", (3, 0)).shape == (3, 0)
    assert wrap(None, "F6_E2M3", (0,)).dtype == torch.uint8


def test_f4_packs_two_elements_into_one_of_torchs() -> None:
    if DTYPES["F4"].torch is None or not hasattr(torch, str(DTYPES["F4"].torch)):
        pytest.skip("this torch has no float4")
    assert wrap(Owner(words(64)), "F4", (3, 4)).shape == (3, 2)
    assert wrap(Owner(words(64)), "F4", (4, 3)).dtype == torch.uint8
    assert wrap(Owner(words(64)), "F4", (4, 3)).shape == (6,)


@pytest.mark.parametrize("dtype", ["F64", "BF16", "F6_E2M3", "F4", "BOOL"])
@pytest.mark.parametrize("shape", [(4, 8), (0, 2)], ids=str)
def test_allocate_gives_exactly_the_memory_of_the_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    nbytes = DTYPES[dtype].bits * torch.Size(shape).numel() // 8
    tensor, memory = TARGET.allocate(dtype, shape, nbytes)
    assert tensor.untyped_storage().nbytes() == memory.nbytes == nbytes
    memory[:] = bytes(i % 2 for i in range(nbytes))
    assert tensor.reshape(-1).view(torch.uint8).tolist() == [i % 2 for i in range(nbytes)]


def test_the_memory_of_an_allocation_keeps_it_alive() -> None:
    tensor, memory = TARGET.allocate("F32", (1000,), 4000)
    tensor.fill_(7)
    expected = tensor.numpy().tobytes()
    del tensor
    torch.empty(1000).fill_(9)
    assert memory.tobytes() == expected


# ---- destinations


def destination(tensor: Any, dtype: str = "F32", shape: tuple[int, ...] = (2, 3)) -> Any:
    return TARGET.destination(tensor, "layer.weight", dtype, shape)


def test_a_contiguous_tensor_is_written_through_its_own_memory() -> None:
    tensor = torch.zeros(2, 3)
    found = destination(tensor)
    assert found.dtype == "F32"
    found.memory[:] = torch.arange(6.0).numpy().tobytes()
    assert tensor._version == 0
    assert found.finish() is tensor
    assert tensor._version == 1
    assert tensor.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_strided_tensor_is_filled_from_another() -> None:
    tensor = torch.nn.Parameter(torch.zeros(3, 2).T)
    found = destination(tensor)
    assert found.memory is None
    version = tensor._version
    found.fill_from(torch.arange(6.0).view(2, 3))
    assert found.finish() is tensor
    assert tensor._version > version
    assert tensor.requires_grad
    assert tensor.grad_fn is None
    assert tensor.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_destination_keeps_its_tensor_alive() -> None:
    tensor = torch.zeros(2, 3)
    alive = weakref.ref(tensor)
    memory = destination(tensor).memory
    del tensor
    assert alive() is not None
    memory[:] = bytes(24)


@pytest.mark.parametrize(("dtype", "kind"), [("F32", torch.bfloat16), ("BF16", torch.float64), ("I64", torch.float32)])
def test_a_tensor_of_another_dtype_says_which(dtype: str, kind: torch.dtype) -> None:
    found = destination(torch.zeros(2, 3, dtype=kind), dtype)
    assert getattr(torch, str(DTYPES[found.dtype].torch)) == kind


REFUSED = {
    "meta": lambda: torch.zeros(2, 3, device="meta"),
    "shape": lambda: torch.zeros(3, 2),
    "rank": lambda: torch.zeros(6),
    "negated": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
    "conjugated": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj(),
    "expanded": lambda: torch.zeros(1, 3).expand(2, 3),
    "overlapping": lambda: torch.zeros(4).as_strided((2, 3), (1, 1)),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "sparse rows": lambda: torch.eye(3)[:2].to_sparse_coo(),
    "a list": lambda: [[0, 0, 0], [0, 0, 0]],
    "none": lambda: None,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_written_is_refused_by_name(kind: str) -> None:
    with pytest.raises(OptionError, match=r"layer\.weight") as caught:
        destination(REFUSED[kind]())
    assert caught.value.option == "into"


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch announces the end of quantized tensors
def test_a_quantized_tensor_is_refused() -> None:
    quantized = torch._empty_affine_quantized((2, 3), scale=0.1, zero_point=0, dtype=torch.quint8)
    with pytest.raises(OptionError):
        destination(quantized, "U8")


@pytest.mark.parametrize(("dtype", "kind"), [("F6_E2M3", torch.float32), ("F4", torch.float32), ("F6_E2M3", torch.int8)])
def test_dtypes_that_torch_cannot_convert_are_refused(dtype: str, kind: torch.dtype) -> None:
    with pytest.raises(OptionError):
        destination(torch.zeros(4, 4, dtype=kind), dtype, (4, 4))


@pytest.mark.parametrize("layout", ["transposed", "gaps", "singletons", "empty", "scalar"])
def test_layouts_without_overlap_are_accepted(layout: str) -> None:
    tensor, shape = {
        "transposed": (torch.zeros(3, 2).T, (2, 3)),
        "gaps": (torch.zeros(4, 6)[::2, ::2], (2, 3)),
        "singletons": (torch.zeros(6).as_strided((2, 1, 3), (3, 0, 1)), (2, 1, 3)),
        "empty": (torch.zeros(0, 3), (0, 3)),
        "scalar": (torch.zeros(()), ()),
    }[layout]
    assert destination(tensor, "F32", shape).finish() is tensor
