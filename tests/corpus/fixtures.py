"""The corpus as a fixture: written once per session, read by every test that needs files from the field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from corpus.make_cases import read_expected, write_corpus


@dataclass(frozen=True, slots=True)
class CorpusFolder:
    """The corpus on disk.

    Attributes:
        root: the folder that holds manifest.json and files/.
        cases: the records of the manifest, described in make_cases.py.
    """

    root: Path
    cases: list[dict[str, Any]]

    def path(self, case: dict[str, Any]) -> Path:
        return self.root / case["path"]

    def expected(self, case: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return read_expected(self.root, case)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusFolder:
    root = tmp_path_factory.mktemp("corpus")
    return CorpusFolder(root, write_corpus(root)["cases"])
