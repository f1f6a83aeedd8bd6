"""Local files and folders of them.

From the ground up: `_errors` says what went wrong, `_filesystem` where a file lies, `_residency` what of it the page cache holds;
`_source` reads it, and `_folder` has many by name.
"""

from headrace.sources.file._errors import translate
from headrace.sources.file._filesystem import filesystem_name, is_local_filesystem
from headrace.sources.file._folder import FileFolder
from headrace.sources.file._residency import cached_share
from headrace.sources.file._source import DirectIO, FileSource

__all__ = [
    "DirectIO",
    "FileFolder",
    "FileSource",
    "cached_share",
    "filesystem_name",
    "is_local_filesystem",
    "translate",
]
