"""`headrace doctor`: what it says of a machine that is laid out in a folder, of a simulated GPU, and of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import MIB, random_contents, write
from simulated_gpu import Gpu, needs_compiler, simulated_gpu
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli._doctor import Finding, Package, examine, installed_packages
from headrace.testing.acceptance import _probes, _run
from headrace.testing.devices import SimulatedDevice
from headrace.testing.simulated import SimulatedRuntime
from headrace.testing.simulated.cufile import SimulatedCuFile

HEADRACE = Path(sys.executable).with_name("headrace")
NAMES = ["headrace", "CPUs", "memory", "torch", "GPU", "driver", "pinned memory", "memlock limit", "huge pages", "/dev/shm"]
STORAGE = ["storage", "O_DIRECT", "cachestat", "direct storage"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return write(tmp_path / "model" / "m.safetensors", random_contents(MIB))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine's files: a container with one CPU and 4 GiB, and an NVIDIA driver."""
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/meminfo": "MemAvailable: 8388608 kB\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06\nGCC version:  gcc\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
        "sys/fs/cgroup/memory.max": str(4 << 30),
        "sys/fs/cgroup/memory.current": str(1 << 30),
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    }
    for name, text in files.items():
        path = tmp_path / "machine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "machine"


def found(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_the_cgroup_the_driver_and_the_kernels_switches_are_read(machine: Path, model: Path) -> None:
    seen = found(examine(model, root=machine))
    assert seen["CPUs"].text.startswith("1 may be used")
    assert "3 GiB" in seen["memory"].text
    assert seen["driver"] == Finding("driver", True, "nvidia: NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06")
    assert seen["huge pages"].ok is False
    assert seen["/dev/shm"].ok is False, "the machine has none"


def test_a_machine_of_which_nothing_is_known_is_no_error(tmp_path: Path) -> None:
    seen = found(examine(tmp_path / "none", root=tmp_path))
    assert list(seen) == [*NAMES, "storage"]
    assert seen["storage"].ok is False
    assert "none" in seen["storage"].text
    assert seen["driver"].ok is False


@pytest.mark.parametrize("folder", [True, False])
def test_storage_is_tried_with_the_longest_file_of_a_folder_and_nothing_is_written(model: Path, folder: bool) -> None:
    before = sorted(os.listdir(model.parent))
    seen = found(examine(model.parent if folder else model))
    assert list(seen) == [*NAMES, *STORAGE]
    assert seen["storage"].text.endswith(f"by {model}")
    assert seen["O_DIRECT"].ok is not None
    assert sorted(os.listdir(model.parent)) == before


def test_a_folder_without_files_is_said(tmp_path: Path) -> None:
    assert "no file to try" in found(examine(tmp_path))["storage"].text


def test_a_file_shorter_than_a_block_is_not_tried(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    assert found(examine(tmp_path))["O_DIRECT"].ok is None


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no tmpfs")
def test_memory_has_nothing_to_read_past() -> None:
    path = Path("/dev/shm", f"headrace-doctor-{os.getpid()}")
    path.write_bytes(bytes(8192))
    try:
        seen = found(examine(path))
    finally:
        path.unlink()
    assert seen["O_DIRECT"].ok is False
    assert "tmpfs" in seen["storage"].text
    assert "memory" in seen["O_DIRECT"].text


@needs_compiler
class TestWithGpu:
    @pytest.fixture
    def gpu(self) -> Iterator[Gpu]:
        with simulated_gpu() as made:
            yield made

    def test_what_can_be_page_locked_is_tried_and_given_back(self, gpu: Gpu, model: Path) -> None:
        seen = found(examine(model, gpu.device))
        assert seen["GPU"].ok is True
        assert "simulated:0" in seen["GPU"].text
        assert seen["pinned memory"] == Finding("pinned memory", True, "256 MiB at once")
        assert gpu.runtime.live().registered == 0

    @pytest.mark.parametrize(("limit", "text"), [(100 * MIB, "64 MiB at once; more is refused: "), (0, "cudaHostRegister")])
    def test_what_is_refused_is_said_with_the_reason(self, gpu: Gpu, model: Path, limit: int, text: str) -> None:
        gpu.runtime.limits(pinned_nbytes=limit)
        seen = found(examine(model, gpu.device))["pinned memory"]
        assert seen.ok is (limit > 0)
        assert text in seen.text

    def test_without_a_library_direct_storage_says_so(self, gpu: Gpu, model: Path) -> None:
        seen = found(examine(model, gpu.device))["direct storage"]
        assert seen.ok is False
        assert "no library was found" in seen.text

    @pytest.mark.parametrize(
        ("faults", "ok", "text"),
        [
            ({}, True, "from the disk to the device"),
            ({"route": "posix"}, False, "compatibility mode"),
            pytest.param({"wrong_bytes": True}, False, "wrong bytes", marks=pytest.mark.slow),
            pytest.param({"open_error": 5033}, False, "NVFS_SETUP_ERROR", marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_direct_storage_has_the_verdict_of_the_child(
        self, tmp_path: Path, model: Path, faults: dict[str, Any], ok: bool, text: str
    ) -> None:
        with SimulatedRuntime() as runtime:
            library = SimulatedCuFile(tmp_path, runtime)
            library.faults(**faults)
            device = SimulatedDevice(runtime, direct=library.path)
            seen = found(examine(model, device))["direct storage"]
            assert (seen.ok, text in seen.text) == (ok, True)
            device.close()


class TestPackages:
    def test_extras_are_read_from_our_own_metadata(self) -> None:
        lines = [
            "rich>=13",
            "no-such-package-here>=1; extra == 's3'",
            "botocore>=1; extra == 's3'",
            "botocore>=1; extra == 'gcs'",
        ]
        lines += ["pytest>=8; extra == 'dev'", "headrace[s3]; extra == 'dev'", "moto[server]>=5; extra == 'emulators'"]
        packages = installed_packages(lambda _: lines)
        assert [(package.name, package.extras) for package in packages] == [
            ("rich", ()),
            ("no-such-package-here", ("s3",)),
            ("botocore", ("s3", "gcs")),
        ]
        assert packages[1].version is None

    def test_those_of_this_installation_have_versions(self) -> None:
        names = {package.name: package for package in installed_packages()}
        assert {"rich", "torch", "botocore", "google-auth", "azure-identity"} <= names.keys()
        assert isinstance(names["torch"], Package)
        assert names["torch"].version


class TestCommand:
    def test_prints_tables_and_exits_0(self, model: Path) -> None:
        result = CliRunner().invoke(app, ["doctor", str(model)])
        assert result.exit_code == 0, result.output
        for name in (*NAMES, *STORAGE):
            assert f"\n{name}" in "\n" + result.stdout
        assert "pip install 'headrace[azure]'" in result.stdout

    def test_json_has_the_same(self, model: Path) -> None:
        result = CliRunner().invoke(app, ["doctor", "--json", str(model)])
        assert result.exit_code == 0
        read = json.loads(result.stdout)
        assert [finding["name"] for finding in read["findings"]] == [*NAMES, *STORAGE]
        assert {"name", "version", "extras"} == read["packages"][0].keys()

    def test_a_path_that_is_not_there_is_a_finding_and_no_error(self, tmp_path: Path) -> None:
        assert CliRunner().invoke(app, ["doctor", str(tmp_path / "none")]).exit_code == 0

    @pytest.mark.slow  # imports torch anew
    def test_it_is_installed(self, model: Path) -> None:
        done = subprocess.run([HEADRACE, "doctor", model], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    def test_help_needs_no_torch(self) -> None:
        code = (
            "import sys\nfrom headrace.cli import app\n"
            "try: app(['doctor', '--help'])\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def has_gpu() -> bool:
    return any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


class TestTryingTheGpuOut:
    """`headrace doctor --gpu`: what scripts/gpu does."""

    @pytest.mark.skipif(has_gpu(), reason="there is a GPU")
    def test_without_one_it_says_so_and_has_tested_nothing(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, ["doctor", "--gpu", str(tmp_path)])
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == "no GPU found on this machine: nothing was tested\n"
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(has_gpu(), reason="there is a GPU")
    def test_json_says_it_too(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, ["doctor", "--gpu", "--json", str(tmp_path)])
        assert result.exit_code == 0
        assert json.loads(result.stdout).keys() == {"date", "not tested"}

    @pytest.mark.parametrize("arguments", [["--simulated"], ["--gpu", "--device", "cuda:1"], ["--gpu", "--device", "cpu"]])
    def test_what_it_does_not_do_is_a_usage_error(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(app, ["doctor", *arguments])
        assert result.exit_code == 2
        assert "--gpu" in result.stderr

    @needs_compiler
    def test_the_simulated_gpu_answers_instead(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_probes, "RULES", {name: _probes.RULES[name] for name in ("register", "late")})
        result = CliRunner().invoke(app, ["doctor", "--gpu", "--simulated", "--json", str(tmp_path)])
        assert (result.exit_code, result.stderr) == (0, "")
        answers = json.loads(result.stdout)["simulated"]
        assert answers["register"]["again"] == 712
        assert answers["late"]["pinned: overwriting the source changes what arrives"] is True

    @needs_compiler
    def test_a_wrong_answer_is_the_exit_code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_probes, "RULES", {"register": _probes.RULES["register"]})
        monkeypatch.setattr(_run, "ask", lambda *_: {"the probe": "ended with -11: no message"})
        result = CliRunner().invoke(app, ["doctor", "--gpu", "--simulated", str(tmp_path)])
        assert result.exit_code == 1
        assert "FAILED: ['register']" in result.stdout
        assert result.stderr.startswith("headrace: error: not every answer")
