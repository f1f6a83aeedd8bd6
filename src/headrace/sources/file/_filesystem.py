"""What the kernel says of the filesystem that an open file lies on: its name, and what direct reads need there."""

from __future__ import annotations

import ctypes
from typing import Final

_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000

# f_type of statfs(2). Local block filesystems are those where a direct read reaches a disk of this machine.
BLOCK_FILESYSTEMS: Final = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x794C7630: "overlay",
}
MEMORY_FILESYSTEMS: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
_OTHER_LOCAL_FILESYSTEMS: Final = {0xE0F5E1E2: "erofs", 0x73717368: "squashfs", 0x2FC12FC1: "zfs"}
_LOCAL_FILESYSTEMS: Final = BLOCK_FILESYSTEMS | MEMORY_FILESYSTEMS | _OTHER_LOCAL_FILESYSTEMS

_libc = ctypes.CDLL(None)


def filesystem_name(fd: int) -> str:
    """Name the filesystem of an open file, or give its f_type in hexadecimal where headrace does not know it as local."""
    answer = (ctypes.c_long * 64)()  # struct statfs is 120 bytes on 64-bit Linux and begins with f_type
    if _libc.fstatfs(ctypes.c_int(fd), answer):
        return "an unknown filesystem"
    return _LOCAL_FILESYSTEMS.get(answer[0], f"filesystem {answer[0]:#x}")


def is_local_filesystem(name: str) -> bool:
    """Whether a name from `filesystem_name` is a local filesystem, whose pages no network can take away."""
    return name in _LOCAL_FILESYSTEMS.values()


def direct_alignment(fd: int) -> int | None:
    """What statx (kernel 6.1) says direct reads need; 0: there are none for this file; None: it does not say."""
    statx = getattr(_libc, "statx", None)
    answer = (ctypes.c_uint32 * 64)()  # struct statx: 256 bytes; stx_mask at 0, stx_dio_mem_align at 152, _offset_align at 156
    if statx is None or statx(ctypes.c_int(fd), b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return None
    if not answer[0] & _STATX_DIOALIGN:
        return None
    return max(answer[38], answer[39]) if answer[39] else 0
