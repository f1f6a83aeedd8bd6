"""The hook for SGLang, on a fake of its registry: what it replaces, and what is loaded then."""

from __future__ import annotations

import enum
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from checkpoints import Contents, bytes_of, random_entry, write

from headrace.errors import OptionError
from headrace.integrations import runai
from headrace.integrations.sglang import iterate, register

TARGET = "sglang.srt.model_loader.weight_utils.runai_safetensors_weights_iterator"
SHARDS: list[Contents] = [
    {"a.weight": random_entry("BF16", (16, 8), seed=1), "a.bias": random_entry("F32", (8,), seed=2)},
    {"b.weight": random_entry("U8", (100,), seed=3)},
]


class HookType(enum.Enum):
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    """Keeps what is registered, as SGLang does until it patches."""

    def __init__(self) -> None:
        self._hooks: dict[str, list[tuple[HookType, Any, None]]] = {}

    def register(self, target: str, hook: Any, hook_type: HookType) -> None:
        self._hooks.setdefault(target, []).append((hook_type, hook, None))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[HookRegistry]:
    found = HookRegistry()
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": found, "HookType": HookType},
        "sglang.srt.distributed": {},
        "sglang.srt.distributed.parallel_state": {
            "model_parallel_is_initialized": lambda: True,
            "get_tp_group": lambda: SimpleNamespace(world_size=1, cpu_group=None),
        },
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    yield found
    runai.uninstall()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(write(tmp_path / f"{i}.safetensors", contents)) for i, contents in enumerate(SHARDS)]


def test_without_the_switch_nothing_is_touched(registry: HookRegistry) -> None:
    register()
    assert registry._hooks == {}
    assert "runai_model_streamer" not in sys.modules


def test_with_the_switch_the_iterator_is_replaced_once(registry: HookRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SGLANG_TAKEOVER", "1")
    register()
    register()
    assert registry._hooks == {TARGET: [(HookType.REPLACE, iterate, None)]}
    assert importlib.import_module("runai_model_streamer") is runai


def test_a_switch_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SGLANG_TAKEOVER", "perhaps")
    with pytest.raises(OptionError):
        register()


def test_a_registry_that_is_not_as_expected_is_an_import_error(registry: HookRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SGLANG_TAKEOVER", "1")
    del registry._hooks
    with pytest.raises(ImportError, match=r"docs/sglang\.md"):
        register()
    assert "runai_model_streamer" not in sys.modules


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("is_distributed", [False, True])
def test_tensors_are_those_of_the_files_and_bear_no_mark_of_borrowing(is_distributed: bool, files: list[str]) -> None:
    found = dict(iterate(files, is_distributed, "cpu"))
    contents = {name: entry for shard in SHARDS for name, entry in shard.items()}
    assert {name: bytes_of(tensor) for name, tensor in found.items()} == {name: entry.data for name, entry in contents.items()}
    assert not any(hasattr(tensor, "_sglang_runai_streamer_tensor") for tensor in found.values())


def test_without_its_groups_a_rank_reads_for_itself_and_says_so(
    files: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert len(dict(iterate(files, True, "cpu"))) == 3
    assert "each reads everything" in caplog.text


def test_the_plugin_imports_neither_sglang_nor_torch() -> None:
    script = "import sys, headrace.integrations.sglang; print(sorted({'torch', 'numpy', 'sglang'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
