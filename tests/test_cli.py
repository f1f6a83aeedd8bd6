"""The command line as people and programs meet it: what is printed where, how it ends, and what it must not import."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli import app
from headrace.cli._exits import _Warnings, endings
from headrace.cli._words import spoken

HEADRACE = Path(sys.executable).with_name("headrace")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|38;[0-9;]+|9[0-7])m")
NASTY = {
    "line\nheadrace: error: forged": r"line\nheadrace: error: forged",
    "\x1b[31mred\x1b[2J": r"\x1b[31mred\x1b[2J",
    "\x9b31m C1, \x07 bell, \r return": r"\x9b31m C1, \x07 bell, \r return",
    "turned \u202ethgir": r"turned \u202ethgir",
    "[bold]markup[/bold] [/] :smile:": "[bold]markup[/bold] [/] :smile:",
    "breit 重み ü": "breit 重み ü",
}


def write_checkpoint(path: Path, tensors: Mapping[str, Sequence[int]], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file of F32 tensors, sparse: all zeros, whatever their size."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, shape in tensors.items():
        start, nbytes = end, 4
        for size in shape:
            nbytes *= size
        end = start + nbytes
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of two shards: 12 layers of two tensors and an embedding."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = {f"layers.{i}.{kind}": shape for i in range(12) for kind, shape in (("weight", (64, 32)), ("bias", (64,)))}
    write_checkpoint(folder / "model-00001-of-00002.safetensors", {"embedding": (1000, 32)}, {"format": "pt"})
    write_checkpoint(folder / "model-00002-of-00002.safetensors", names)
    return folder


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "many.safetensors", {f"experts.{i // 100}.w{i % 100}.weight": (2,) for i in range(60_000)})


def run(*arguments: str | Path) -> Any:
    """In this process."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def start(*arguments: str | Path, **settings: Any) -> subprocess.Popen[str]:
    """In a process of its own."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
    return subprocess.Popen([str(HEADRACE), *map(str, arguments)], **settings)


def only_line(text: str) -> str:
    """The one line that was printed."""
    assert text.count("\n") == 1, text
    assert text.endswith("\n")
    return text[:-1]


# -- inspect -------------------------------------------------------------------------------------------------------------------


def test_inspect_in_a_pipe_lists_every_tensor_with_its_file(model: Path) -> None:
    result = run("inspect", model)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == str(model)
    assert lines[1].split(None, 1) == ["total", "25 tensors, 224 KiB in 2 files"]
    assert "metadata  format=pt" in lines
    assert sum(line.startswith("layers.") for line in lines) == 24
    (line,) = (line for line in lines if line.startswith("layers.7.weight "))
    assert line.split() == ["layers.7.weight", "F32", "[64,", "32]", "8", "KiB", "model-00002-of-00002.safetensors"]


def test_inspect_json_is_complete(model: Path) -> None:
    content = json.loads(run("inspect", model, "--json").stdout)
    with headrace.open(model) as checkpoint:
        assert [entry["name"] for entry in content["tensors"]] == list(checkpoint)
        assert content["tensors"][0] == {
            "name": "embedding",
            "dtype": "F32",
            "shape": [1000, 32],
            "nbytes": 128_000,
            "shard": checkpoint.shards[0],
            "offset": checkpoint["embedding"].offset,
        }
        assert content["total"] == {"tensors": 25, "nbytes": checkpoint.nbytes, "shards": 2}
        assert content["dtypes"] == {"F32": {"tensors": 25, "nbytes": checkpoint.nbytes}}
        assert [shard["url"] for shard in content["shards"]] == list(checkpoint.shards)
    assert content["metadata"] == {"format": "pt"}
    assert content["names"] is None
    assert all(shard["file_nbytes"] == Path(shard["url"]).stat().st_size for shard in content["shards"])


def test_inspect_names_counts_only_what_fits(model: Path) -> None:
    content = json.loads(run("inspect", model, "--json", "--names", "*.bias", "--names", "layers.3.weight").stdout)
    assert content["total"] == {"tensors": 13, "nbytes": 12 * 256 + 8192, "shards": 1}
    assert content["names"] == ["*.bias", "layers.3.weight"]
    assert "13 tensors, 11 KiB, of 25 tensors" in run("inspect", model, "--names", "*.bias", "--names", "layers.3.weight").stdout


def test_inspect_of_a_list_of_files_is_one_checkpoint(model: Path) -> None:
    assert json.loads(run("inspect", *sorted(model.iterdir()), "--json").stdout)["total"]["tensors"] == 25


def test_inspect_of_an_empty_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "empty.safetensors", {})
    assert "0 tensors, 0 B in 1 file" in run("inspect", path).stdout
    assert json.loads(run("inspect", path, "--json").stdout)["tensors"] == []


@pytest.mark.slow
def test_inspect_of_60_000_tensors_takes_seconds(many: Path) -> None:
    for arguments, lines in (((), 60_000), (("--json",), 60_000)):
        began = time.monotonic()
        process = start("inspect", many, *arguments)
        out, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < 20
        assert out.count("experts.") == lines


# -- plan ----------------------------------------------------------------------------------------------------------------------


def test_plan_prints_the_explanation(model: Path) -> None:
    result = run("plan", model)
    assert result.exit_code == 0
    assert result.stdout.split() == str(headrace.plan(model)).split()


def test_plan_lists_the_first_reads(model: Path) -> None:
    lines = run("plan", model, "--reads", "1").stdout.splitlines()
    assert re.match(r" *1  model-00001-of-00002\.safetensors +\d+ +125 KiB +embedding$", lines[-2])
    assert lines[-1] == "... and 1 more read"


def test_plan_json_is_the_plan(model: Path) -> None:
    plan = headrace.plan(model, dtype="bfloat16", names="layers.1*", memory_limit="64MiB", concurrency=3)
    arguments = ("--dtype", "bfloat16", "--names", "layers.1*", "--memory-limit", "64MiB", "--concurrency", "3", "--json")
    content = json.loads(run("plan", model, *arguments).stdout)
    assert [entry["name"] for entry in content["tensors"]] == plan.tensors.names
    assert {entry["dtype"] for entry in content["tensors"]} == {"BF16"}
    assert [(read["shard"], read["offset"], read["nbytes"]) for read in content["reads"]] == [
        (read.shard, read.offset, read.nbytes) for read in plan.reads
    ]
    assert content["read_nbytes"] == plan.read_nbytes
    assert (content["concurrency"], content["memory_limit"]) == (3, 64 << 20)
    assert [route["route"] for route in content["routes"]] == ["none", plan.routes[1].route]


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ("embedding=0:128, :", [128, 32]),
        ("embedding=[:, 4]", [1000]),
        ("embedding=..., ::-2", [1000, 16]),
        ("embedding=-1", [32]),
    ],
)
def test_slice_is_written_as_in_numpy(model: Path, given: str, shape: list[int]) -> None:
    content = json.loads(run("plan", model, "--names", "embedding", "--slice", given, "--json").stdout)
    assert content["tensors"][0]["shape"] == shape


def test_dtypes_by_glob_win_over_the_one_for_all(model: Path) -> None:
    content = json.loads(run("plan", model, "--dtype", "bf16", "--dtype", "*.bias=F64", "--json").stdout)
    assert {(entry["name"].split(".")[-1], entry["dtype"]) for entry in content["tensors"]} == {
        ("embedding", "BF16"),
        ("weight", "BF16"),
        ("bias", "F64"),
    }


# -- load ----------------------------------------------------------------------------------------------------------------------


def test_load_says_when_it_starts_and_ends_and_sums_up(model: Path) -> None:
    result = run("load", model)
    assert result.exit_code == 0
    first, last = result.stderr.splitlines()
    assert first == "headrace: loading 25 tensors, 224 KiB to read"
    assert re.fullmatch(r"headrace: loaded 25 tensors in [\d.]+ s", last)
    labels = [line.split()[0] for line in result.stdout.splitlines()]
    assert labels[:5] == ["tensors", "read", "time", "waited", "memory"]
    assert "route" in labels
    assert "\x1b" not in result.stdout + result.stderr


def test_load_json_is_the_statistics_and_nothing_else(model: Path) -> None:
    result = run("load", model, "--json", "--names", "layers.*", "--dtype", "F16", "--order", "file", "--ownership", "copied")
    stats = json.loads(result.stdout)
    assert stats.keys() == headrace.Snapshot().as_dict().keys()
    assert (stats["tensors"], stats["total_tensors"]) == (24, 24)
    assert stats["cast_nbytes"] == stats["read_nbytes"] == 12 * (8192 + 256)
    assert stats["tensor_nbytes"] == stats["read_nbytes"] // 2
    assert result.stderr == ""


def test_load_names_what_a_blanket_dtype_left_alone(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "q.safetensors", {"a.weight": (4,), "a.weight_scale": (4,)})
    (line,) = (line for line in run("load", path, "--dtype", "F16").stdout.splitlines() if line.startswith("kept"))
    assert "1 tensor left in" in line
    assert "a.weight_scale" in line


def test_load_of_an_empty_checkpoint(tmp_path: Path) -> None:
    assert run("load", write_checkpoint(tmp_path / "empty.safetensors", {})).exit_code == 0


# -- how it ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (headrace.HeadraceError("went wrong"), 1),
        (headrace.FormatError("went wrong"), 1),
        (headrace.SourceError("went wrong"), 1),
        (headrace.SourceNotFoundError("went wrong"), 1),
        (headrace.SourcePermissionError("went wrong"), 1),
        (headrace.SourceTimeoutError("went wrong"), 1),
        (headrace.SourceChangedError("went wrong"), 1),
        (headrace.TruncatedError("went wrong"), 1),
        (headrace.IntegrityError("went wrong"), 1),
        (headrace.DestinationError("went wrong", url="a"), 1),
        (headrace.NoSpaceError("went wrong", url="a"), 1),
        (headrace.DeviceError("went wrong"), 1),
        (headrace.DeviceMemoryError("went wrong"), 1),
        (headrace.PinningError("went wrong"), 1),
        (headrace.TensorNotFoundError("went wrong", name="a"), 1),
        (headrace.StreamError("went wrong"), 1),
        (headrace.PeerError("went wrong"), 1),
        (headrace.LoadError("went wrong"), 1),
        (headrace.ModuleMismatchError("went wrong"), 1),
        (headrace.OptionError("went wrong", option="a"), 2),
        (OSError(28, "went wrong"), 1),
        (MemoryError("went wrong"), 1),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1),
        (RuntimeError("went wrong"), 70),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_is_one_line_and_a_code(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(headrace, "open", fail)
    monkeypatch.setattr("headrace.cli._exits._discard_stdout", lambda: None)
    result = run("inspect", "x")
    assert result.exit_code == code
    assert result.stdout == ""
    line = only_line(result.stderr)
    expected = {70: "headrace: internal error: RuntimeError: went wrong; ", 130: "headrace: interrupted"}
    assert line.startswith(expected.get(code, "headrace: error: "))


def test_every_error_class_is_tested_above() -> None:
    (mark,) = test_error_is_one_line_and_a_code.pytestmark
    classes = {type(error) for error, _ in mark.args[1]}
    public = (getattr(headrace, name) for name in headrace.__all__)
    assert {each for each in public if isinstance(each, type) and issubclass(each, headrace.HeadraceError)} <= classes


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["inspect", "nowhere"], 1, "nowhere"),
        (["inspect", "MODEL", "--names", "layer.0.bias"], 1, "did you mean 'layers.0.bias'"),
        (["plan", "MODEL", "--slice", "embedding=1:x"], 2, "write it as in numpy"),
        (["plan", "MODEL", "--slice", "embedding"], 2, "NAME=INDEX"),
        (["plan", "MODEL", "--slice", "embedding=0, 1:, ..., ::2"], 2, "--slice [0, 1:, ..., ::2] does not fit"),
        (["plan", "MODEL", "--dtype", "float17"], 2, "float17"),
        (["plan", "MODEL", "--dtype", "F16", "--dtype", "BF16"], 2, "two dtypes"),
        (["load", "MODEL", "--memory-limit", "lots"], 2, "--memory-limit is -1, 0 or a number of bytes"),
        (["load", "MODEL", "--concurrency", "0"], 2, "error: --concurrency is a whole number from 1 on"),
        (["load", "MODEL", "--direct-io", "maybe"], 2, "--direct-io is one of 'auto', 'on', 'off'"),
        (["load", "MODEL", "--order", "any"], 2, "--order is one of 'ready', 'file'"),
        (["load", "MODEL", "--ownership", "none"], 2, "'leased'"),
        (["load", "MODEL", "--verify", "require"], 2, "give one with --verify PATH, or take --verify auto, which"),
        (["load", "MODEL", "--gds", "require"], 2, "--gds require reads into a device's memory"),
        (["load", "gopher://host/model"], 2, "gopher://"),
        (["verify", "MODEL"], 2, "or give one with --manifest PATH"),
        (["verify", "MODEL", "--write", "--manifest", "m.json"], 2, "--write makes a manifest, so --manifest cannot be given;"),
        (["verify", "MODEL/model-00001-of-00002.safetensors", "--write"], 2, "verify the folder, or give --out PATH"),
    ],
)
def test_mistakes_are_explained(model: Path, arguments: list[str], code: int, part: str) -> None:
    result = run(*(argument.replace("MODEL", str(model)) for argument in arguments))
    assert result.exit_code == code
    assert result.stdout == ""
    assert part in only_line(result.stderr)


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("verify='auto' checks what it can", "--verify auto checks what it can"),
        ("give one with verify=PATH, or leave verify= out", "give one with --verify PATH, or leave --verify out"),
        ("(write=True does)", "(--write does)"),
        ("pin='require': no memory; memory_limit=0 needs less", "HEADRACE_PIN=require: no memory; --memory-limit 0 needs less"),
        ("rename= changes names", "rename= changes names"),
        ("environment variable HEADRACE_GDS='x'", "environment variable HEADRACE_GDS='x'"),
        ("https://host/m?verify='auto': gone", "https://host/m?verify='auto': gone"),
    ],
)
def test_messages_call_arguments_what_is_typed(message: str, typed: str) -> None:
    flags = {"verify": "--verify", "write": "--write", "memory_limit": "--memory-limit"}
    assert spoken(message, flags) == typed


def test_warnings_call_arguments_what_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    logger, handler = logging.getLogger("headrace"), _Warnings()
    logger.addHandler(handler)
    try:
        with endings(debug=False, flags={"gds": "--gds"}):
            logger.warning("gds='auto': files go through host memory instead")
    finally:
        logger.removeHandler(handler)
    assert capsys.readouterr().err == "headrace: warning: --gds auto: files go through host memory instead\n"


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["inspect", "x", "--nonsense"], ["nonsense"], ["load", "x", "--concurrency", "a"]]
)
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert result.stdout == ""


def test_broken_file_is_named_with_its_rule(tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    path.write_text("<!DOCTYPE html><html>not found</html>")
    result = run("inspect", path)
    assert result.exit_code == 1
    assert str(path) in only_line(result.stderr)


@pytest.mark.parametrize("arguments", [["--debug", "inspect", "nowhere"], ["inspect", "nowhere", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("headrace: error: ")


def test_debug_after_two_dashes_is_a_path() -> None:
    assert "--debug" in only_line(run("inspect", "--", "--debug").stderr)


def test_version() -> None:
    assert run("--version").stdout == f"headrace {headrace.__version__}\n"


def test_help_names_every_command_and_exit_code() -> None:
    text = run("--help").stdout
    for part in ("inspect", "plan", "load", "--debug", "--version", "130"):
        assert part in text


@pytest.mark.slow
def test_reader_that_leaves_ends_it_quietly(many: Path) -> None:
    for arguments in (("inspect", many), ("inspect", many, "--json"), ("plan", many, "--json")):
        with start(*arguments) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(60) == 141
            assert process.stderr.read() == ""


def test_full_disk_is_an_error(model: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full, start("inspect", model, stdout=full) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cannot write the output: No space left" in only_line(err)


@pytest.mark.parametrize("closed", ["stdout", pytest.param("stderr", marks=pytest.mark.slow)])
def test_closed_stream_is_no_error(model: Path, closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {1 if closed == "stdout" else 2}>&-', "sh", HEADRACE, "plan", model]
    assert subprocess.run([*map(str, command)], capture_output=True, timeout=60, check=False).returncode == 0


BUSY_S = 10.0  # for what takes 2 s at most where others leave a CPU


@pytest.mark.slow
def test_interrupt_ends_a_load_soon(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "huge.safetensors", {str(i): (16 << 20,) for i in range(4096)})  # 256 GiB of nothing
    with start("load", path) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("headrace: loading 4,096 tensors")
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(60) == 130
        assert time.monotonic() - began < BUSY_S
        assert process.stderr.read() == "headrace: interrupted\n"


STUCK = """
import sys, threading
from headrace.cli import _exits
from headrace.cli._exits import exit_on_interrupt
_exits._LAST_S *= float(sys.argv[1])
with exit_on_interrupt():
    try:
        print("ready", flush=True)
        threading.Event().wait()
    finally:
        threading.Event().wait()  # a reader that does not come back
