"""`StreamerPatcher`: object storage played by a local folder, for tests of programs that stream from a bucket."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import headrace
from headrace.integrations.runai._errors import as_value_errors
from headrace.integrations.runai.s3_utils.s3_utils import (
    S3Credentials,
    filter_allow,
    filter_ignore,
    is_azure_path,
    is_gs_path,
    is_s3_path,
)
from headrace.integrations.runai.safetensors_streamer.safetensors_streamer import SafetensorsStreamer, list_safetensors
from headrace.integrations.views import Chosen


class StreamerPatcher:
    """Functions to put in the place of the real ones: a bucket's urls lead to a local folder.

    Args:
        local_bucket_path: the folder that stands for the bucket, whatever its name.
    """

    def __init__(self, local_bucket_path: str) -> None:
        self.local_path = local_bucket_path

    def is_remote_path(self, path: str) -> bool:
        """Whether the path is one that leads to the folder."""
        return is_s3_path(path) or is_gs_path(path) or is_azure_path(path)

    def convert_remote_path_to_local_path(self, path: str) -> str:
        """Where a url leads; a local path is returned as it is."""
        return os.path.join(self.local_path, urlsplit(path).path.lstrip("/")) if self.is_remote_path(path) else path

    def convert_local_path_to_mocked_remote_path(self, local_path_result: str, original_remote_path: str) -> str:
        """The url of a file in the folder; `original_remote_path` has the bucket's name."""
        parts = urlsplit(original_remote_path)
        return f"{parts.scheme}://{parts.netloc}/{os.path.relpath(local_path_result, self.local_path)}"

    def shim_list_safetensors(self, path: str, s3_credentials: S3Credentials | None = None) -> list[str]:
        """In the place of `list_safetensors`."""
        found = list_safetensors(self.convert_remote_path_to_local_path(path), s3_credentials)
        if not self.is_remote_path(path):
            return found
        return [self.convert_local_path_to_mocked_remote_path(each, path) for each in found]

    def shim_pull_files(
        self,
        model_path: str,
        dst: str,
        allow_pattern: list[str] | None = None,
        ignore_pattern: list[str] | None = None,
        s3_credentials: S3Credentials | None = None,
    ) -> None:
        """In the place of `pull_files`; patterns are about paths below `model_path`."""
        del s3_credentials
        if not self.is_remote_path(model_path):
            raise NotImplementedError(f"pulling is not implemented for file system paths, and {model_path} is one")
        with as_value_errors():
            folder = headrace.folder(self.convert_remote_path_to_local_path(model_path))
            names: list[str] = getattr(folder, "walk", folder.names)()
            names = filter_allow(names, allow_pattern) if allow_pattern else names
            names = filter_ignore(names, ignore_pattern) if ignore_pattern else names
            if names:
                headrace.pull(Chosen(folder, names), dst, include="*")

    def create_mock_streamer(self, *args: Any, **kwargs: Any) -> PatchedStreamer:
        """In the place of `SafetensorsStreamer`."""
        return PatchedStreamer(self, *args, **kwargs)


class PatchedStreamer(SafetensorsStreamer):
    """A streamer that reads the files of the folder where it is given urls of the bucket."""

    def __init__(self, patcher: StreamerPatcher, *, pin_memory: bool | None = None) -> None:
        super().__init__(pin_memory=pin_memory)
        self._patcher = patcher

    def stream_files(self, paths: Sequence[str], *args: Any, **kwargs: Any) -> None:
        """As `SafetensorsStreamer.stream_files`."""
        super().stream_files([self._patcher.convert_remote_path_to_local_path(path) for path in paths], *args, **kwargs)
