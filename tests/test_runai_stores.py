"""Programs for models in object stores see with headrace what they see with Run:ai's package, on servers on loopback.

Run:ai's package with its parts for S3, Google and Azure is in an environment of its own, which `scripts/test --runai` makes;
where it is not there, nothing is compared. What is known to differ, and is meant to, is in `BETTER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import serialize
from test_runai_api import ACCESS_KEY, BROKEN, KINDS, ODD, SECRET, bucket_content

from headrace.testing.s3server import S3Server

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "runai_store_programs.py"
THEIRS = TESTS.parent / ".cache" / "runai" / "venv" / "bin" / "python"


def content() -> dict[str, bytes]:
    found = bucket_content()
    found |= {f"broken/{name}.safetensors": data for name, data in BROKEN.items()}
    found["odd/kinds.safetensors"] = serialize(KINDS)
    found["odd/none.safetensors"] = serialize({})
    found["odd/odd.safetensors"] = serialize(ODD, data_start=3)
    found["odd/with space+plus%25/ä.safetensors"] = serialize(ODD)
    return found


def run(python: str | Path, *arguments: str | Path, **environment: str) -> dict[str, Any]:
    kept = {name: value for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if (value := os.environ.get(name))}  # noqa: TID251
    done = subprocess.run(
        [str(python), str(PROGRAMS), *map(str, arguments)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def s3(_: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    with S3Server({"models": content()}, access_key=ACCESS_KEY, secret_key=SECRET) as server:
        yield (
            ["s3://models", f"{ACCESS_KEY},{SECRET},{server.url}"],
            {
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_ENDPOINT_URL": server.url,
                "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            },
        )


@contextmanager
def google(folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    gcs_emulator = pytest.importorskip("gcs_emulator", reason="needs the emulator of Google Cloud Storage")
    with gcs_emulator.running(folder) as emulator:
        yield (
            [f"gs://{emulator.bucket(content())}"],
            {
                "STORAGE_EMULATOR_HOST": emulator.url,
                "CLOUD_STORAGE_EMULATOR_ENDPOINT": emulator.url,  # of its native part
                "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS": "true",
                "GOOGLE_CLOUD_PROJECT": "p",
            },
        )


@contextmanager
def azure(folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Lists and copies only: the native part of Run:ai's wants https and a certificate that the system trusts."""
    library = pytest.importorskip("azure.storage.blob")
    from azure_server import ACCOUNT, KEY, emulator, why_no_emulator

    if why_no_emulator():
        pytest.skip(why_no_emulator())
    with emulator(folder) as endpoint:
        credential = {"account_name": ACCOUNT, "account_key": KEY}
        with library.BlobServiceClient(endpoint, credential=credential).create_container("models") as container:
            for name, data in content().items():
                container.upload_blob(name, data)
        told = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
        yield ["az://models", "--folders"], {"AZURE_STORAGE_CONNECTION_STRING": told}


STORES = {"s3": s3, "gs": google, "az": azure}
SDK_ERRORS = {"program_listing_a_missing_bucket", "program_pulling_from_a_missing_bucket"}
BETTER = {
    **dict.fromkeys(SDK_ERRORS, "whatever the store's library raises there; a ValueError here, as for all that cannot be read"),
    "program_sizes_by_prefix": "a prefix of text there, so that a neighbour is listed with it; a folder here",
}


@pytest.fixture(scope="module", params=list(STORES))
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """{program: (what it sees here, what it sees there)} of a store."""
    if not THEIRS.exists():
        pytest.skip("Run:ai's package is not installed; scripts/test --runai puts it into .cache/runai")
    folders = [tmp_path_factory.mktemp(name) for name in ("server", "ours", "theirs")]
    with STORES[request.param](folders[0]) as (arguments, environment):
        ours = run(sys.executable, arguments[0], folders[1], *arguments[1:], "--headrace", **environment)
        theirs = run(THEIRS, arguments[0], folders[2], *arguments[1:], **environment)
    return {name: (ours[name], theirs[name]) for name in theirs}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_see_what_they_see_with_the_real_package(seen: dict[str, tuple[Any, Any]]) -> None:
    assert {name: pair for name, pair in seen.items() if pair[0] != pair[1] and name not in BETTER} == {}
    assert len(seen) >= 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_said_to_differ_does(seen: dict[str, tuple[Any, Any]]) -> None:
    for name in SDK_ERRORS & seen.keys():
        assert seen[name][0] == ["raises", "ValueError"]
        assert seen[name][1][0] == "raises"
    for name in BETTER.keys() & seen.keys():
        assert seen[name][0] != seen[name][1], name
