#!/usr/bin/env python3
"""Writes a corpus of valid and invalid safetensors files and index.json directories.

    python make_cases.py OUT
    python make_cases.py OUT --big           # adds a case above 2 GiB (sparse; reading it in full takes time)
    python make_cases.py OUT --verify        # also asks the installed safetensors package

OUT/manifest.json has one record per case:
  id, class, kind ('file' | 'dir'), path (relative to OUT; the files lie under OUT/files)
  expect   'ok' | 'error'. For kind=file this is what safetensors 0.8.0 itself says.
  reason   short words, for 'error'
  tensors  for 'ok': {name: {dtype, shape, nbytes, sha256[, shard]}}; sha256 is over the raw bytes.
           Where there are very many, 'tensors_file' names a JSON file (relative to OUT) with that map.
  metadata the __metadata__ map, or null where the header has none
  stricter null, or why refusing an 'ok' case is acceptable or right; a checker should then take either
  policy   true where no reference implementation decides and 'expect' is a proposal (index directories)
  limits   optional {max_seconds, max_extra_mb}: refuse or load within these
  refs     public reports that this case comes from
  reference / reference_error   filled in by --verify

Uses only the standard library (--verify needs safetensors and numpy).
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import struct
import sys

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
NONE = object()
README = "safetensors README"
SOURCE = "safetensors src/tensor.rs"
INDEX = "ckpt/model.safetensors.index.json"
DUPLICATE = "README: duplicate keys are disallowed; the package keeps the last"
LEADING = "README: the header MUST begin with '{'; the package takes leading whitespace"
UNKNOWN = "the published JSON schema has additionalProperties false; the package takes unknown fields"


def nbytes(dtype, shape):
    n = BITS[dtype]
    for d in shape:
        n *= d
    assert n % 8 == 0, (dtype, shape)
    return n // 8


def rnd(seed, n):
    return random.Random(str(seed)).randbytes(n)


def tensor(dtype, shape, data=None, seed=None):
    size = nbytes(dtype, shape)
    if data is None:
        data = rnd((seed, dtype, tuple(shape)), size)
        if dtype == "BOOL":
            data = bytes(b & 1 for b in data)
    assert len(data) == size, (dtype, shape, len(data), size)
    return (dtype, list(shape), data)


def layout(tensors, order=None):
    """({name: info}, data) with the tensors laid out one after another in `order`."""
    infos, data, at = {}, [], 0
    for name in order or tensors:
        dtype, shape, raw = tensors[name]
        infos[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    return infos, b"".join(data)


def dumps(obj, ascii_=False):
    return json.dumps(obj, separators=(",", ":"), ensure_ascii=ascii_).encode("utf-8")


def pack(header, data=b"", n=None):
    return struct.pack("<Q", len(header) if n is None else n) + header + data


def build(tensors, meta=NONE, order=None, pad=8, header_order=None, ascii_=False):
    """A file as a good writer makes it: header padded with spaces to a multiple of `pad`."""
    infos, data = layout(tensors, order)
    head = {}
    if meta is not NONE:
        head["__metadata__"] = meta
    for name in header_order or infos:
        head[name] = infos[name]
    raw = dumps(head, ascii_)
    if pad:
        raw += b" " * (-len(raw) % pad)
    return pack(raw, data)


def info(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def describe(t):
    dtype, shape, raw = t[:3]
    d = {"dtype": dtype, "shape": list(shape), "nbytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    if len(t) > 3:
        d["shard"] = t[3]
    return d


class Corpus:
    def __init__(self, out, big=False):
        self.out, self.big, self.cases = out, big, []

    def _record(self, id_, cls, kind, path, ok, reason, meta, stricter, policy, limits, refs, note):
        assert (ok is None) != (reason is None), id_
        assert id_ not in {c["id"] for c in self.cases}, id_
        rec = {"id": id_, "class": cls, "kind": kind, "path": path, "expect": "ok" if reason is None else "error"}
        if reason is not None:
            rec["reason"] = reason
        else:
            described = {k: v if isinstance(v, dict) else describe(v) for k, v in ok.items()}
            if len(described) > 2000:
                rec["tensors_file"] = path + ".expected.json"
                rec["tensor_count"] = len(described)
                with open(os.path.join(self.out, rec["tensors_file"]), "w", encoding="utf-8") as f:
                    json.dump(described, f)
            else:
                rec["tensors"] = described
            rec["metadata"] = None if meta is NONE else meta
        rec.update(stricter=stricter, policy=policy, refs=list(refs))
        if limits:
            rec["limits"] = limits
        if note:
            rec["note"] = note
        self.cases.append(rec)

    def file(self, id_, cls, blob, ok=None, reason=None, meta=NONE, stricter=None, limits=None, refs=(), note=None, big=False):
        """blob: bytes, or a function that writes the file at the path it is given."""
        if big and not self.big:
            return
        path = f"files/{cls}/{id_}.safetensors"
        full = os.path.join(self.out, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        if callable(blob):
            blob(full)
        else:
            with open(full, "wb") as f:
                f.write(blob)
        self._record(id_, cls, "file", path, ok, reason, meta, stricter, False, limits, refs, note)

    def dir(self, id_, files, ok=None, reason=None, stricter=None, refs=(), note=None, root="ckpt", cls="index"):
        """files: {relative path: bytes | ('symlink', target)}; the checkpoint is the folder `root` inside."""
        base = os.path.join(self.out, "files", cls, id_)
        os.makedirs(os.path.join(base, root), exist_ok=True)
        for rel, blob in files.items():
            full = os.path.join(base, rel)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            if isinstance(blob, tuple):
                os.symlink(blob[1], full)
            else:
                with open(full, "wb") as f:
                    f.write(blob.replace(b"@BASE@", os.path.abspath(base).encode()) if rel.endswith(".json") else blob)
        self._record(id_, cls, "dir", f"files/{cls}/{id_}/{root}", ok, reason, NONE, stricter, True, None, refs, note)


def index(weight_map, total=None):
    return json.dumps(
        {"metadata": {"total_size": total if total is not None else 0}, "weight_map": weight_map}, indent=2, ensure_ascii=False
    ).encode("utf-8")


def shard(i, n):
    return f"model-{i:05d}-of-{n:05d}.safetensors"


def in_shard(tensors, name):
    return {k: (*v, name) for k, v in tensors.items()}


def sparse(header, total_data):
    def write(path):
        with open(path, "wb") as f:
            f.write(pack(header))
            f.truncate(8 + len(header) + total_data)

    return write


def zeros_sha256(n):
    h, block = hashlib.sha256(), bytes(1 << 20)
    for _ in range(n >> 20):
        h.update(block)
    h.update(bytes(n & ((1 << 20) - 1)))
    return h.hexdigest()


LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4976698672\n"
)


# ------------------------------------------------------------------------------------------------ the cases
def dtypes(c):
    # every dtype, one file each, a small matrix
    for dtype in BITS:
        t = {"w": tensor(dtype, [4, 2], seed="h")}
        c.file(f"dtype_{dtype.lower()}", "dtype", build(t), ok=t, refs=[SOURCE])
    t = {d.lower(): tensor(d, [2, 4], seed="mix") for d in BITS}
    c.file("dtype_all_in_one", "dtype", build(t, meta={"format": "pt"}), ok=t, meta={"format": "pt"})


def header_lengths(c):
    # header length
    c.file("empty_file", "header_length", b"", reason="file shorter than 8 bytes", refs=[SOURCE])
    c.file("seven_bytes", "header_length", b"\x10\0\0\0\0\0\0", reason="file shorter than 8 bytes", refs=[SOURCE])
    c.file("length_zero", "header_length", pack(b""), reason="empty header is not JSON", refs=[SOURCE])
    c.file(
        "length_past_end",
        "header_length",
        pack(b'{"a"', n=60),
        reason="header length past the end of the file",
        refs=["safetensors attacks/ attempt 1"],
    )
    c.file("length_2_63", "header_length", pack(b"{}", n=1 << 63), reason="header too large (limit 100000000)")
    c.file(
        "length_over_limit",
        "header_length",
        lambda p: sparse_raw(p, 100_000_001, 100_000_001 + 8),
        reason="header too large (limit 100000000)",
        limits={"max_seconds": 2, "max_extra_mb": 64},
        note="sparse file; the length must be judged before reading",
        refs=["safetensors/safetensors#668"],
    )
    if c.big:
        c.file("length_at_limit", "header_length", pack(b"{}" + b" " * 99_999_998), ok={}, big=True)


def header_texts(c):
    # header is not what it should be
    c.file("not_utf8", "header_json", pack(b'{"\xff\xfe":1}'), reason="header is not UTF-8", refs=[SOURCE])
    c.file(
        "utf8_surrogate_bytes",
        "header_json",
        pack(b'{"\xed\xa0\x80":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        reason="header is not UTF-8 (encoded surrogate)",
    )
    c.file("json_array", "header_json", pack(b"[]"), reason="header is not a JSON object")
    c.file("json_null", "header_json", pack(b"null    "), reason="header is not a JSON object")
    c.file("json_cut_short", "header_json", pack(b'{"a":{"dtype":"U8"'), reason="header is not JSON")
    c.file("json_two_objects", "header_json", pack(b"{}{}"), reason="characters after the JSON object")
    c.file(
        "json_trailing_comma",
        "header_json",
        pack(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},}', b"x"),
        reason="header is not JSON",
    )
    c.file(
        "json_nan_literal",
        "header_json",
        pack(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":NaN}}', b"x"),
        reason="NaN is not JSON",
        note="Python's json.loads takes NaN",
    )
    c.file(
        "json_lone_surrogate_name",
        "header_json",
        pack(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        reason="lone surrogate in a name",
        note="Python's json.loads takes it and returns a str that cannot be encoded",
    )
    c.file(
        "json_raw_newline_in_name",
        "header_json",
        pack(b'{"a\nb":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        reason="control character in a string",
    )
    c.file(
        "json_metadata_only_bad_writer",
        "header_json",
        pack(b'{},"__metadata__":{"key":"value"}}   '),
        reason="header is not JSON",
        refs=["safetensors/safetensors#466"],
    )
    c.file(
        "nul_padding",
        "header_json",
        pack(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}\0\0\0', b"x"),
        reason="characters after the JSON object (NUL padding)",
    )


def entries(c):
    # one tensor's entry is wrong
    def one(entry, data=b"12345678"):
        return pack(b'{"a":' + entry + b"}", data)

    c.file("dtype_unknown", "entry", one(b'{"dtype":"F128","shape":[1],"data_offsets":[0,8]}'), reason="unknown dtype")
    c.file("dtype_lower_case", "entry", one(b'{"dtype":"f64","shape":[1],"data_offsets":[0,8]}'), reason="unknown dtype")
    c.file("dtype_missing", "entry", one(b'{"shape":[1],"data_offsets":[0,8]}'), reason="dtype missing")
    c.file("shape_missing", "entry", one(b'{"dtype":"F64","data_offsets":[0,8]}'), reason="shape missing")
    c.file("shape_negative", "entry", one(b'{"dtype":"F64","shape":[-1],"data_offsets":[0,8]}'), reason="negative dimension")
    c.file(
        "shape_two_negatives",
        "entry",
        one(b'{"dtype":"F64","shape":[-1,-1],"data_offsets":[0,8]}'),
        reason="negative dimension",
        note="the product is 1 and fits",
    )
    c.file(
        "shape_float", "entry", one(b'{"dtype":"F64","shape":[1.0],"data_offsets":[0,8]}'), reason="dimension is not an integer"
    )
    c.file(
        "shape_bool",
        "entry",
        one(b'{"dtype":"F64","shape":[true],"data_offsets":[0,8]}'),
        reason="dimension is not an integer",
        note="True is an int to Python",
    )
    c.file("shape_is_number", "entry", one(b'{"dtype":"F64","shape":1,"data_offsets":[0,8]}'), reason="shape is not a list")
    c.file(
        "offsets_three", "entry", one(b'{"dtype":"F64","shape":[1],"data_offsets":[0,8,8]}'), reason="data_offsets is not a pair"
    )
    c.file(
        "offsets_string", "entry", one(b'{"dtype":"F64","shape":[1],"data_offsets":["0","8"]}'), reason="offsets are not integers"
    )
    c.file("offsets_missing", "entry", one(b'{"dtype":"F64","shape":[1]}'), reason="data_offsets missing")
    c.file("entry_null", "entry", one(b"null"), reason="entry is not an object")
    c.file(
        "entry_extra_field",
        "entry",
        one(b'{"dtype":"F64","shape":[1],"data_offsets":[0,8],"note":{"any":["thing"]}}'),
        ok={"a": ("F64", [1], b"12345678")},
        stricter="the published JSON schema has additionalProperties false; the package takes unknown fields",
    )
    c.file(
        "size_mismatch_small",
        "entry",
        one(b'{"dtype":"F32","shape":[3],"data_offsets":[0,8]}'),
        reason="shape and dtype do not match the byte range",
    )
    c.file(
        "size_mismatch_large",
        "entry",
        one(b'{"dtype":"F32","shape":[1],"data_offsets":[0,8]}'),
        reason="shape and dtype do not match the byte range",
    )
    c.file(
        "f4_odd_count",
        "entry",
        one(b'{"dtype":"F4","shape":[3],"data_offsets":[0,2]}', b"ab"),
        reason="sub-byte tensor does not end on a byte",
        refs=[SOURCE],
    )
    c.file(
        "f4_scalar",
        "entry",
        one(b'{"dtype":"F4","shape":[],"data_offsets":[0,1]}', b"a"),
        reason="sub-byte tensor does not end on a byte",
    )
    c.file(
        "f4_shape_in_bytes",
        "entry",
        one(b'{"dtype":"F4","shape":[2,4],"data_offsets":[0,8]}'),
        reason="shape and dtype do not match the byte range",
        note="writer put the packed byte shape where the header wants 4-bit elements",
        refs=["foundation-model-stack/fastsafetensors#79"],
    )


def offsets(c):
    # offsets
    c.file(
        "hole_between",
        "offsets",
        pack(dumps({"a": info("U8", [4], 0, 4), "b": info("U8", [4], 8, 12)}), bytes(12)),
        reason="hole between tensors",
        refs=[README],
    )
    c.file(
        "overlap",
        "offsets",
        pack(dumps({"a": info("U8", [4], 0, 4), "b": info("U8", [4], 2, 6)}), bytes(6)),
        reason="tensors overlap",
        refs=["safetensors attacks/ proposal 4"],
    )
    c.file(
        "same_range_twice",
        "offsets",
        pack(dumps({"embed": info("F32", [2], 0, 8), "lm_head": info("F32", [2], 0, 8)}), bytes(8)),
        reason="tensors overlap (two names on one range)",
        refs=["safetensors/safetensors#586"],
    )
    c.file("begin_after_end", "offsets", pack(dumps({"a": info("U8", [4], 4, 0)}), bytes(4)), reason="end before begin")
    c.file(
        "past_the_file",
        "offsets",
        pack(dumps({"a": info("U8", [64], 0, 64)}), bytes(4)),
        reason="tensor past the end of the file",
    )
    c.file(
        "absolute_offsets",
        "offsets",
        pack(dumps({"a": info("U8", [4], 63, 67)}), bytes(4)),
        reason="first tensor does not begin at 0 (offsets written from the start of the file)",
    )
    c.file(
        "huge_offsets",
        "offsets",
        pack(dumps({"a": info("U8", [1 << 50], 0, 1 << 50)}), bytes(4)),
        reason="tensor past the end of the file",
        limits={"max_seconds": 2, "max_extra_mb": 64},
    )
    c.file(
        "zero_size_off_boundary",
        "offsets",
        pack(dumps({"a": info("U8", [8], 0, 8), "z": info("F32", [0], 4, 4)}), bytes(8)),
        reason="empty tensor placed inside another",
    )


def overflows(c):
    # arithmetic
    c.file(
        "elements_overflow",
        "overflow",
        pack(dumps({"a": info("U8", [2, 1 << 63], 0, 0)})),
        reason="element count overflows 64 bits",
        refs=[SOURCE],
    )
    c.file(
        "bits_overflow",
        "overflow",
        pack(dumps({"a": info("F64", [1 << 60], 0, 0)})),
        reason="byte count overflows 64 bits",
        refs=[SOURCE],
    )
    c.file(
        "wraps_to_right_size",
        "overflow",
        pack(dumps({"a": info("F32", [4, (1 << 62) + 1], 0, 16)}), bytes(16)),
        reason="element count overflows 64 bits",
        note="modulo 2**64 it would fit",
    )
    c.file(
        "dim_2_64",
        "overflow",
        pack(b'{"a":{"dtype":"U8","shape":[18446744073709551616,0],"data_offsets":[0,0]}}'),
        reason="dimension does not fit 64 bits",
        note="Python's product is 0 and would fit",
    )
    c.file(
        "zero_after_overflow",
        "overflow",
        pack(dumps({"a": info("U8", [1 << 63, 2, 0], 0, 0)})),
        reason="element count overflows 64 bits",
        note="the product is taken in order",
    )
    c.file(
        "zero_before_overflow",
        "overflow",
        pack(dumps({"a": info("U8", [0, 1 << 63, 2], 0, 0)})),
        ok={"a": ("U8", [0, 1 << 63, 2], b"")},
    )
    c.file(
        "zero_largest_dim",
        "overflow",
        pack(dumps({"a": info("F64", [(1 << 64) - 1, 0], 0, 0)})),
        ok={"a": ("F64", [(1 << 64) - 1, 0], b"")},
    )
    c.file(
        "offset_2_64",
        "overflow",
        pack(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[18446744073709551616,18446744073709551616]}}'),
        reason="offset does not fit 64 bits",
    )
    c.file(
        "f4_overflow",
        "overflow",
        pack(dumps({"a": info("F4", [1 << 63, 2], 0, 1 << 63)})),
        reason="element count overflows 64 bits",
    )


def metadata(c):
    # metadata
    t = {"a": tensor("F32", [2], seed="m")}
    c.file(
        "metadata_strings",
        "metadata",
        build(t, meta={"format": "pt", "total_parameters": "12", "ключ": "值\n\u0000"}),
        ok=t,
        meta={"format": "pt", "total_parameters": "12", "ключ": "值\n\u0000"},
    )
    c.file("metadata_empty", "metadata", build(t, meta={}), ok=t, meta={}, refs=["foundation-model-stack/fastsafetensors#89"])
    c.file("metadata_number", "metadata", build(t, meta={"epoch": 3}), reason="metadata value is not a string", refs=[README])
    c.file("metadata_nested", "metadata", build(t, meta={"config": {"a": "b"}}), reason="metadata value is not a string")
    c.file("metadata_list", "metadata", build(t, meta=["a"]), reason="metadata is not an object")
    c.file(
        "metadata_is_a_tensor",
        "metadata",
        pack(dumps({"__metadata__": info("U8", [4], 0, 4)}), bytes(4)),
        reason="metadata value is not a string",
    )
    c.file(
        "metadata_only",
        "metadata",
        pack(dumps({"__metadata__": {"k": "v"}})),
        ok={},
        meta={"k": "v"},
        refs=["safetensors/safetensors#466"],
    )
    c.file("metadata_null", "metadata", pack(b'{"__metadata__":null}'), ok={}, meta=None)
    c.file("metadata_null_value", "metadata", pack(b'{"__metadata__":{"a":null}}'), reason="metadata value is not a string")
    c.file(
        "metadata_quotes",
        "metadata",
        build(t, meta={"config": '{"a": true, "b": [-0, "\\\\"]}'}),
        ok=t,
        meta={"config": '{"a": true, "b": [-0, "\\\\"]}'},
    )
    c.file(
        "metadata_dup_key", "metadata", pack(b'{"__metadata__":{"a":"1","a":"2"}}'), ok={}, meta={"a": "2"}, stricter=DUPLICATE
    )
    c.file("metadata_escaped_name", "metadata", pack(b'{"\\u005f_metadata__":{"a":"1"}}'), ok={}, meta={"a": "1"})


def duplicates(c):
    # duplicates
    c.file(
        "dup_name_two_ranges",
        "duplicates",
        pack(
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}', b"wxyz"
        ),
        reason="duplicate name",
        refs=["safetensors/safetensors#401"],
        note="the package says InvalidOffset; a good message names the duplicate",
    )
    c.file(
        "dup_name_same_entry",
        "duplicates",
        pack(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"wx"),
        ok={"a": ("U8", [2], b"wx")},
        stricter="README: duplicate keys are disallowed; the package keeps the last",
        refs=[README, "safetensors/safetensors#401"],
    )
    c.file(
        "dup_metadata",
        "duplicates",
        pack(b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"2"}}'),
        reason="duplicate __metadata__",
    )
    c.file(
        "dup_field",
        "duplicates",
        pack(b'{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}', b"wx"),
        reason="duplicate field",
    )
    c.file(
        "dup_name_escaped",
        "duplicates",
        pack(
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"\\u0061":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
            b"wx",
        ),
        ok={"a": ("U8", [2], b"wx")},
        stricter=DUPLICATE,
    )
    c.file(
        "dup_name_first_is_null",
        "duplicates",
        pack(b'{"a":null,"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"wx"),
        reason="entry is not an object",
    )


def layouts(c):
    # layout and padding
    t = {"a": tensor("F32", [3], seed="l"), "b": tensor("F64", [2], seed="l")}
    c.file("no_tensors", "layout", pack(b"{}"), ok={})
    c.file("no_tensors_padded", "layout", pack(b"{}      "), ok={}, refs=[SOURCE])
    c.file("padded_4096", "layout", build(t, pad=4096), ok=t, note="header padded with spaces to a page")
    c.file(
        "data_start_odd",
        "layout",
        build_odd(t, 1),
        ok=t,
        note="data begins at an address that is 1 modulo 8",
        refs=["safetensors/safetensors#231", "ml-explore/mlx#4439", "Comfy-Org/ComfyUI#12266"],
    )
    t = {
        "u": tensor("U8", [1], seed="l"),
        "f": tensor("F32", [5], seed="l"),
        "h": tensor("BF16", [3], seed="l"),
        "d": tensor("F64", [2], seed="l"),
        "c": tensor("C64", [1], seed="l"),
    }
    c.file(
        "tensors_unaligned",
        "layout",
        build(t),
        ok=t,
        refs=["foundation-model-stack/fastsafetensors#38"],
        note="every tensor after the first sits on an odd offset",
    )
    c.file(
        "header_order_differs", "layout", build(t, order=["c", "u", "d", "f", "h"], header_order=["h", "f", "u", "c", "d"]), ok=t
    )
    c.file(
        "trailing_one_byte", "layout", build(t) + b"\0", reason="bytes after the last tensor", refs=["Comfy-Org/ComfyUI#15602"]
    )
    c.file("no_tensors_but_data", "layout", pack(b"{}", b"data"), reason="bytes after the last tensor", refs=[SOURCE])
    c.file(
        "leading_space",
        "layout",
        pack(b"  {}    "),
        ok={},
        stricter="README: the header MUST begin with '{'; the package takes leading whitespace",
        refs=[README, SOURCE],
    )


def shapes(c):
    # shapes
    t = {
        "scalar": tensor("F32", [], seed="s"),
        "zero": tensor("F32", [0], seed="s"),
        "zero2": tensor("I64", [3, 0, 5], seed="s"),
        "one": tensor("BF16", [1, 1, 1], seed="s"),
        "last_zero": tensor("U8", [0], seed="s"),
    }
    c.file("scalar_and_zero", "shapes", build(t), ok=t, refs=[README])
    t = {"z": tensor("F16", [0, 7], seed="s")}
    c.file(
        "only_zero_size",
        "shapes",
        build(t),
        ok=t,
        refs=["MoonshotAI/checkpoint-engine#79"],
        note="the data part is empty: mmap, pinning and range requests of zero bytes must not be tried",
    )
    t = {"s": tensor("I64", [], data=struct.pack("<q", -2), seed="s")}
    c.file("only_scalar", "shapes", build(t), ok=t)
    t = {
        "a": tensor("F32", [2], seed="z"),
        "b": tensor("U8", [0], seed="z"),
        "c": tensor("I64", [0, 3], seed="z"),
        "d": tensor("U8", [1], seed="z"),
    }
    c.file(
        "zero_size_listed_last",
        "shapes",
        build(t, header_order=["d", "a", "c", "b"]),
        ok=t,
        note="sorted by start alone, d would come before b and c",
    )
    t = {"a": tensor("U8", [1] * 1000, seed="r")}
    c.file("thousand_dimensions", "shapes", build(t), ok=t)


def names(c):
    # names
    t = {
        n: tensor("U8", [3], seed=n)
        for n in [
            "",
            "a.b",
            "a/b",
            "../../etc/passwd",
            "/abs/path",
            "имя",
            "重み",
            "\U0001f9ea",
            "new\nline",
            "nul\0here",
            "sp ace ",
            "__metadata",
            "é",
            "e\u0301",
            "%2e%2e",
            'quote"back\\slash',
            "A" * 5000,
        ]
    }
    c.file("names_odd", "names", build(t), ok=t, stricter=None, note="é and e+U+0301 are two names; no normalising")
    c.file("names_odd_escaped", "names", build(t, ascii_=True), ok=t)


def payloads(c):
    # payload bits
    t = {
        "f16_all": tensor("F16", [65536], data=struct.pack("<65536H", *range(65536))),
        "e4m3_all": tensor("F8_E4M3", [16, 16], data=bytes(range(256))),
        "f32_special": tensor(
            "F32",
            [8],
            data=struct.pack("<8I", 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x7FBFFFFF),
        ),
    }
    c.file(
        "nan_payloads",
        "payload",
        build(t),
        ok=t,
        refs=[README],
        note="signalling NaNs, -0, denormals: bytes must come through unchanged",
    )
    t = {"b": tensor("BOOL", [6], data=b"\0\1\2\x7f\x80\xff")}
    c.file("bool_not_0_1", "payload", build(t), ok=t, note="the package does not look at values")


def other_files(c):
    # files that are something else
    c.file(
        "git_lfs_pointer",
        "other_file",
        LFS,
        reason="git-lfs pointer, not the file",
        refs=["Comfy-Org/ComfyUI#4807", "huggingface/diffusers#5520"],
        note="users see 'header too large'; a good message says LFS pointer",
    )
    c.file(
        "html_page",
        "other_file",
        b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n" * 4,
        reason="not a safetensors file",
    )
    c.file(
        "zip_pickle", "other_file", b"PK\x03\x04\0\0\x08\x08" + bytes(200), reason="not a safetensors file (zip, torch .pt/.bin)"
    )


def truncations(c):
    # truncation
    t = {"a": tensor("F32", [1000], seed="t"), "b": tensor("BF16", [333], seed="t")}
    whole = build(t)
    c.file("cut_last_byte", "truncated", whole[:-1], reason="file shorter than the header says", refs=["invoke-ai/InvokeAI#7009"])
    c.file("cut_in_first_tensor", "truncated", whole[:-3000], reason="file shorter than the header says")
    c.file("cut_in_header", "truncated", whole[:60], reason="header length past the end of the file")


def many_tensors(c):
    # many
    t = {f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.w{i % 3}.weight": tensor("BF16", [2, 3], seed=i) for i in range(60000)}
    c.file(
        "tensors_60k",
        "many",
        build(t),
        ok=t,
        limits={"max_seconds": 20, "max_extra_mb": 400},
        refs=["vllm-project/vllm#61303 (232k tensors)"],
    )


def bombs(c):
    # work bombs
    c.file(
        "deep_nesting",
        "bomb",
        pack(b"[" * 200_000 + b"]" * 200_000),
        reason="header is not a JSON object",
        limits={"max_seconds": 2, "max_extra_mb": 100},
        note="json.loads raises RecursionError: must become the loader's own error",
    )
    c.file(
        "overlap_amplifier",
        "bomb",
        pack(dumps({f"weight_{i}": info("F32", [200, 200], 0, 160000) for i in range(2000)}), bytes(160000)),
        reason="tensors overlap",
        limits={"max_seconds": 2, "max_extra_mb": 100},
        refs=["safetensors attacks/ attempt 3"],
    )
    c.file(
        "product_of_many",
        "bomb",
        pack(
            b'{"a":{"dtype":"U8","shape":[' + b",".join([b"9223372036854775807"] * 300_000) + b'],"data_offsets":[0,8]}}',
            bytes(8),
        ),
        reason="element count overflows 64 bits",
        limits={"max_seconds": 2, "max_extra_mb": 200},
        note="the bare product takes minutes",
    )
    c.file(
        "long_number",
        "bomb",
        pack(b'{"a":{"dtype":"U8","shape":[' + b"1" * 5000 + b'],"data_offsets":[0,8]}}', bytes(8)),
        reason="number out of range",
        limits={"max_seconds": 2, "max_extra_mb": 100},
        note="int() of more than 4300 digits raises ValueError",
    )


def big_tensors(c):
    # big (optional)
    n = (1 << 31) + 8192
    h = dumps({"big": info("U8", [n], 0, n), "tail": info("U8", [5], n, n + 5)})

    def big_2g(p):
        sparse(h, n + 5)(p)
        with open(p, "r+b") as f:
            f.seek(8 + len(h) + n)
            f.write(b"tail!")

    if c.big:
        c.file(
            "tensor_over_2gib",
            "big",
            big_2g,
            big=True,
            ok={"big": {"dtype": "U8", "shape": [n], "nbytes": n, "sha256": zeros_sha256(n)}, "tail": ("U8", [5], b"tail!")},
            note="one read(2) returns at most 2147479552 bytes: a short read must be continued. Sparse file.",
        )


def spellings(c):
    # spellings that no writer uses and the package takes, and those next to them that it does not
    t = {"a": ("F64", [1], b"12345678")}

    def one(entry, name=b'"a"'):
        return pack(b"{" + name + b":" + entry + b"}", b"12345678")

    full = b'{"dtype":"F64","shape":[1],"data_offsets":[0,8]'
    c.file("entry_as_array", "spelling", one(b'["F64",[1],[0,8]]'), ok=t, note="serde takes a struct's fields in order")
    c.file("entry_as_array_short", "spelling", one(b'["F64",[1]]'), reason="entry lacks data_offsets")
    c.file("entry_as_array_long", "spelling", one(b'["F64",[1],[0,8],0]'), reason="entry has too many items")
    c.file(
        "dtype_as_map",
        "spelling",
        one(b'{"dtype":{"F64":null},"shape":[1],"data_offsets":[0,8]}'),
        ok=t,
        note="serde takes an enum as a map from its variant to null",
    )
    c.file(
        "dtype_as_map_empty_object",
        "spelling",
        one(b'{"dtype":{"F64":{}},"shape":[1],"data_offsets":[0,8]}'),
        reason="dtype is not a string",
    )
    c.file("field_name_escaped", "spelling", one(full.replace(b"dtype", b"d\\u0074ype") + b"}"), ok=t)
    c.file("field_twice_once_escaped", "spelling", one(full + b',"d\\u0074ype":"F64"}'), reason="duplicate field")
    c.file("name_escaped_pair", "spelling", one(full + b"}", b'"\\ud83e\\uddea"'), ok={"\U0001f9ea": t["a"]})
    c.file("name_escaped_pair_reversed", "spelling", one(full + b"}", b'"\\uddea\\ud83e"'), reason="lone surrogate in a name")
    c.file("header_spaced", "spelling", pack(b'\n{ "a"\t:\r\n' + full + b"\n} }\n", b"12345678"), ok=t, stricter=LEADING)
    c.file("byte_order_mark", "spelling", pack(b"\xef\xbb\xbf{}"), reason="header is not JSON (byte order mark)")
    c.file("form_feed", "spelling", pack(b"{}\x0c"), reason="characters after the JSON object")
    c.file(
        "shape_minus_zero", "spelling", pack(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), reason="-0 is a float"
    )
    c.file("offset_exponent", "spelling", one(full.replace(b"8]", b"8e0]") + b"}"), reason="offsets are not integers")
    c.file("unknown_number_out_of_range", "spelling", one(full + b',"x":1e999}'), reason="number out of range")
    c.file("unknown_nested_125", "spelling", one(full + b',"x":' + b"[" * 125 + b"]" * 125 + b"}"), ok=t, stricter=UNKNOWN)
    c.file("unknown_nested_126", "spelling", one(full + b',"x":' + b"[" * 126 + b"]" * 126 + b"}"), reason="nested too deeply")
    c.file("unknown_dup_key", "spelling", one(full + b',"x":{"y":1,"y":2}}'), ok=t, stricter=DUPLICATE)


def mistaken_files(c):
    # other files that end up under this name
    def other(id_, blob, reason):
        c.file(id_, "other_file", blob, reason=reason)

    other("all_zero", bytes(4096), "allocated but never written")
    other("gguf", b"GGUF\x03\0\0\0" + bytes(200), "not a safetensors file (GGUF)")
    other("json_index", index({"a": shard(1, 2)}), "not a safetensors file (an index)")
    other("s3_error", b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "not a safetensors file (S3 error)")
    other("pickle", b"\x80\x02}q\0." + bytes(200), "not a safetensors file (pickle)")
    other("gzip", b"\x1f\x8b\x08\0" + bytes(200), "not a safetensors file (gzip)")


def index_folders(c):
    # index directories (policy)
    t1 = {"model.embed.weight": tensor("BF16", [8, 4], seed="i1"), "model.l0.w": tensor("F32", [4], seed="i1")}
    t2 = {"model.l1.w": tensor("F32", [4], seed="i2"), "lm_head.weight": tensor("BF16", [8, 4], seed="i2")}
    s1, s2 = shard(1, 2), shard(2, 2)
    wm = {**dict.fromkeys(t1, s1), **dict.fromkeys(t2, s2)}
    both = {**in_shard(t1, s1), **in_shard(t2, s2)}
    f1, f2 = build(t1, meta={"format": "pt"}), build(t2, meta={"format": "pt"})

    def ck(extra=None, w=None, drop=()):
        files = {f"ckpt/{s1}": f1, f"ckpt/{s2}": f2, INDEX: index(w if w is not None else wm, len(f1) + len(f2))}
        files.update(extra or {})
        return {k: v for k, v in files.items() if k not in drop}

    c.dir("index_good", ck(), ok=both)
    c.dir("index_total_size_wrong", ck({INDEX: index(wm, 1)}), ok=both, note="total_size is informative only; a warning is fine")
    c.dir("single_file_no_index", {"ckpt/model.safetensors": f1}, ok=in_shard(t1, "model.safetensors"))
    c.dir(
        "index_missing_shard",
        ck(drop=[f"ckpt/{s2}"]),
        reason="shard named in the index is missing",
        refs=["sgl-project/sglang#32279"],
    )
    c.dir(
        "index_parent_path",
        ck({"outside.safetensors": f2}, w={**dict.fromkeys(t1, s1), **dict.fromkeys(t2, "../outside.safetensors")}),
        reason="shard path leaves the checkpoint folder",
        note="the file outside exists and is valid",
    )
    c.dir(
        "index_absolute_path",
        ck({"elsewhere/x.safetensors": f2}, w={**dict.fromkeys(t1, s1), **dict.fromkeys(t2, "@BASE@/elsewhere/x.safetensors")}),
        reason="shard path is absolute",
        note="the file exists and is valid",
    )
    c.dir(
        "index_wrong_shard",
        ck(w={**wm, "model.l1.w": s1}),
        reason="tensor is not in the shard the index names",
        refs=["huggingface/huggingface_hub#4740", "huggingface/huggingface_hub#4728"],
    )
    c.dir(
        "index_stray_consolidated",
        ck({"ckpt/consolidated.safetensors": build({"tok_embeddings.weight": tensor("BF16", [8, 4], seed="c")})}),
        ok=both,
        refs=["vllm-project/vllm#40765", "Blaizzy/mlx-vlm#1464"],
        note="a file that the index does not name is not loaded",
    )
    extra2 = {**t2, "model.l9.unused": tensor("F32", [2], seed="x")}
    c.dir(
        "index_shard_has_more",
        ck({f"ckpt/{s2}": build(extra2)}),
        ok=both,
        stricter="strict mode may refuse; vLLM would yield the extra tensor too",
        note="proposal: the index is the list of tensors; extras are left out with a warning",
    )
    c.dir("index_not_json", ck({INDEX: b"{not json"}), reason="index is not JSON")
    c.dir("index_no_weight_map", ck({INDEX: b'{"metadata":{"total_size":1}}'}), reason="index has no weight_map")
    c.dir(
        "index_value_not_string",
        ck({INDEX: json.dumps({"weight_map": {**wm, "lm_head.weight": 2}}).encode()}),
        reason="weight_map value is not a string",
    )
    c.dir("index_shard_truncated", ck({f"ckpt/{s2}": f2[:-5]}), reason="file shorter than the header says")
    c.dir("index_shard_is_lfs_pointer", ck({f"ckpt/{s1}": LFS}), reason="git-lfs pointer, not the file")
    c.dir(
        "no_index_shards_duplicate_tensor",
        {f"ckpt/{s1}": f1, f"ckpt/{s2}": build({**t2, "model.l0.w": tensor("F32", [4], seed="other")})},
        reason="same name in two shards and no index to choose",
        refs=["JustVugg/colibri#1479"],
    )
    c.dir(
        "hf_cache_symlinks",
        {
            "blobs/aaa": f1,
            "blobs/bbb": f2,
            "blobs/ccc": index(wm),
            "snapshots/rev/" + s1: ("symlink", "../../blobs/aaa"),
            "snapshots/rev/" + s2: ("symlink", "../../blobs/bbb"),
            "snapshots/rev/model.safetensors.index.json": ("symlink", "../../blobs/ccc"),
        },
        ok=both,
        root="snapshots/rev",
        note="the layout of the Hugging Face cache: links that leave the folder are normal and must work",
    )


def every_case(c):
    dtypes(c)
    header_lengths(c)
    header_texts(c)
    entries(c)
    offsets(c)
    overflows(c)
    metadata(c)
    duplicates(c)
    layouts(c)
    shapes(c)
    names(c)
    payloads(c)
    other_files(c)
    truncations(c)
    many_tensors(c)
    bombs(c)
    big_tensors(c)
    spellings(c)
    mistaken_files(c)
    index_folders(c)


def sparse_raw(path, n, total):
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", n))
        f.truncate(total)


def build_odd(tensors, rem):
    infos, data = layout(tensors)
    head = dumps(infos)
    while (8 + len(head)) % 8 != rem:
        head += b" "
    return pack(head, data)


# ------------------------------------------------------------------------------------------------ checking
def verify(out, cases):
    """Ask the installed safetensors package about every file; the returned lines say where a case is not as it says."""
    differences = []
    for case in cases:
        if case["kind"] == "dir":
            case["reference"] = None
            continue
        path = os.path.join(out, case["path"])
        verdicts = {"safe_open": ask_safe_open(path)}
        if os.path.getsize(path) < (1 << 30):
            verdicts["deserialize"] = ask_deserialize(path)
        case["reference"], answer = verdicts["safe_open"]
        if case["reference"] == "error":
            case["reference_error"] = answer
        problems = [f"{who} says {verdict}" for who, (verdict, _) in verdicts.items() if verdict != case["expect"]]
        if case["expect"] == "ok" and not problems:
            problems = compare(case, read_expected(out, case), verdicts)
        if problems:
            differences.append(f"{case['id']} expects {case['expect']}: {'; '.join(problems)}; {str(answer)[:120]}")
    return differences


def read_expected(out, case):
    """The tensors of an 'ok' case: {name: {dtype, shape, nbytes, sha256}}."""
    if "tensors_file" not in case:
        return case["tensors"]
    with open(os.path.join(out, case["tensors_file"]), encoding="utf-8") as f:
        return json.load(f)


def ask_safe_open(path):
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as f:
            return "ok", (set(f.keys()), f.metadata())
    except (SafetensorError, OSError) as e:
        return "error", f"{type(e).__name__}: {e}"


def ask_deserialize(path):
    from safetensors import SafetensorError, deserialize

    try:
        with open(path, "rb") as f:
            return "ok", dict(deserialize(f.read()))
    except SafetensorError as e:
        return "error", f"{type(e).__name__}: {e}"


def compare(case, want, verdicts):
    names, metadata = verdicts["safe_open"][1]
    problems = []
    if names != set(want):
        problems.append("names differ")
    if metadata != case["metadata"]:
        problems.append(f"metadata differs: {metadata!r}")
    for name, t in verdicts["deserialize"][1].items() if "deserialize" in verdicts else ():
        data = bytes(t["data"])
        got = {"dtype": t["dtype"], "shape": t["shape"], "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if got != want[name]:
            problems.append(f"tensor {name[:40]!r} differs")
    return problems


def write_corpus(out, *, big=False, check=False):
    """Write the corpus into the folder `out` and return its manifest; with `check`, ask the installed package as well."""
    os.makedirs(out, exist_ok=True)
    corpus = Corpus(os.fspath(out), big)
    shutil.rmtree(os.path.join(out, "files"), ignore_errors=True)
    every_case(corpus)
    manifest = {"format": 1, "big": big, "cases": corpus.cases}
    if check:
        manifest["differences"] = verify(out, corpus.cases)
    with open(os.path.join(out, "manifest.json"), "w", encoding="utf-8") as f:
        json.dump(manifest, f, indent=1)
    return manifest


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("out")
    ap.add_argument("--big", action="store_true", help="also a sparse file of more than 2 GiB and a header of 100 MB")
    ap.add_argument("--verify", action="store_true", help="compare with the installed safetensors package")
    a = ap.parse_args()
    manifest = write_corpus(a.out, big=a.big, check=a.verify)
    cases, differences = manifest["cases"], manifest.get("differences", [])
    ok = sum(case["expect"] == "ok" for case in cases)
    say = [*differences, f"{len(cases)} cases ({ok} ok, {len(cases) - ok} error) in {a.out}/manifest.json"]
    if a.verify:
        say.append(f"{len(differences)} differ from what the installed safetensors says")
    sys.stdout.write("\n".join(say) + "\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
