"""docs/errors.md is true: it has every class of error, and every message in it comes out of really going wrong in that way.

A provocation is a function that goes wrong; the page shows, below the heading of the class, what each of them says. Paths are as
somebody would have typed them, since every provocation runs in a folder of its own. What differs from run to run is evened out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import json
import os
import re
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from checkpoints import random_entry, serialize, write
from http_servers import Certificates, ProxyServer, Server, fault, free_port
from hub_server import Hub, Repo
from ranks import prepare_ranks, run_ranks

import headrace
import headrace.errors
import headrace.sources.http
from headrace.cli._exits import endings
from headrace.errors import (
    DestinationError,
    DeviceError,
    DeviceMemoryError,
    FormatError,
    HeadraceError,
    IntegrityError,
    LoadError,
    NoSpaceError,
    OptionError,
    PeerError,
    PinningError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    SourceTimeoutError,
    StreamError,
    TensorNotFoundError,
    TruncatedError,
)
from headrace.integrations.modules import ModuleMismatchError
from headrace.sources import azure, gcs, huggingface, s3
from headrace.sources.http import (
    HttpChangedError,
    HttpError,
    HttpNotFoundError,
    HttpPermissionError,
    HttpTimeoutError,
    HttpTruncatedError,
    ProxyError,
    RedirectError,
    RefusedError,
    ThrottledError,
    TlsError,
    UnavailableError,
    UnknownHostError,
    UnreachableError,
    UnsatisfiableError,
    WrongAnswerError,
    WrongEncodingError,
    WrongRangeError,
)
from headrace.testing.s3server import S3Server

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
STORES = {"s3": s3, "gcs": gcs, "azure": azure, "huggingface": huggingface}
BASES = {HeadraceError, SourceTimeoutError, HttpError}  # raised as one of their kinds only
MODEL = "models/minilm"
SHARD = f"{MODEL}/model.safetensors"
MIB = 1 << 20

pytestmark = pytest.mark.timeout(120)


class Provocation(NamedTuple):
    """One way to go wrong."""

    error: type[HeadraceError]
    go_wrong: Callable[[], object]


PROVOCATIONS: list[Provocation] = []


def provokes(error: type[HeadraceError]) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """The decorated function raises `error`, in a folder that has the model."""

    def register(go_wrong: Callable[[], object]) -> Callable[[], object]:
        PROVOCATIONS.append(Provocation(error, go_wrong))
        return go_wrong

    return register


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a model of 4 MiB, and no settings of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "hf_token", "ssl_cert_file", "requests_ca_bundle"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nobody"))
    Path(MODEL).mkdir(parents=True)
    write(Path(SHARD), contents())
    return tmp_path


def contents() -> dict[str, Any]:
    return {f"layers.{i}.weight": random_entry("BF16", (512, 1024), seed=i) for i in range(4)}


def take_all(url: Any, **arguments: Any) -> None:
    for _ in headrace.stream(url, **arguments):
        pass


# ---- the format


@provokes(FormatError)
def a_file_that_was_cut_short() -> None:
    os.truncate(SHARD, 3 * MIB)
    headrace.open(MODEL)


@provokes(FormatError)
def a_file_of_torch_save() -> None:
    torch.save({"w": torch.zeros(100)}, f"{MODEL}/pytorch_model.bin")
    headrace.open(f"{MODEL}/pytorch_model.bin")


@provokes(FormatError)
def a_pointer_of_git_lfs() -> None:
    Path(SHARD).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4194304\n")
    headrace.open(MODEL)


@provokes(FormatError)
def a_tensor_whose_bytes_do_not_fit_its_shape() -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    Path(SHARD).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    headrace.open(MODEL)


@provokes(FormatError)
def a_name_in_two_files() -> None:
    shutil.copy(SHARD, f"{MODEL}/other.safetensors")
    headrace.open(MODEL)


@provokes(TensorNotFoundError)
def a_name_with_a_typo() -> None:
    headrace.load(MODEL, names="layers.0.wieght")


# ---- where bytes come from


@provokes(SourceNotFoundError)
def a_path_that_is_not_there() -> None:
    headrace.open("models/minilm-v2")


@provokes(SourceNotFoundError)
def a_folder_without_safetensors() -> None:
    os.rename(SHARD, f"{MODEL}/pytorch_model.bin")
    headrace.open(MODEL)


@provokes(SourceNotFoundError)
def an_index_that_names_a_missing_shard() -> None:
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    Path(f"{MODEL}/model.safetensors.index.json").write_text(json.dumps(index))
    headrace.open(MODEL)


@provokes(SourcePermissionError)
def a_file_that_may_not_be_read() -> None:
    with as_somebody_else():
        headrace.open(SHARD)


@contextlib.contextmanager
def as_somebody_else() -> Iterator[None]:
    """Root may read everything, and runs tests too."""
    os.chmod(SHARD, 0)
    before = os.geteuid()
    if before == 0:
        for folder in [Path.cwd(), *Path.cwd().parents[:-2], Path("models"), Path(MODEL)]:
            os.chmod(folder, 0o755)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@provokes(SourceChangedError)
def a_file_that_is_written_to_meanwhile() -> None:
    with headrace.stream(MODEL, memory_limit=0, concurrency=1) as tensors:
        next(tensors)
        with open(SHARD, "r+b") as file:
            file.seek(3 * MIB)
            file.write(b"something else")
        for _ in tensors:
            pass


@provokes(SourceChangedError)
def a_file_that_shrinks_meanwhile() -> None:
    with headrace.stream(MODEL, memory_limit=0, concurrency=1) as tensors:
        next(tensors)
        os.truncate(SHARD, 2 * MIB)
        for _ in tensors:
            pass


@provokes(TruncatedError)
def a_read_past_the_end() -> None:
    source = headrace.folder(MODEL).open("model.safetensors")
    try:
        source.read_into(4 * MIB, memoryview(bytearray(MIB)))
    finally:
        source.close()


@provokes(SourceError)
def a_pipe() -> None:
    os.mkfifo(f"{MODEL}/pipe.safetensors")
    headrace.open(f"{MODEL}/pipe.safetensors")


@provokes(SourceError)
def a_disk_that_fails() -> None:
    with failing_disk():
        take_all(MODEL)


@contextlib.contextmanager
def failing_disk() -> Iterator[None]:
    """What lies in the middle of a file cannot be read."""

    def read(fd: int, buffers: Any, offset: int, *flags: int, _preadv: Any = os.preadv) -> int:
        if offset >= 2 * MIB:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(_preadv(fd, buffers, offset, *flags))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "preadv", read)
        patched.setenv("HEADRACE_DIRECT_IO", "off")
        patched.setenv("HEADRACE_MEMORY_LIMIT", "0")
        patched.setenv("HEADRACE_CONCURRENCY", "1")
        yield


@provokes(IntegrityError)
def bytes_that_are_not_those_of_the_manifest() -> None:
    headrace.verify(MODEL, write=True)
    flip_a_byte_of(SHARD)
    headrace.load(MODEL, verify=True)


@provokes(IntegrityError)
def a_file_that_the_manifest_does_not_have() -> None:
    headrace.verify(MODEL, write=True)
    write(Path(f"{MODEL}/new.safetensors"), {"new": random_entry("F32", (4,))})
    headrace.load(MODEL, verify=True)


def flip_a_byte_of(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(2 * MIB)
        before = file.read(1)[0]
        file.seek(2 * MIB)
        file.write(bytes([before ^ 1]))


# ---- where files go


@provokes(DestinationError)
def a_destination_that_is_a_file() -> None:
    Path("copy").write_bytes(b"")
    headrace.pull(MODEL, "copy")


@provokes(NoSpaceError)
def a_destination_without_room() -> None:
    os.truncate(SHARD, 8 << 40)  # sparse, and more than there is on this disk
    headrace.pull(MODEL, "copy")


# ---- arguments


@provokes(OptionError)
def an_option_with_a_typo() -> None:
    headrace.load(MODEL, memory_limt="1GiB")


@provokes(OptionError)
def a_value_that_cannot_be() -> None:
    headrace.load(MODEL, memory_limit="lots")


@provokes(OptionError)
def a_variable_that_cannot_be() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HEADRACE_DIRECT_IO", "yes")
        headrace.load(MODEL)


@provokes(OptionError)
def a_scheme_with_a_typo() -> None:
    headrace.open("s3:/bucket/minilm")


@provokes(OptionError)
def a_scheme_of_no_store() -> None:
    headrace.open("htps://weights.example/minilm")


@provokes(OptionError)
def nothing_to_verify_against() -> None:
    headrace.load(MODEL, verify=True)


# ---- streams


@provokes(StreamError)
def a_stream_that_is_iterated_twice() -> None:
    stream = headrace.stream(MODEL)
    for _ in stream:
        pass
    for _ in stream:
        pass


@provokes(StreamError)
def a_borrowed_tensor_that_was_kept() -> None:
    list(headrace.stream(MODEL, ownership="borrowed"))


@provokes(StreamError)
def a_held_checkpoint_that_was_closed() -> None:
    with headrace.hold(MODEL) as held:
        pass
    headrace.load(held)


@provokes(LoadError)
def a_load_into_tensors_that_stops_half_way() -> None:
    into = {name: torch.empty(512, 1024, dtype=torch.bfloat16) for name in contents()}
    with failing_disk():
        headrace.load(MODEL, into=into)


@provokes(ModuleMismatchError)
def a_module_that_does_not_fit() -> None:
    headrace.load_into(torch.nn.Linear(1024, 512), MODEL)


# ---- devices


@provokes(DeviceError)
def a_gpu_that_is_not_there() -> None:
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("the page has the message of a build for the CPU")
    headrace.load(MODEL, device="cuda")


@provokes(DeviceMemoryError)
def more_than_the_process_may_have() -> None:
    big = Path("big.safetensors")
    header = json.dumps({"table": {"dtype": "F32", "shape": [1 << 31], "data_offsets": [0, 8 << 30]}}).encode()
    big.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(big, 8 + len(header) + (8 << 30))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))
        headrace.load(big)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@provokes(PinningError)
def page_locked_memory_without_a_gpu() -> None:
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("the page has the message of a build for the CPU")
    headrace.load(MODEL, pin="require")


# ---- ranks


@provokes(PeerError)
def a_rank_that_stops_early() -> None:
    os.mkfifo("models/told")
    raise first_error(stop_early)


@provokes(PeerError)
def ranks_that_want_different_things() -> None:
    raise first_error(load_different_names)


def first_error(function: Callable[[int, Path], None]) -> BaseException:
    """What rank 0 of two is told."""
    outcomes = run_ranks(2, function, Path(MODEL).absolute())
    assert outcomes[0] is not None
    assert outcomes[0].error is not None
    return outcomes[0].error


def stop_early(rank: int, model: Path) -> None:
    try:
        with headrace.stream(model, group=True, memory_limit=0) as tensors:
            for _ in tensors:
                if rank == 1:
                    break
    finally:
        Path(model.parent, "told").open("rb" if rank == 1 else "wb").close()  # rank 1 is alive until rank 0 has been told


def load_different_names(rank: int, model: Path) -> None:
    headrace.load(model, group=True, names=f"layers.{rank}.*")


# ---- networks


@contextlib.contextmanager
def web_server(*faults: Any, **options: Any) -> Iterator[str]:
    """The url of the model's file on a server that fails as it is told."""
    with Server(serialize(contents()), faults, **options) as server:
        yield server.url


