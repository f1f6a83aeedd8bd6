"""What tests of headrace use and other packages may: contract suites for sources and folders, and sources that fail on purpose.

Importing it imports neither pytest nor torch. Beside it lie `s3server`, a server for tests, and `simulated`, a CUDA runtime
without a GPU.
"""

from headrace.testing.faults import (
    Block,
    Change,
    Fault,
    FaultyAlignedSource,
    FaultySource,
    Flip,
    Raise,
    ReadCall,
    every_read,
    nth_read,
    touches,
)
from headrace.testing.sources import AlignedSourceTests, FolderTests, MappableSourceTests, SourceTests

__all__ = [
    "AlignedSourceTests",
    "Block",
    "Change",
    "Fault",
    "FaultyAlignedSource",
    "FaultySource",
    "Flip",
    "FolderTests",
    "MappableSourceTests",
    "Raise",
    "ReadCall",
    "SourceTests",
    "every_read",
    "nth_read",
    "touches",
]
