"""`headrace.patch()` on small libraries that read weights as transformers, diffusers and accelerate do, and do nothing else.

The real ones: test_transformers.py and test_diffusers.py.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from checkpoints import KIB, MIB, Contents, WatchedSource, any_data_read, bytes_of, random_contents, serialize, write, wrong
from hub_server import Hub, Repo
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import OptionError, SourceError, SourceNotFoundError
from headrace.integrations._ahead import Ahead, natural_key
from headrace.integrations._reading import PatchReport, Record, make_safe_open
from headrace.sources.memory import MemorySource
from headrace.sources.s3 import S3Credentials
from headrace.testing import Fault, Raise
from headrace.testing.s3server import S3Server

SAFE_OPEN, LOAD_FILE = safetensors.safe_open, safetensors.torch.load_file
CONTENTS = random_contents(3 * KIB, 100 * KIB, 17, 40, dtype="U8")
FAMILIES = ("transformers", "diffusers", "accelerate")

MODELING = '''
import os
from concurrent.futures import ThreadPoolExecutor

from safetensors import safe_open

class PreTrainedModel:
    """Opens all files of a folder, then asks for tensors one at a time, sorted by name, on a pool of threads."""

    def __init__(self, name, tensors, arguments):
        self.name, self.tensors, self.arguments = name, tensors, arguments

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load."""
        path = pretrained_model_name_or_path
        if not os.path.isdir(path):
            raise OSError(f"{path} is no folder, and no repository of the hub")
        files = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
        opened = [safe_open(os.path.join(path, name), framework="pt", device="cpu", backend="mmap") for name in files]
        slices = {name: file.get_slice(name) for file in opened for name in file.keys()}
        with ThreadPoolExecutor(4) as pool:
            tensors = dict(zip(sorted(slices), pool.map(lambda name: slices[name][...], sorted(slices))))
        for file in opened:
            file.__exit__(None, None, None)
        return cls(path, tensors, (args, kwargs))

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path):
        with open(os.path.join(pretrained_model_name_or_path, "config.json")) as file:
            return file.read()