@provokes(HttpNotFoundError)
def a_url_that_is_not_there() -> None:
    with web_server() as url:
        headrace.open(url.replace("model.", "modle."))


@provokes(HttpPermissionError)
def a_url_that_is_forbidden() -> None:
    with web_server(fault("status", code=403, body=b"")) as url:
        headrace.open(url)


@provokes(RefusedError)
def a_port_on_which_nothing_listens() -> None:
    headrace.open(f"http://127.0.0.1:{free_port()}/model.safetensors")


@provokes(UnknownHostError)
def a_host_that_does_not_exist() -> None:
    headrace.open("https://weights.invalid/model.safetensors")


@provokes(UnreachableError)
def connections_that_break() -> None:
    with web_server(fault("reset", after=0, min_start=1)) as url:
        take_all(url, names="layers.3.*", attempts=2)


@provokes(TlsError)
def a_certificate_that_nobody_trusts() -> None:
    certificates = Certificates.make(Path.cwd())
    with web_server(tls=certificates.server_side()) as url:
        headrace.open(url)


@provokes(ProxyError)
def a_proxy_that_wants_a_password() -> None:
    with web_server() as url, ProxyServer(login="Basic secret") as proxy, pytest.MonkeyPatch.context() as patched:
        patched.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        headrace.open(url)


