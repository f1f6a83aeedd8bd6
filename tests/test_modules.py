"""Weights into modules, and checkpoints as state dicts; torch's own `load_state_dict` says what is right."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import MIB, WatchedSource, bytes_of, mixed_contents, nth_data_read, random_contents, serialize, write, wrong
from torch import nn

import headrace
from headrace.errors import LoadError, OptionError, SourceError, TensorNotFoundError
from headrace.integrations.modules import ModuleMismatchError
from headrace.testing import Fault, Raise


class Net(nn.Module):
    """Parameters, buffers that are saved and one that is not, an integer, and a tie."""

    def __init__(self, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, dtype=dtype)
        self.norm = nn.BatchNorm1d(16, dtype=dtype)
        self.hidden = nn.Linear(16, 16, dtype=dtype)
        self.head = nn.Linear(16, 50, bias=False, dtype=dtype)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.hidden(self.norm(self.embed(tokens))))
        return hidden


def on_meta() -> Net:
    """Moved there: torch imports its compiler's decompositions, for seconds, to draw random weights there."""
    net = Net().to("meta")
    net.head.weight = net.embed.weight
    return net


def trained(*, tied: bool = True) -> Net:
    """A net with values of its own in every tensor."""
    torch.manual_seed(3)
    net = Net(tied=tied)
    for tensor in net.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape) * 10)
    return net


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """A checkpoint with all names of a net."""
    return save(tmp_path / "net.safetensors", trained().state_dict())


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A checkpoint as it is usually saved: of names for one tensor there is one."""
    state = trained().state_dict()
    del state["head.weight"]
    return save(tmp_path / "tied.safetensors", state)


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and bytes_of(ours[name]) == bytes_of(theirs[name]) for name in ours
    )


# ---- filling


def test_a_module_is_filled_where_it_is(tied: Path) -> None:
    net = Net()
    before = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    report = headrace.load_into(net, tied)
    assert same(net, trained())
    assert {name: tensor.data_ptr() for name, tensor in net.state_dict().items()} == before
    assert (report.missing, report.unexpected) == ((), ())
    assert report.nbytes == sum(tensor.nbytes for name, tensor in net.state_dict().items() if name != "head.weight")


def test_what_is_tied_in_the_module_is_said_and_not_missing(tied: Path) -> None:
    report = headrace.load_into(Net(), tied)
    assert report.tied == {"head.weight": "embed.weight"}
    assert "head.weight" not in report.loaded
    assert "embed.weight" in report.loaded


def test_of_several_names_for_one_tensor_the_last_one_is_read_as_in_torch(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in trained().state_dict().items()}
    state["embed.weight"] += 1
    path = save(tmp_path / "net.safetensors", state)
    net, reference = Net(), Net()
    report = headrace.load_into(net, path)
    reference.load_state_dict(state)
    assert same(net, reference)
    assert report.tied == {"embed.weight": "head.weight"}


def test_a_module_without_ties_takes_every_name(untied: Path) -> None:
    net = Net(tied=False)
    report = headrace.load_into(net, untied)
    assert same(net, trained(tied=True))
    assert report.tied == {}
    assert len(report.loaded) == len(net.state_dict())


def test_values_take_the_dtype_of_the_module(untied: Path) -> None:
    net, reference = Net(dtype=torch.bfloat16), Net(dtype=torch.bfloat16)
    headrace.load_into(net, untied)
    reference.load_state_dict(trained().state_dict())
    assert same(net, reference)


def test_gradients_flow_after_a_load_and_not_through_it(tied: Path) -> None:
    net = Net()
    with torch.no_grad():
        headrace.load_into(net, tied)
    headrace.load_into(net, tied)
    net(torch.tensor([1, 2, 3])).sum().backward()
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in net.parameters())


def test_a_view_that_was_saved_for_backward_notices(tied: Path) -> None:
    net = Net()
    loss = (net.hidden.weight**2).sum()
    headrace.load_into(net, tied)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_part_of_a_checkpoint_goes_into_a_part_of_a_module(untied: Path) -> None:
    net = Net(tied=False)
    before = bytes_of(net.head.weight)
    report = headrace.load_into(net.hidden, untied, names="hidden.*", rename=lambda name: name.removeprefix("hidden."))
    assert bytes_of(net.hidden.weight) == bytes_of(trained().hidden.weight)
    assert bytes_of(net.head.weight) == before
    assert sorted(report.loaded) == ["bias", "weight"]


def test_names_are_changed_by_a_mapping_and_others_stay(tmp_path: Path) -> None:
    state = trained().hidden.state_dict()
    path = save(tmp_path / "m.safetensors", {"kernel": state["weight"], "bias": state["bias"]})
    linear = nn.Linear(16, 16)
    headrace.load_into(linear, path, rename={"kernel": "weight"})
    assert same(linear, trained().hidden)


def test_two_names_that_become_one_are_refused(untied: Path) -> None:
    with pytest.raises(OptionError) as caught:
        headrace.load_into(Net(), untied, rename=lambda _: "embed.weight")
    assert caught.value.option == "rename"


def test_an_open_checkpoint_stays_open(untied: Path) -> None:
    with headrace.open(untied) as checkpoint:
        for _ in range(2):
            headrace.load_into(Net(), checkpoint)


def test_options_count_for_opening_too(tied: Path) -> None:
    with pytest.raises(OptionError) as caught:
        headrace.load_into(Net(), tied, atempts=3)
    assert caught.value.option == "atempts"
    headrace.load_into(Net(), tied, attempts=3, memory_limit=0, options=headrace.Options(concurrency=1))


# ---- what does not fit


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_said_of_opening_is_heeded(tied: Path, assign: bool) -> None:
    headrace.verify(tied.parent, write=True)
    headrace.save_metadata(tied, tied.parent / "metadata")
    save(tied, {name: tensor * 2 for name, tensor in trained().hidden.state_dict().items()})
    with pytest.raises(headrace.IntegrityError):
        headrace.load_into(Net(), tied, assign=assign, verify="require")
    with pytest.raises(headrace.SourceChangedError):
        headrace.load_into(Net(), tied, assign=assign, metadata=tied.parent / "metadata")


def test_strict_refuses_names_before_anything_is_read(tmp_path: Path) -> None:
    state = {f"old.{name}": tensor for name, tensor in trained().hidden.state_dict().items()}
    watched = WatchedSource(save(tmp_path / "m.safetensors", state).read_bytes())
    linear = nn.Linear(16, 16)
    before = bytes_of(linear.weight)
    with pytest.raises(ModuleMismatchError) as caught:
        headrace.load_into(linear, watched)
    assert caught.value.missing == ("weight", "bias")
    assert sorted(caught.value.unexpected) == ["old.bias", "old.weight"]
    assert isinstance(caught.value, LoadError)
    assert isinstance(caught.value, RuntimeError)  # as torch's
    assert bytes_of(linear.weight) == before
    assert len(watched.calls) == 1  # the header


def test_not_strict_reports_and_loads_what_fits(tmp_path: Path) -> None:
    state = trained().hidden.state_dict()
    path = save(tmp_path / "m.safetensors", {"weight": state["weight"], "more": torch.ones(2)})
    linear = nn.Linear(16, 16)
    before = bytes_of(linear.bias)
    report = headrace.load_into(linear, path, strict=False)
    assert (report.loaded, report.missing, report.unexpected) == (("weight",), ("bias",), ("more",))
    assert bytes_of(linear.weight) == bytes_of(state["weight"])
    assert bytes_of(linear.bias) == before
    assert all(name in str(report) for name in ("bias", "more"))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_a_shape_that_differs_is_always_an_error(tmp_path: Path, strict: bool, assign: bool) -> None:
    path = save(tmp_path / "m.safetensors", {"weight": torch.ones(16, 8), "bias": torch.ones(16)})
    linear = nn.Linear(16, 16)
    before = bytes_of(linear.bias)
    with pytest.raises(ModuleMismatchError) as caught:
        headrace.load_into(linear, path, strict=strict, assign=assign)
    assert caught.value.mismatched == {"weight": ((16, 8), (16, 16))}
    assert bytes_of(linear.bias) == before


def test_a_failed_read_says_what_is_complete() -> None:
    tensors = {f"{i}.weight": torch.randn(512, 512) for i in range(3)}
    data = safetensors.torch.save(tensors)
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    watched = WatchedSource(data, [Fault(nth_data_read(2), Raise(SourceError("gone")))])
    with pytest.raises(LoadError) as caught:
        headrace.load_into(module, watched, concurrency=1, memory_limit=0)
    assert not isinstance(caught.value, ModuleMismatchError)
    assert isinstance(caught.value.__cause__, SourceError)
    assert caught.value.filled
    for name in caught.value.filled:
        assert bytes_of(module.get_parameter(name)) == bytes_of(tensors[name])


def test_a_meta_module_is_told_to_assign(tied: Path) -> None:
    net = on_meta()
    with pytest.raises(OptionError) as caught:
        headrace.load_into(net, tied)
    assert caught.value.option == "assign"


@pytest.mark.parametrize(("arguments", "option"), [({"dtype": "float16"}, "dtype"), ({"device": "cpu"}, "device")])
def test_what_goes_with_assign_only_is_refused_without(tied: Path, arguments: dict[str, Any], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        headrace.load_into(Net(), tied, **arguments)
    assert caught.value.option == option


# ---- replacing


def test_a_meta_module_takes_the_tensors_of_the_checkpoint(tied: Path) -> None:
    net = on_meta()
    net.hidden.weight.requires_grad_(False)
    report = headrace.load_into(net, tied, assign=True)
    assert same(net, trained())
    assert net.head.weight is net.embed.weight  # still one
    assert report.tied == {"head.weight": "embed.weight"}
    assert not net.hidden.weight.requires_grad
    assert net.hidden.bias.requires_grad
    assert isinstance(net.hidden.bias, nn.Parameter)


def test_assigned_tensors_have_the_dtype_of_the_checkpoint_or_the_one_asked_for(tied: Path) -> None:
    net = Net(dtype=torch.bfloat16)
    headrace.load_into(net, tied, assign=True)
    assert net.hidden.weight.dtype == torch.float32
    headrace.load_into(net, tied, assign=True, dtype="float16")
    assert net.hidden.weight.dtype == torch.float16
    assert net.norm.num_batches_tracked.dtype == torch.int64
    assert bytes_of(net.hidden.weight) == bytes_of(trained().hidden.weight.half())


# ---- a state dict on demand


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return write(tmp_path / "mixed.safetensors", mixed_contents())


def test_opening_reads_headers_and_a_look_reads_one_tensor() -> None:
    contents = random_contents(1000, 2000, 3000)
    watched = WatchedSource(serialize(contents))
    weights = headrace.state_dict(watched)
    assert list(weights) == list(contents)
    assert (len(weights), "t001" in weights, "nowhere" in weights) == (3, True, False)
    assert len(watched.calls) == 1
    assert bytes_of(weights["t001"]) == contents["t001"].data
    assert sum(call.nbytes for call in watched.calls[1:]) == 2000


def test_each_look_gives_a_tensor_of_its_own(mixed: Path) -> None:
    with headrace.state_dict(mixed) as weights:
        first = weights["layer.0.weight"].zero_()
        assert bytes_of(weights["layer.0.weight"]) == mixed_contents()["layer.0.weight"].data
        assert not first.any()


def test_pairs_and_values_are_streamed_in_file_order(mixed: Path) -> None:
    contents = mixed_contents()
    with headrace.state_dict(mixed, memory_limit=0) as weights:
        for pairs in (dict(weights.items()), dict(zip(weights, weights.values(), strict=True)), dict(weights), weights.copy()):
            assert list(pairs) == list(contents)
            assert not wrong(pairs, contents)
        assert len(weights.items()) == len(weights.values()) == len(contents)


def test_many_threads_look_at_once(mixed: Path) -> None:
    contents = mixed_contents()
    with headrace.state_dict(mixed) as weights, ThreadPoolExecutor(4) as pool:
        assert not wrong(dict(zip(contents, pool.map(weights.__getitem__, contents), strict=True)), contents)


def test_torch_loads_a_module_from_it(untied: Path) -> None:
    net = Net()
    with headrace.state_dict(untied) as weights:
        net.load_state_dict(weights)
    assert same(net, trained())


def test_lazy_values_know_dtype_and_shape_and_read_when_they_are_indexed() -> None:
    contents = random_contents(4 * MIB, MIB)
    watched = WatchedSource(serialize(contents))
    lazy = headrace.state_dict(watched).lazy()
    assert type(lazy) is dict  # transformers sorts its items
    assert [(value.get_dtype(), value.get_shape()) for value in lazy.values()] == [("U8", [4 * MIB]), ("U8", [MIB])]
    assert len(watched.calls) == 1
    # What transformers asks for where neither an argument nor the config names a dtype.
    assert {(value.dtype, value.is_floating_point()) for value in lazy.values()} == {(torch.uint8, False)}
    assert bytes_of(lazy["t001"][...]) == contents["t001"].data
    assert bytes_of(lazy["t000"][5:9]) == contents["t000"].data[5:9]
    assert sum(call.nbytes for call in watched.calls[1:]) == MIB + 4


def test_an_unknown_name_is_a_key_error(mixed: Path) -> None:
    with headrace.state_dict(mixed) as weights:
        with pytest.raises(KeyError) as caught:
            weights["layer.0.weigth"]
        assert isinstance(caught.value, TensorNotFoundError)
        assert weights.get("nowhere") is None


def test_a_closed_one_says_so_and_tensors_stay(mixed: Path) -> None:
    with headrace.state_dict(mixed) as weights:
        tensor = weights["layer.0.weight"]
    with pytest.raises(SourceError):
        weights["layer.0.weight"]
    gc.collect()
    assert bytes_of(tensor) == mixed_contents()["layer.0.weight"].data
