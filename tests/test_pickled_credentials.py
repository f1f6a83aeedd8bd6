"""Credentials go to other processes: vLLM's workers, and whatever else starts processes of its own, get them pickled."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
from checkpoints import random_contents, serialize, wrong

import headrace
from headrace.integrations import runai
from headrace.integrations.runai.s3_utils.s3_utils import S3Credentials as RunaiCredentials
from headrace.sources.azure import AzureCredentials
from headrace.sources.gcs import GcsCredentials
from headrace.sources.s3 import S3Credentials
from headrace.testing.s3server import S3Server

SECRET, TOKEN = "aSecretThatNobodySees01234567890", "aTokenThatNobodySees9876543210"


class Token:
    """A credential of the caller's own."""

    def get_token(self, *_scopes: str) -> Any:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token)

    __hash__ = None  # type: ignore[assignment]


CREDENTIALS = [
    S3Credentials(),
    S3Credentials(access_key_id="AK", secret_access_key=SECRET, session_token=TOKEN, region="eu-west-1", virtual_hosted=False),
    S3Credentials(anonymous=True, endpoint="https://store.example.org", requester_pays=True),
    S3Credentials(profile="work"),
    GcsCredentials(),
    GcsCredentials(token=TOKEN, user_project="bills"),
    GcsCredentials(access_key_id="AK", secret_access_key=SECRET),
    AzureCredentials(),
    AzureCredentials(account_name="models", account_key=SECRET),
    AzureCredentials(account_name="models", sas_token=f"sig={TOKEN}"),
    AzureCredentials(connection_string=f"AccountName=models;AccountKey={SECRET}"),
    AzureCredentials(account_name="models", token_credential=Token()),
]


@pytest.mark.parametrize("given", CREDENTIALS, ids=lambda given: type(given).__name__)
def test_credentials_come_out_of_a_pickle_or_a_copy_as_they_were(given: object) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(given, protocol))
        assert (type(again), again) == (type(given), given)
    assert copy.copy(given) == copy.deepcopy(given) == given
    for shown in (repr(pickle.loads(pickle.dumps(given))), str(given), f"{given}"):
        assert SECRET not in shown
        assert TOKEN not in shown


def test_credentials_of_google_auth_go_along() -> None:
    credentials = pytest.importorskip("google.oauth2.credentials").Credentials(TOKEN)
    given = GcsCredentials(google_credentials=credentials)
    again = pickle.loads(pickle.dumps(given))
    assert again.google_credentials.token == TOKEN
    assert TOKEN not in repr(again)


def test_run_ai_s_credentials_come_out_of_a_pickle_as_they_were() -> None:
    given = RunaiCredentials("AK", SECRET, TOKEN, region_name="eu-west-1", endpoint="https://store.example.org")
    again = pickle.loads(pickle.dumps(given))
    assert vars(again) == vars(given)
    assert SECRET not in repr(again)
    assert TOKEN not in repr(again)


def test_run_ai_s_credentials_reach_a_process_that_never_heard_of_the_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "runai_model_streamer", raising=False)
    runai.install()
    try:
        from runai_model_streamer.s3_utils.s3_utils import S3Credentials as Theirs

        pickled = pickle.dumps(Theirs("AK", SECRET)).hex()
    finally:
        runai.uninstall()
    program = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).secret_access_key)"
    answer = subprocess.run([sys.executable, "-c", program, pickled], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == SECRET


def test_pickled_credentials_open_what_the_first_ones_do() -> None:
    pytest.importorskip("botocore")
    contents = random_contents(1000, 7)
    with S3Server({"models": {"m.safetensors": serialize(contents)}}, access_key="AK", secret_key=SECRET) as server:
        given = S3Credentials(access_key_id="AK", secret_access_key=SECRET, endpoint=server.url)
        again = pickle.loads(pickle.dumps(given))
        assert not wrong(headrace.load("s3://models/m.safetensors", credentials=again), contents)