@provokes(HttpTimeoutError)
def a_server_that_falls_silent() -> None:
    with web_server(fault("stall", after=0, min_start=1)) as url:
        take_all(url, names="layers.3.*", attempts=2, stall_timeout_s=0.2)


@provokes(HttpTimeoutError)
def a_deadline_that_passes() -> None:
    with web_server(fault("stall", after=0, min_start=1)) as url:
        take_all(url, names="layers.3.*", deadline_s=0.3)


@provokes(HttpChangedError)
def an_object_that_is_replaced_meanwhile() -> None:
    with web_server(fault("replaced", min_start=1)) as url:
        take_all(url, names="layers.3.*")


@provokes(HttpTruncatedError)
def answers_that_end_too_early() -> None:
    with web_server(fault("short", after=0, min_start=1)) as url:
        take_all(url, names="layers.3.*", attempts=2)


@provokes(ThrottledError)
def a_store_that_asks_for_fewer_requests() -> None:
    with web_server(fault("status", code=429, body=b"")) as url:
        headrace.open(url, attempts=2)


@provokes(UnavailableError)
def a_store_that_fails() -> None:
    with web_server(fault("status", code=500, body=b"")) as url:
        headrace.open(url, attempts=2)


@provokes(WrongAnswerError)
def a_port_that_does_not_speak_http() -> None:
    with web_server(fault("garbage")) as url:
        headrace.open(url)