'''
AUTO = """
import functools
import types
from transformers.modeling_utils import PreTrainedModel

def copy_func(f):
    g = types.FunctionType(f.__code__, f.__globals__, name=f.__name__, argdefs=f.__defaults__, closure=f.__closure__)
    return functools.update_wrapper(g, f)

class AutoModel(PreTrainedModel):
    pass

AutoModel.from_pretrained = classmethod(copy_func(PreTrainedModel.from_pretrained.__func__))
"""
PIPELINES = """
from transformers.modeling_utils import PreTrainedModel

def pipeline(task, model=None):
    return PreTrainedModel.from_pretrained(model)
"""
LOADING = """
import safetensors.torch

def load_state_dict(checkpoint_file, map_location="cpu"):
    return safetensors.torch.load_file(checkpoint_file, device=map_location)
"""
ACCELERATE = """
from safetensors import safe_open
from safetensors.torch import load_file as safe_load_file

def load_state_dict(checkpoint_file):
    with safe_open(checkpoint_file, framework="pt") as f:
        f.metadata()
    return safe_load_file(checkpoint_file)
"""


@pytest.fixture(autouse=True)
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Packages with the names of the real ones, first on the path; none is imported yet."""
    place = tmp_path / "libraries"
    for name, text in {
        "transformers/__init__": "",
        "transformers/modeling_utils": MODELING,
        "transformers/auto": AUTO,
        "transformers/pipelines": PIPELINES,
        "diffusers/__init__": "",
        "diffusers/models/__init__": "",
        "diffusers/models/model_loading_utils": LOADING,
        "accelerate/__init__": "",
        "accelerate/utils/__init__": "",
        "accelerate/utils/modeling": ACCELERATE,
    }.items():
        path = place / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in FAMILIES}
    yield place
    for name in list(sys.modules):
        if name.partition(".")[0] in FAMILIES:
            del sys.modules[name]
    sys.modules.update(kept)
    assert safetensors.safe_open is SAFE_OPEN
    assert safetensors.torch.load_file is LOAD_FILE
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("headrace")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    names = list(CONTENTS)
    write(folder / "model-1.safetensors", {name: CONTENTS[name] for name in names[:2]})
    write(folder / "model-2.safetensors", {name: CONTENTS[name] for name in names[2:]})
    return folder


def stored(**more: bytes) -> dict[str, bytes]:
    """A model in a bucket."""
    return {"m/config.json": b'{"a": 1}', "m/model.safetensors": serialize(CONTENTS), "m/sub/vocab.txt": b"word", **more}


def keys(server: S3Server) -> S3Credentials:
    return S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)


def modeling() -> Any:
    return importlib.import_module("transformers.modeling_utils")


# ---- what is replaced, and put back


def test_a_library_that_was_imported_before_loads_by_headrace_inside_the_block_only(model: Path) -> None:
    library = modeling()
    with headrace.patch() as patched:
        loaded = library.PreTrainedModel.from_pretrained(model, 7, dtype="x")
    assert loaded.tensors.keys() == CONTENTS.keys()
    assert not wrong(loaded.tensors, CONTENTS)
    assert loaded.arguments == ((7,), {"dtype": "x"})
    assert patched.report.tensors == len(CONTENTS)
    library.PreTrainedModel.from_pretrained(model)
    assert patched.report.tensors == len(CONTENTS)


def test_a_library_that_is_imported_inside_the_block_loads_by_headrace(model: Path) -> None:
    with headrace.patch() as patched:
        loaded = modeling().PreTrainedModel.from_pretrained(model)
    assert not wrong(loaded.tensors, CONTENTS)
    assert patched.report.files == (str(model / "model-1.safetensors"), str(model / "model-2.safetensors"))
    assert modeling().safe_open is SAFE_OPEN


def test_everything_is_as_it_was_afterwards() -> None:
    library = modeling()
    before = dict(vars(library)), dict(vars(library.PreTrainedModel)), list(sys.meta_path)
    with headrace.patch() as patched:
        assert library.safe_open is not SAFE_OPEN
        assert safetensors.safe_open is library.safe_open
        patched.record.add("file", tensors=1, nbytes=1)  # not to be warned
    assert (dict(vars(library)), dict(vars(library.PreTrainedModel)), list(sys.meta_path)) == before


def test_names_that_other_modules_took_inside_the_block_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("takes_names")
    monkeypatch.setitem(sys.modules, "takes_names", module)
    with headrace.patch() as patched:
        exec("from safetensors.torch import load_file as mine", vars(module))
        assert module.mine is not LOAD_FILE
        patched.record.add("file", tensors=1, nbytes=1)
    assert module.mine is LOAD_FILE


@pytest.mark.parametrize("first", ["before", "inside"])
def test_methods_that_are_copied_from_a_wrapped_one_are_put_back(model: Path, first: str) -> None:
    if first == "before":
        modeling()
    with headrace.patch():
        auto = importlib.import_module("transformers.auto").AutoModel
        assert not wrong(auto.from_pretrained(model).tensors, CONTENTS)
    code = modeling().PreTrainedModel.from_pretrained.__func__.__code__
    assert auto.__dict__["from_pretrained"].__func__.__code__ is code
    assert code.co_filename.endswith("modeling_utils.py")


def test_modules_keep_their_loader_and_docstrings() -> None:
    with headrace.patch() as patched:
        library = modeling()
        assert type(library.__loader__) is type(library.__spec__.loader) is type(types.__spec__.loader)  # type: ignore[union-attr]
        assert library.PreTrainedModel.from_pretrained.__doc__ == "Load."
        patched.record.add("file", tensors=1, nbytes=1)


def test_an_inner_block_leaves_the_outer_one_in_force(model: Path) -> None:
    library = modeling()
    with headrace.patch() as outer:
        with headrace.patch() as inner:
            library.PreTrainedModel.from_pretrained(model)
        library.PreTrainedModel.from_pretrained(model)
    assert (inner.report.tensors, outer.report.tensors) == (len(CONTENTS), 2 * len(CONTENTS))


def test_blocks_of_many_threads_end_with_everything_put_back(model: Path) -> None:
    library = modeling()

    def load(_: int) -> bool:
        with headrace.patch() as patched:
            return not wrong(library.PreTrainedModel.from_pretrained(model).tensors, CONTENTS) and bool(patched.report.tensors)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(load, range(32)))
    assert library.safe_open is SAFE_OPEN


def test_blocks_that_begin_and_end_while_other_threads_import_leave_nothing_behind(model: Path) -> None:
    names = ["transformers.auto", "transformers.pipelines", "diffusers.models.model_loading_utils", "accelerate.utils.modeling"]

    def load(number: int) -> bool:
        with headrace.patch():
            importlib.import_module(names[number % len(names)])
            return not wrong(safetensors.torch.load_file(model / "model-1.safetensors"), CONTENTS)

    for _ in range(4):
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(load, range(16)))
        assert modeling().safe_open is sys.modules["accelerate.utils.modeling"].safe_open is SAFE_OPEN  # type: ignore[attr-defined]
        assert sys.modules["accelerate.utils.modeling"].safe_load_file is LOAD_FILE  # type: ignore[attr-defined]
        for name in [name for name in sys.modules if name.partition(".")[0] in FAMILIES]:
            del sys.modules[name]


def test_without_safetensors_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(OptionError, match="pip install safetensors torch"), headrace.patch():
        pass


def test_an_error_goes_through_and_everything_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    library = modeling()
    with pytest.raises(OSError, match="is no folder"), headrace.patch():
        library.PreTrainedModel.from_pretrained("nowhere")
    assert library.safe_open is SAFE_OPEN
    assert not caplog.records  # the error says it all


def test_a_block_is_entered_once() -> None:
    patched = headrace.patch()
    with patched:
        patched.record.add("file", tensors=1, nbytes=1)
        with pytest.raises(OptionError, match="for each block"):
            patched.__enter__()
    with pytest.raises(OptionError):
        patched.__enter__()


def test_an_option_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(OptionError, match="concurency"):
        headrace.patch(concurency=3)


def test_what_a_library_kept_from_a_block_works_after_it(model: Path) -> None:
    with headrace.patch() as patched:
        kept = safetensors.torch.load_file
        patched.record.add("file", tensors=1, nbytes=1)
    assert not wrong(kept(model / "model-1.safetensors"), CONTENTS)


# ---- what is reported


def test_the_report_is_one_line() -> None:
    assert str(PatchReport(("a",), 103, 90_405_376)) == "headrace loaded 103 tensors (90,405,376 bytes) from 1 file"
    assert str(PatchReport(("a", "b"), 1, 2, ("c",))).endswith("from 2 files; 1 file left to safetensors")


def test_a_block_in_which_nothing_was_loaded_says_so(caplog: pytest.LogCaptureFixture) -> None:
    modeling()
    with headrace.patch():
        pass
    assert "nothing was loaded through headrace" in caplog.text
    assert "read by transformers" in caplog.text


def test_a_block_logs_what_it_loaded(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace"), headrace.patch() as patched:
        modeling().PreTrainedModel.from_pretrained(model)
    assert [record.getMessage() for record in caplog.records] == [str(patched.report)]


def test_bytes_and_parts_are_counted(model: Path) -> None:
    with headrace.patch() as patched:
        with safetensors.safe_open(model / "model-1.safetensors", framework="pt") as file:
            assert len(file.get_slice("t001")[10:20]) == 10
        safetensors.torch.load_file(model / "model-1.safetensors")
    assert (patched.report.tensors, patched.report.nbytes) == (3, 10 + 103 * KIB)


def test_a_version_without_the_name_that_is_replaced_is_named(libraries: Path, caplog: pytest.LogCaptureFixture) -> None:
    (libraries / "transformers" / "modeling_utils.py").write_text("from safetensors import safe_open as another\n")
    with headrace.patch() as patched:
        modeling()
        patched.record.add("file", tensors=1, nbytes=1)
    assert "transformers.modeling_utils has no safe_open" in caplog.text
    assert "tested with transformers 5.19" in caplog.text


# ---- the ways in which weights are read


@pytest.mark.parametrize("name", ["diffusers.models.model_loading_utils", "accelerate.utils.modeling"])
@pytest.mark.parametrize("when", ["before", "inside"])
def test_functions_that_load_a_file_do_it_by_headrace(model: Path, name: str, when: str) -> None:
    if when == "before":
        importlib.import_module(name)
    with headrace.patch() as patched:
        loaded = importlib.import_module(name).load_state_dict(str(model / "model-2.safetensors"))
    assert not wrong(loaded, CONTENTS)
    assert patched.report.tensors == 2


def test_devices_get_their_tensors_by_way_of_the_host(model: Path) -> None:
    path = model / "model-1.safetensors"
    with headrace.patch():
        assert {tensor.device.type for tensor in safetensors.torch.load_file(path, device="meta").values()} == {"meta"}
        with safetensors.safe_open(path, framework="pt", device=torch.device("meta")) as file:
            assert file.get_tensor("t000").device.type == "meta"
            assert {tensor.device.type for tensor in file.get_tensors().values()} == {"meta"}
        with safetensors.safe_open(path, framework="np", device="meta") as file:
            assert file.get_tensor("t000").tobytes() == CONTENTS["t000"].data


def test_tensors_do_not_alias_the_file_whatever_the_environment_says(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MMAP", "require")
    path = model / "model-1.safetensors"
    with headrace.patch():
        tensor = safetensors.torch.load_file(path)["t001"]
    path.write_bytes(bytes(path.stat().st_size))
    assert bytes_of(tensor) == CONTENTS["t001"].data


def test_frameworks_that_headrace_does_not_know_are_left_to_safetensors_and_counted() -> None:
    asked: list[Any] = []
    record = Record()

    class Opening:
        def open(self, filename: Any) -> headrace.Checkpoint:
            raise AssertionError(filename)

        def records(self) -> list[Record]:
            return [record]

    make_safe_open(Opening(), lambda *args, **kwargs: asked.append((args, kwargs)))(
        "a.safetensors", "mlx", "cpu", backend="pread"
    )
    assert asked == [(("a.safetensors", "mlx", "cpu"), {"backend": "pread"})]
    assert record.report().elsewhere == ("a.safetensors",)


# ---- models in stores


def test_a_url_loads_as_a_folder_does_and_each_byte_of_the_weights_comes_once() -> None:
    with S3Server({"models": stored()}) as server:
        with headrace.patch(credentials=keys(server)) as patched:
            loaded = modeling().PreTrainedModel.from_pretrained("s3://models/m")
            config = modeling().PreTrainedModel.get_config_dict("s3://models/m")
        sent = sum(request.sent for request in server.requests if request.key == "m/model.safetensors")
    assert not wrong(loaded.tensors, CONTENTS)
    assert config == '{"a": 1}'
    assert patched.report.files == ("s3://models/m/model.safetensors",)
    assert sent <= len(serialize(CONTENTS)) * 1.01
    assert Path(loaded.name, "sub", "vocab.txt").read_bytes() == b"word"


def test_a_url_is_looked_over_once_per_block() -> None:
    with S3Server({"models": stored()}) as server, headrace.patch(credentials=keys(server)):
        modeling().PreTrainedModel.get_config_dict("s3://models/m")
        before = len(server.requests)
        modeling().PreTrainedModel.get_config_dict(pretrained_model_name_or_path="s3://models/m")
        assert len(server.requests) == before
        modeling().PreTrainedModel.from_pretrained("s3://models/m")


@pytest.mark.parametrize("first", ["before", "inside"])
def test_a_pipeline_takes_a_url(first: str) -> None:
    package = importlib.import_module("transformers")
    if first == "before":
        package.pipeline = importlib.import_module("transformers.pipelines").pipeline  # type: ignore[attr-defined]
    with S3Server({"models": stored()}) as server, headrace.patch(credentials=keys(server)):
        if first == "inside":
            package.pipeline = importlib.import_module("transformers.pipelines").pipeline  # type: ignore[attr-defined]
        assert not wrong(package.pipeline("embed", model="s3://models/m").tensors, CONTENTS)
    assert package.pipeline.__code__.co_filename.endswith("pipelines.py")


def test_a_model_of_the_hub_loads_from_the_commit_that_its_config_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name.removeprefix("m/"): data for name, data in stored().items()}
    repo = Repo(dict(files))
    with Hub({"org/repo": repo}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        with headrace.patch():
            modeling().PreTrainedModel.get_config_dict("hf://org/repo")
            repo.push({**files, "model.safetensors": serialize(random_contents(8))})
            assert not wrong(modeling().PreTrainedModel.from_pretrained("hf://org/repo").tensors, CONTENTS)


def test_after_the_block_what_stands_for_weights_is_no_model() -> None:
    with S3Server({"models": stored()}) as server, headrace.patch(credentials=keys(server)):
        loaded = modeling().PreTrainedModel.from_pretrained("s3://models/m")
    with pytest.raises(safetensors.SafetensorError):
        modeling().PreTrainedModel.from_pretrained(loaded.name)
    with pytest.raises(OSError, match="s3://models/m is no folder"):
        modeling().PreTrainedModel.from_pretrained("s3://models/m")


def test_a_store_that_has_no_such_model_says_so() -> None:
    with S3Server({"models": stored()}) as server, headrace.patch(credentials=keys(server)) as patched:
        with pytest.raises(SourceNotFoundError, match="s3://models/n"):
            modeling().PreTrainedModel.from_pretrained("s3://models/n")
        with pytest.raises(OptionError, match="is a file"):
            modeling().PreTrainedModel.from_pretrained("s3://models/m/model.safetensors")
        patched.record.add("file", tensors=1, nbytes=1)


def test_blocks_inside_each_other_find_each_others_models() -> None:
    with S3Server({"ours": stored()}) as one, S3Server({"theirs": stored()}) as other:
        library = modeling()
        with headrace.patch(credentials=keys(one)):
            path = library.PreTrainedModel.from_pretrained("s3://ours/m").name
            with headrace.patch(credentials=keys(other)):
                assert not wrong(library.PreTrainedModel.from_pretrained("s3://theirs/m").tensors, CONTENTS)
                assert not wrong(library.PreTrainedModel.from_pretrained(path).tensors, CONTENTS)


def test_a_lazy_state_dict_of_a_store_is_read_ahead() -> None:
    many = random_contents(*[64 * KIB] * 60)
    with S3Server({"models": {"m/model.safetensors": serialize(many)}}) as server:
        with headrace.state_dict("s3://models/m", credentials=keys(server)) as weights:
            lazy = weights.lazy()
            assert not wrong({name: each[...] for name, each in lazy.items()}, many)
            assert bytes_of(lazy["t007"][3:5]) == many["t007"].data[3:5]
        assert len(server.requests) < 20


# ---- reading ahead


LAYERS: Contents = {
    f"layers.{i}.{part}": entry
    for i in range(12)
    for part, entry in random_contents(3 * KIB + i, 100, 5 * KIB if i % 3 else 0).items()
}


def ahead(limit_nbytes: int, source: Any = None) -> Ahead:
    checkpoint = headrace.open(source if source is not None else MemorySource(serialize(dict(sorted(LAYERS.items())))))
    return Ahead(checkpoint, limit_nbytes=limit_nbytes)


@given(st.permutations(sorted(LAYERS)), st.sampled_from([0, 1, 9 * KIB, 40 * KIB, MIB]), st.integers(1, 6))
def test_any_order_of_asking_by_any_number_of_threads_gets_every_tensor(
    order: list[str], limit_nbytes: int, threads: int
) -> None:
    reader = ahead(limit_nbytes)
    with ThreadPoolExecutor(threads) as pool:
        taken = dict(zip(order, pool.map(reader.take, order), strict=True))
    assert not wrong(taken, LAYERS)


def test_what_was_taken_is_not_kept() -> None:
    reader = ahead(MIB)
    assert reader.take("layers.0.t000") is not None
    assert reader.take("layers.0.t000") is None


def test_asking_in_natural_order_reads_each_batch_once_and_holds_no_more_than_the_limit() -> None:
    source = WatchedSource(serialize(dict(sorted(LAYERS.items(), key=lambda item: natural_key(item[0])))))
    reader = ahead(32 * KIB, source)
    for name in sorted(LAYERS, key=natural_key):
        assert bytes_of(reader.take(name)) == LAYERS[name].data  # type: ignore[arg-type]
        for thread in threading.enumerate():
            if thread.name == "headrace-ahead":
                thread.join()  # until it has read all that it may
        assert reader._held_nbytes <= 32 * KIB + 2 * 8 * KIB
    assert reader._held_nbytes == 0
    total = sum(len(entry.data) for entry in LAYERS.values())
    assert sum(call.nbytes for call in source.calls[1:]) == total  # the first one was for the header


def test_an_error_reaches_whoever_asks_for_a_tensor_of_that_batch() -> None:
    source = WatchedSource(serialize(LAYERS), [Fault(any_data_read, Raise(SourceError("broken")))])
    reader = ahead(MIB, source)
    for name in ("layers.0.t000", "layers.11.t000"):
        with pytest.raises(SourceError, match="broken"):
            reader.take(name)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.10.b", "a.2.b", "a.b"], ["a.2.b", "a.10.b", "a.b"]),
        (["2", "x", "10"], ["2", "10", "x"]),
        (["a", "a.0", "a.0.w"], ["a", "a.0", "a.0.w"]),
    ],
)
def test_numbers_in_names_sort_as_numbers(names: list[str], expected: list[str]) -> None:
    assert sorted(names, key=natural_key) == expected