"""


@pytest.mark.slow
@pytest.mark.parametrize(("presses", "patience"), [(1, 1), (2, 100)])
def test_interrupt_ends_what_is_stuck(presses: int, patience: int) -> None:
    """Once, soon; twice, at once."""
    command = [sys.executable, "-c", STUCK, str(patience)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        if presses == 2:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert time.monotonic() - began < BUSY_S


# -- names ---------------------------------------------------------------------------------------------------------------------


def test_names_cannot_move_the_cursor_or_forge_lines(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[2Jfolder\n"
    folder.mkdir()
    path = write_checkpoint(folder / "a.safetensors", dict.fromkeys(NASTY, (1,)), {"\x1b]0;title\x07": "\x1b[5m"})
    for arguments in (
        ["inspect"],
        ["plan", "--reads", "9"],
        ["load"],
        ["load", "--dtype", "F16"],
        ["inspect", "--names", "\x1b[31m*"],
    ):
        result = run(arguments[0], path, *arguments[1:])
        assert result.exit_code == 0, result.stderr
        for text in (result.stdout, result.stderr):
            assert all(line.isprintable() for line in text.split("\n")), text
            assert not any(line.startswith("headrace: error") for line in text.splitlines())
    lines = run("inspect", path).stdout.splitlines()
    for shown in NASTY.values():
        assert sum(line.startswith(shown + " ") for line in lines) == 1, shown


def test_names_in_errors_are_one_line(tmp_path: Path) -> None:
    assert only_line(run("inspect", tmp_path / "no\nfile\x1b[2J").stderr).isprintable()


def test_json_keeps_names_as_they_are(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", dict.fromkeys(NASTY, (1,)))
    for command in ("inspect", "plan"):
        text = run(command, path, "--json").stdout
        assert text.isascii()
        assert {entry["name"] for entry in json.loads(text)["tensors"]} == NASTY.keys()


def test_output_that_cannot_hold_a_name_gets_an_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    path = write_checkpoint(tmp_path / "a.safetensors", {"重み": (1,)})
    with start("inspect", path) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "\\u91cd\\u307f" in out


# -- on a terminal -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """What a terminal was sent, and without escapes."""

    raw: str
    code: int

    @property
    def lines(self) -> list[str]:
        """As left on the screen: what a carriage return went back over is gone."""
        return [line.rsplit("\r", 1)[-1].rstrip() for line in ESCAPE.sub("", self.raw).replace("\r\n", "\n").split("\n")]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a terminal of that many columns."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, "")  # readline sets them behind the interpreter's back, where delenv does not reach

    def show(*arguments: str | Path, columns: int = 80) -> Shown:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        with start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            sent = b""
            while part := _read(ours):
                sent += part
        os.close(ours)
        return Shown(sent.decode(), process.returncode)

    return show


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # EIO: the other side is closed
        return b""


def test_inspect_on_a_terminal_groups_many_tensors(terminal: Any, tmp_path: Path) -> None:
    shapes = {f"experts.{i // 10}.w{i % 10}.weight": (2,) for i in range(1000)}
    shown = terminal("inspect", write_checkpoint(tmp_path / "many.safetensors", shapes))
    assert shown.code == 0
    assert len(shown.lines) < 80
    assert "experts.*.w0.weight" in "\n".join(shown.lines)
    assert "--all lists each" in " ".join(shown.lines)


@pytest.mark.parametrize("columns", [40, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (80, 140))])
def test_inspect_on_a_terminal_fits_and_loses_nothing(terminal: Any, tmp_path: Path, columns: int) -> None:
    name = "model.language_model.layers.0.block_sparse_moe.experts.0.down_proj.weight_scale_inv"
    path = write_checkpoint(tmp_path / "a.safetensors", {name: (128, 128), **dict.fromkeys(filter(str.isascii, NASTY), (1,))})
    shown = terminal("inspect", path, "--all", columns=columns)
    table = shown.lines[next(i for i, line in enumerate(shown.lines) if line.startswith("tensor ")) :]
    assert max(map(len, table)) <= max(columns, 60)
    if columns == 140:
        assert any(line.startswith(name + " ") for line in shown.lines)
    folded = "".join(line.split("  F32")[0].strip() for line in shown.lines)
    assert name in folded.replace(" ", "")


@pytest.mark.slow
def test_bar_only_on_a_terminal(terminal: Any, model: Path) -> None:
    shown = terminal("load", model)
    assert shown.code == 0
    assert COLOUR.search(shown.raw)
    assert any(re.match(r"loading ━+ 224\.0/224\.0 KiB [\d.]+ [MG]B/s 00:00 slowest: \w+$", line) for line in shown.lines), (
        shown.lines
    )
    assert shown.raw.rstrip().endswith(")")  # the summary comes last
    assert "\x1b[?25h" in shown.raw, "the cursor is shown again"
    with start("load", model) as process:
        out, err = process.communicate(timeout=60)
    assert "\x1b" not in out + err
    assert "━" not in out + err


@pytest.mark.slow
def test_failed_load_on_a_terminal_leaves_no_bar(terminal: Any, tmp_path: Path) -> None:
    shown = terminal("load", tmp_path / "nowhere")
    assert shown.code == 1
    assert "━" not in shown.raw
    assert shown.lines[-2].startswith("headrace: error: ")


@pytest.mark.slow
def test_no_color_is_obeyed(terminal: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for command in ("inspect", "plan", "load"):
        assert not COLOUR.search(terminal(command, model).raw)


# -- what it costs to start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        pytest.param(["--version"], {"torch", "numpy", "rich"}, marks=pytest.mark.slow),
        (["--help"], {"torch", "numpy", "rich"}),
        pytest.param(["inspect", "MODEL"], {"torch", "numpy"}, marks=pytest.mark.slow),
        pytest.param(["inspect", "MODEL", "--json"], {"torch", "numpy", "rich"}, marks=pytest.mark.slow),
        (["plan", "MODEL", "--dtype", "F16"], {"torch", "numpy"}),
    ],
)
def test_command_imports_only_what_it_needs(model: Path, arguments: list[str], absent: set[str]) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); from headrace.cli import main; main()"
    )
    given = [str(model) if argument == "MODEL" else argument for argument in arguments]
    result = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, timeout=60, check=True)
    assert absent.isdisjoint(result.stderr.split())


def test_warnings_are_lines(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_checkpoint(folder / "a.safetensors", {"a": (1,), "b": (1,)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with start("inspect", folder) as process:
        _, err = process.communicate(timeout=60)
    assert only_line(err).startswith("headrace: warning: ")