@provokes(WrongRangeError)
def a_server_that_ignores_ranges() -> None:
    with web_server(fault("ignore_range", min_start=1)) as url:
        take_all(url, names="layers.3.*")


@provokes(UnsatisfiableError)
def a_server_that_says_the_range_is_outside() -> None:
    with web_server(fault("status", code=416, body=b"", min_start=1)) as url:
        take_all(url, names="layers.3.*")


@provokes(WrongEncodingError)
def a_server_that_compresses() -> None:
    with web_server(fault("gzip")) as url:
        headrace.open(url)


@provokes(RedirectError)
def a_server_that_sends_us_in_a_circle() -> None:
    with web_server() as url, web_server(fault("redirect", to="/model.safetensors")) as circle:
        del url
        headrace.open(circle)


# ---- stores


@contextlib.contextmanager
def s3_server() -> Iterator[s3.S3Credentials]:
    """Who may read s3://models/minilm."""
    with S3Server({"models": {"minilm/model.safetensors": serialize(contents())}}) as server:
        yield s3.S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)


@provokes(s3.BucketNotFoundError)
def a_bucket_with_a_typo() -> None:
    with s3_server() as credentials:
        headrace.open("s3://modles/minilm", credentials=credentials)


@provokes(s3.ObjectNotFoundError)
def a_key_with_a_typo() -> None:
    with s3_server() as credentials:
        headrace.open("s3://models/minlim", credentials=credentials)


