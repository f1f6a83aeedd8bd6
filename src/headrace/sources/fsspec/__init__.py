"""Whatever else fsspec knows: sftp://, smb://, github://, memory://, zip://inside::outside, and packages that register with it.

The adapter for schemes that no other one takes. fsspec promises neither that calls may be made side by side nor that two reads
see the same bytes. So calls are made one at a time where the filesystem is not known to take more (`_calls`), and a version
is what its listing tells of a file (`_files`), asked for again after every range; where it tells nothing but the size, only a
file that became shorter is noticed. Bytes are read into place where the filesystem's files can do that, and else copied once.

`_chain` reads urls, `_errors` says what went wrong, `_calls` is the filesystem, `_files` what callers see.
"""

from headrace.sources.fsspec._calls import Filesystem, knows_scheme
from headrace.sources.fsspec._chain import own_form, shown_chain, split_chain
from headrace.sources.fsspec._files import FsspecFolder, FsspecSource, FsspecVersion, RemoteFsspecSource, open_fsspec

__all__ = [
    "Filesystem",
    "FsspecFolder",
    "FsspecSource",
    "FsspecVersion",
    "RemoteFsspecSource",
    "knows_scheme",
    "open_fsspec",
    "own_form",
    "shown_chain",
    "split_chain",
]
