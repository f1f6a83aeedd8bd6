"""Where programs import Run:ai's `file_streamer` from."""

from headrace.integrations.runai.file_streamer.file_streamer import FileStreamer
from headrace.integrations.runai.file_streamer.requests_iterator import FileChunks

__all__ = ["FileChunks", "FileStreamer"]