@provokes(s3.CredentialsError)
def a_wrong_secret() -> None:
    with s3_server() as credentials:
        headrace.open("s3://models/minilm", credentials=dataclasses.replace(credentials, secret_access_key="?"))


@provokes(huggingface.RepoNotFoundError)
def a_repository_with_a_typo() -> None:
    with hub():
        headrace.open("hf://org/modle")


@provokes(huggingface.RevisionNotFoundError)
def a_revision_that_is_not_there() -> None:
    with hub():
        headrace.open("hf://org/model@v2")


@provokes(huggingface.EntryNotFoundError)
def a_file_that_the_repository_does_not_have() -> None:
    with hub():
        headrace.open("hf://org/model/other.safetensors")


@provokes(huggingface.GatedRepoError)
def a_gated_repository() -> None:
    with hub(access="gated"):
        headrace.open("hf://org/model")


@contextlib.contextmanager
def hub(**options: Any) -> Iterator[None]:
    """A hub with one repository, as whoever has no token sees it."""
    repo = Repo({"model.safetensors": serialize(contents())}, **options)
    with Hub({"org/model": repo}) as server, pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_ENDPOINT", server.endpoint)
        yield


# ---- what the page says


class Shown(NamedTuple):
    """The part of the page about one class."""

    text: str
    messages: list[str]
    fields: set[str]
    exit_code: int


