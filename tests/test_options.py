"""Options: who wins, what each is called in the environment, and how a bad value is reported."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any, get_type_hints  # noqa: TID251 - of classes, which have no defaults

import pytest
from checkpoints import random_contents, write

import headrace
from headrace._arguments import LoadArguments
from headrace._options import OptionArguments, Options, parse_nbytes, resolve
from headrace.errors import OptionError

FIELDS = [field.name for field in fields(Options)]
GOOD: dict[str, tuple[str, Any]] = {  # {field: (text in the environment, value)}
    "concurrency": ("12", 12),
    "memory_limit": ("256MiB", 256 << 20),
    "pin": ("require", "require"),
    "direct_io": ("off", "off"),
    "mmap": ("auto", "auto"),
    "in_place": ("off", "off"),
    "gds": ("off", "off"),
    "cast_at": ("host", "host"),
    "keep_staging": ("on", "on"),
    "partition": ("files", "files"),
    "stall_timeout_s": ("2.5", 2.5),
    "attempts": ("3", 3),
    "deadline_s": ("600", 600.0),
    "peer_timeout_s": ("30", 30.0),
    "local_ranks": ("8", 8),
    "network_chunk_nbytes": ("4MiB", 4 << 20),
    "memory_limits": ("cpu=1MiB, shared-cpu=-1", {"cpu": 1 << 20, "shared-cpu": -1}),
}
RUNAI = {
    "concurrency": ("RUNAI_STREAMER_CONCURRENCY", "7", 7),
    "memory_limit": ("RUNAI_STREAMER_MEMORY_LIMIT", "-1", -1),
    "pin": ("RUNAI_STREAMER_PIN_MEMORY", "1", "auto"),
    "partition": ("RUNAI_STREAMER_PARTITION_POLICY", "chunks", "chunks"),
    "stall_timeout_s": ("RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS", "2250", 2.25),
    "attempts": ("RUNAI_STREAMER_S3_MAX_RETRIES", "4", 5),
    "network_chunk_nbytes": ("RUNAI_STREAMER_CHUNK_BYTESIZE", "16777216", 16 << 20),
    "local_ranks": ("RUNAI_STREAMER_PROCESS_GROUP_SIZE", "2", 2),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):  # noqa: TID251  # what the developer has set must not decide a test
        if name.startswith(("HEADRACE_", "RUNAI_STREAMER_")):
            monkeypatch.delenv(name)


# ---- who wins


@pytest.mark.parametrize(
    ("argument", "option", "own", "runai", "expected"),
    [
        (1, 2, "3", "4", 1),
        (None, 2, "3", "4", 2),
        (None, None, "3", "4", 3),
        (None, None, None, "4", 4),
        (None, None, "", "4", 4),
        (None, None, "  ", "4", 4),
        (None, None, " 3 ", "4", 3),
        (None, None, None, None, None),
    ],
)
def test_argument_wins_over_options_over_own_environment_over_runais(
    monkeypatch: pytest.MonkeyPatch,
    argument: int | None,
    option: int | None,
    own: str | None,
    runai: str | None,
    expected: int | None,
) -> None:
    for name, text in (("HEADRACE_CONCURRENCY", own), ("RUNAI_STREAMER_CONCURRENCY", runai)):
        if text is not None:
            monkeypatch.setenv(name, text)
    assert resolve(Options(concurrency=option), {"concurrency": argument}).concurrency == expected


def test_a_value_that_is_0_wins_as_any_other() -> None:
    assert resolve(Options(memory_limit=5), {"memory_limit": 0}).memory_limit == 0


def test_options_may_be_absent() -> None:
    assert resolve(None, {}) == Options()
    assert resolve(None, {"attempts": 2}) == Options(attempts=2)


def test_a_bad_variable_does_not_matter_where_an_argument_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONCURRENCY", "many")
    assert resolve(None, {"concurrency": 3}).concurrency == 3


def test_merging_changes_only_what_is_said() -> None:
    options = Options(concurrency=4, mmap="auto")
    assert options.merged({"concurrency": 8, "mmap": None}) == Options(concurrency=8, mmap="auto")
    assert options == Options(concurrency=4, mmap="auto")


def test_options_are_frozen_and_take_keywords_only() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().concurrency = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options(3)  # type: ignore[misc]


# ---- the environment


def test_every_field_is_in_the_tables_of_this_file() -> None:
    assert sorted(GOOD) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_called_headrace_and_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text, value = GOOD[name]
    monkeypatch.setenv(f"HEADRACE_{name.upper()}", text)
    assert Options.from_environment() == Options(**{name: value})
    assert resolve(None, {}) == Options(**{name: value})


@pytest.mark.parametrize("name", RUNAI)
def test_runais_names_are_a_fallback(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variable, text, value = RUNAI[name]
    monkeypatch.setenv(variable, text)
    assert Options.from_environment() == Options(**{name: value})
    own, own_value = GOOD[name]
    monkeypatch.setenv(f"HEADRACE_{name.upper()}", own)
    assert Options.from_environment() == Options(**{name: own_value})


@pytest.mark.parametrize(
    ("text", "value"), [("0", "off"), ("1", "auto"), ("true", "auto"), ("False", "off"), ("REQUIRE", "require"), ("auto", "auto")]
)
@pytest.mark.parametrize("variable", ["HEADRACE_PIN", "RUNAI_STREAMER_PIN_MEMORY"])
def test_pinning_may_be_a_number_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, value: str
) -> None:
    monkeypatch.setenv(variable, text)
    assert Options.from_environment().pin == value


def test_only_the_fields_asked_for_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONCURRENCY", "3")
    monkeypatch.setenv("HEADRACE_ATTEMPTS", "not a number, and nobody asks")
    assert Options.from_environment(["concurrency", "mmap"]) == Options(concurrency=3)
    assert Options.from_environment([]) == Options()
    assert Options.from_environment(name for name in ["concurrency"]) == Options(concurrency=3)


def test_a_misspelt_variable_is_told_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for variable in ["HEADRACE_MEMRY_LIMIT", "HEADRACE_CACHE", "HEADRACE_VLLM_TAKEOVER", "HEADRACE_SOMEBODYS", "HEADRACE_PIN"]:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HEADRACE_DIRECTIO", " ")
    for _ in range(2):
        resolve(None, {})
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable HEADRACE_MEMRY_LIMIT is no option, and has no effect; did you mean HEADRACE_MEMORY_LIMIT?"
    ]


def test_looking_up_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_environment(["concurency"])
    assert caught.value.option == "concurency"


BAD: list[tuple[str, str]] = [
    ("concurrency", "0"),
    ("concurrency", "-1"),
    ("concurrency", "many"),
    ("concurrency", "2.5"),
    ("memory_limit", "-2"),
    ("memory_limit", "lots"),
    ("memory_limit", "5XB"),
    ("memory_limit", "MiB"),
    ("memory_limit", "9" * 400 + ".0"),
    ("pin", "yes"),
    ("direct_io", "maybe"),
    ("mmap", "on"),
    ("in_place", "1"),
    ("gds", "on"),
    ("cast_at", "gpu"),
    ("keep_staging", "always"),
    ("partition", "rows"),
    ("stall_timeout_s", "0"),
    ("stall_timeout_s", "soon"),
    ("stall_timeout_s", "nan"),
    ("attempts", "0"),
    ("deadline_s", "-1"),
    ("peer_timeout_s", "0"),
]


@pytest.mark.parametrize(("name", "text"), BAD, ids=lambda text: text[:20])
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    variable = f"HEADRACE_{name.upper()}"
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError) as caught:
        Options.from_environment()
    assert caught.value.option == name
    assert variable in str(caught.value)


@pytest.mark.parametrize("name", RUNAI)
def test_a_bad_variable_of_runais_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(RUNAI[name][0], "nonsense")
    with pytest.raises(OptionError) as caught:
        resolve(None, {})
    assert caught.value.option == name
    assert RUNAI[name][0] in str(caught.value)


def test_the_environment_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "7")
    before = dict(os.environ)  # noqa: TID251  # the test of the rule
    resolve(Options(mmap="auto"), {"concurrency": 3, "memory_limit": "1GiB"})
    Options.from_environment()
    assert dict(os.environ) == before  # noqa: TID251


# ---- arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("concurrency", 0),
        ("concurrency", True),
        ("concurrency", 2.0),
        ("memory_limit", -2),
        ("memory_limit", False),
        ("memory_limit", 1.5),
        ("memory_limit", "1.0e400"),
        ("memory_limit", ""),
        ("pin", True),
        ("pin", 1),
        ("direct_io", "require"),
        ("mmap", False),
        ("mmap", ["auto"]),
        ("partition", b"files"),
        ("stall_timeout_s", 0),
        ("stall_timeout_s", True),
        ("stall_timeout_s", "5"),
        ("stall_timeout_s", math.nan),
        ("attempts", None.__class__),
        ("deadline_s", -0.5),
    ],
    ids=repr,
)
def test_a_bad_value_names_its_option(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**{name: value})  # type: ignore[arg-type]
    assert caught.value.option == name
    with pytest.raises(OptionError):
        Options().merged({name: value})


@pytest.mark.parametrize(
    ("name", "near"), [("concurency", "concurrency"), ("memory_limt", "memory_limit"), ("direct", "direct_io")]
)
def test_an_unknown_option_is_named_with_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve(None, {name: 1})
    assert caught.value.option == name
    assert repr(near) in str(caught.value)


def test_an_unknown_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(OptionError) as caught:
        resolve(None, {"zzz": None})
    assert all(name in str(caught.value) for name in FIELDS)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("1k", 1 << 10),
        ("256MiB", 256 << 20),
        ("256mib", 256 << 20),
        ("256M", 256 << 20),
        ("256MB", 256 << 20),
        ("256 MiB", 256 << 20),
        (" 2G ", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("1T", 1 << 40),
        ("512B", 512),
        ("-1", -1),
    ],
)
def test_sizes_are_numbers_with_units_of_1024(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes
    assert Options(memory_limit=text).memory_limit == nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "MiB", "1PiB", "1.2.3M", "0x10", "one", "1e9", "--1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_nbytes(text)


# ---- an open checkpoint


@pytest.mark.parametrize(("name", "value"), [("direct_io", "off"), ("attempts", 2), ("deadline_s", 5.0)])
def test_what_files_are_opened_with_cannot_be_changed_by_a_load(tmp_path: Path, name: str, value: Any) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(1_000))
    with headrace.open(path) as opened:
        for arguments in ({name: value}, {"options": Options(**{name: value})}):
            with pytest.raises(OptionError, match=r"headrace\.open") as caught:
                headrace.load(opened, **arguments)
            assert caught.value.option == name
    with headrace.open(path, **{name: value}) as opened:
        assert len(headrace.load(opened, **{name: value})) == 1


# ---- as types of arguments


def test_every_field_is_an_argument_of_its_type() -> None:
    kept, given = get_type_hints(Options), get_type_hints(OptionArguments)
    assert given.keys() == kept.keys()
    wider = {name for name in kept if given[name] != kept[name]}
    assert wider == {"memory_limit", "memory_limits", "network_chunk_nbytes"}, "what may be given as text"


def test_the_arguments_of_a_load_are_those_of_a_stream() -> None:
    of_stream = inspect.signature(headrace.stream).parameters.keys() - {"url", "overrides"}
    assert LoadArguments.__optional_keys__ == of_stream | set(FIELDS)
    assert not LoadArguments.__required_keys__