def parse(page: str) -> dict[str, Shown]:
    """Parts of the page by the class in the heading; messages are those of its text blocks, each of a paragraph."""
    found = {}
    for part in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = re.split(r"^## ", part, flags=re.MULTILINE)[0].partition("\n")
        blocks = re.findall(r"^```text\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        messages = [" ".join(message.split()) for block in blocks for message in block.split("\n\n")]
        listed = re.search(r"Fields: (.*?) The\s+command", text, flags=re.DOTALL)
        fields = re.findall(r"`\.(\w+)`", listed[1]) if listed else []
        (code,) = re.findall(r"exit\s+code\s+(\d+)", text)
        found[heading.strip("` ")] = Shown(text, messages, set(fields), int(code))
    return found


SHOWN = parse(PAGE.read_text())


def name_of(error: type) -> str:
    """The class as headings and tables call it: that of a store with the store's module."""
    store = next((name for name, module in STORES.items() if error.__module__.startswith(module.__name__)), None)
    return f"{store}.{error.__name__}" if store else error.__name__


def errors_in(module: Any) -> list[type[HeadraceError]]:
    """Classes of errors that users can import from a module, its own."""
    found = [each for name, each in vars(module).items() if not name.startswith("_") and isinstance(each, type)]
    below = [each for each in found if issubclass(each, HeadraceError)]
    return [each for each in below if each.__module__.startswith(module.__name__)]


ERRORS = [*errors_in(headrace.errors), ModuleMismatchError, *errors_in(headrace.sources.http)]
STORE_ERRORS = [error for module in STORES.values() for error in errors_in(module)]


def evened_out(message: str, here: Path) -> str:
    """Without what differs from run to run: ports, times, free bytes, ids, and where the tests run."""
    for pattern, instead in (
        (re.escape(f"{here}/"), ""),
        (r"127\.0\.0\.1:\d+", "127.0.0.1:9000"),
        (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "2026-11-29T12:00:00.000000Z"),
        (r"[\d,]+ are free", "123,456,789,012 are free"),
        (r"request id [0-9A-F]{16}", "request id 0123456789ABCDEF"),
        (r"torch \d[\w.+]*", "torch 2.13.0+cpu"),
        (r"Name or service not known|Temporary failure in name resolution", "Name or service not known"),
    ):
        message = re.sub(pattern, instead, message)
    return " ".join(message.split())


@pytest.fixture(scope="module")
def _ranks() -> None:
    prepare_ranks()


def cases(*, ranks: bool) -> list[Any]:
    """(provocation, the message that the page shows for it): those of a class in the order of this file."""
    found = []
    for error in dict.fromkeys(each.error for each in PROVOCATIONS if (each.error is PeerError) == ranks):
        shown = iter(SHOWN[name_of(error)].messages)
        same = [each for each in PROVOCATIONS if each.error is error]
        found += [pytest.param(each, next(shown, ""), id=each.go_wrong.__name__) for each in same]
    return found


@pytest.mark.parametrize(("provocation", "shown"), cases(ranks=False))
def test_a_message_of_the_page_is_what_going_wrong_says(provocation: Provocation, shown: str, here: Path) -> None:
    check(provocation, shown, here)


@pytest.mark.slow
@pytest.mark.usefixtures("_ranks")
@pytest.mark.parametrize(("provocation", "shown"), cases(ranks=True))
def test_a_message_of_the_page_is_what_ranks_are_told(provocation: Provocation, shown: str, here: Path) -> None:
    check(provocation, shown, here)


def check(provocation: Provocation, shown: str, here: Path) -> None:
    """Go wrong, and compare class, message and fields with the page."""
    with pytest.raises(HeadraceError) as caught:
        provocation.go_wrong()
    assert type(caught.value) is provocation.error
    assert evened_out(str(caught.value), here) == shown
    fields = {name for each in type(caught.value).__mro__ for name in fields_of(each)}
    assert {name for name in fields if not hasattr(caught.value, name)} == set()
    assert ending_of(caught.value) == SHOWN[name_of(provocation.error)].exit_code


def ending_of(error: HeadraceError) -> int:
    """The exit code of a command that ends with this error."""
    with pytest.raises(typer.Exit) as ended, endings(debug=False):
        raise error
    code: int = ended.value.exit_code
    return code


def test_the_command_line_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending_of(FormatError("went wrong")) == SHOWN["HeadraceError"].exit_code
    assert capsys.readouterr().err == "headrace: error: went wrong\n"


def test_every_message_of_the_page_is_provoked() -> None:
    provoked = {name_of(error): sum(each.error is error for each in PROVOCATIONS) for error in {*ERRORS, *STORE_ERRORS}}
    assert {name: len(shown.messages) for name, shown in SHOWN.items()} == {name: provoked[name] for name in SHOWN}


def test_every_class_has_an_entry_and_every_entry_a_class() -> None:
    entries = {name_of(error) for error in ERRORS}
    stores = {name_of(error) for error in STORE_ERRORS}
    assert entries <= SHOWN.keys() <= entries | stores
    assert stores == set(re.findall(r"`((?:s3|gcs|azure|huggingface)\.\w+Error)`", PAGE.read_text()))


def test_every_class_that_is_raised_itself_has_a_message() -> None:
    assert {name_of(error) for error in BASES} == {name for name, shown in SHOWN.items() if not shown.messages}


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
def test_an_entry_names_the_fields_that_the_class_adds_and_its_builtin(error: type[HeadraceError]) -> None:
    shown = SHOWN[name_of(error)]
    assert shown.fields == fields_of(error)
    assert f"A kind of {', '.join(f'`{each.__name__}`' for each in error.__bases__)}." in shown.text


def fields_of(error: type) -> set[str]:
    """The fields that a class adds to those of its bases, from its docstring."""
    # Clean, since compilers of Python 3.13 and newer take the margin off and older ones leave it.
    _, _, attributes = inspect.cleandoc(error.__doc__ or "").partition("Attributes:\n")
    entries = [line.strip() for line in attributes.splitlines() if re.match(r" {4}\w.*: ", line)]
    return {name for entry in entries for name in entry.partition(": ")[0].split(", ")}
