"""The loaders for vLLM, on a fake of the little that they use of it: keys, filters, places, registration, hooks.

tests/vllm_jobs has what needs vLLM itself; `scripts/test --vllm` runs it.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import Contents, bytes_of, random_entry, write
from fake_vllm import FakeVllm, LoadConfig, Model, ModelConfig, cache_model, fake_vllm
from ranks import prepare_ranks, run_ranks

import headrace
from headrace.errors import FormatError, OptionError, PeerError, SourceNotFoundError
from headrace.integrations.vllm import register
from headrace.integrations.vllm._settings import LoaderSettings, VllmSettings, read_settings
from headrace.integrations.vllm._streams import open_weights, stream_weights
from headrace.testing.s3server import S3Server

NOTHING = VllmSettings()
SHARDS: dict[str, list[str]] = {
    "a.safetensors": [
        "embed.weight",
        "layers.0.experts.0.up.weight",
        "layers.0.experts.1.up.weight",
        "layers.0.experts.1.up.scale",
    ],
    "b.safetensors": ["norm.weight", "vision.patch.weight"],
    "c.safetensors": ["language.0.weight", "language.1.weight"],
}
CONTENTS: Contents = {
    name: random_entry("F32", (16, 3 + i), seed=i) for i, name in enumerate(name for names in SHARDS.values() for name in names)
}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    with fake_vllm(monkeypatch) as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards with an index, and a stray file."""
    return write_model(tmp_path / "data" / "models" / "tiny")


def write_model(place: Path) -> Path:
    place.mkdir(parents=True)
    for shard, names in SHARDS.items():
        write(place / shard, {name: CONTENTS[name] for name in names})
    weight_map = {name: shard for shard, names in SHARDS.items() for name in names}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (place / "config.json").write_text("{}")
    write(place / "consolidated.safetensors", {"stray": random_entry("U8", (8,))})
    return place


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(folder.parent.parent, access_key="AK", secret_key="SK") as server:
        set_store(server, monkeypatch)
        yield server


def set_store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)


def loader(extra: dict[str, Any] | None = None, load_format: str = "headrace", **config: Any) -> Any:
    """A loader, made as vLLM makes it."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as FORMATS

    register()
    return FORMATS[load_format](LoadConfig(load_format=load_format, model_loader_extra_config=extra or {}, **config))


def model(names: list[str] | None = None) -> Any:
    return Model({name: CONTENTS[name].shape for name in (CONTENTS if names is None else names)})


def names_read(given: Any, config: ModelConfig, target: Any | None = None) -> set[str]:
    """Names of what a model was given, all of it right."""
    target = target if target is not None else model([])
    given.load_weights(target, config)
    assert all(bytes_of(tensor) == CONTENTS[name].data for name, tensor in target.seen.items() if name in CONTENTS)
    return set(target.seen)


# -- keys ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, LoaderSettings()),
        (None, LoaderSettings()),
        ({"distributed": True}, LoaderSettings(distributed=True)),
        ({"distributed": False}, LoaderSettings(distributed=False)),
        ({"concurrency": 16}, LoaderSettings(options=headrace.Options(concurrency=16))),
        ({"memory_limit": -1}, LoaderSettings(options=headrace.Options(memory_limit=-1))),
        ({"memory_limit": "2GiB"}, LoaderSettings(options=headrace.Options(memory_limit=2 << 30))),
        ({"pinned_staging": True}, LoaderSettings(options=headrace.Options(pin="auto"))),
        ({"pinned_staging": False}, LoaderSettings(options=headrace.Options(pin="off"))),
        ({"pinned_staging": "require"}, LoaderSettings(options=headrace.Options(pin="require"))),
        ({"gds": True, "in_place": "off"}, LoaderSettings(options=headrace.Options(gds="auto", in_place="off"))),
        ({"direct_io": "on", "partition": "files"}, LoaderSettings(options=headrace.Options(direct_io="on", partition="files"))),
        ({"source": "s3://b/m", "metadata": "meta"}, LoaderSettings(source="s3://b/m", metadata="meta")),
        ({"dtype": "bfloat16"}, LoaderSettings(dtype="bfloat16")),
        ({"dtype": {"*.norm": "float32"}}, LoaderSettings(dtype={"*.norm": "float32"})),
        ({"verify": "auto"}, LoaderSettings(verify="auto")),
    ],
)
def test_an_extra_config_is_translated(extra: Any, expected: LoaderSettings) -> None:
    assert read_settings(extra, load_format="headrace", environment=NOTHING) == expected


@pytest.mark.parametrize(
    ("extra", "option"),
    [
        ({"concurency": 4}, "concurency"),
        ({"num_threads": 4}, "num_threads"),
        ({"distributed": 1}, "distributed"),
        ({"distributed": "yes"}, "distributed"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": True}, "concurrency"),
        ({"concurrency": "4"}, "concurrency"),
        ({"memory_limit": -2}, "memory_limit"),
        ({"memory_limit": True}, "memory_limit"),
        ({"pinned_staging": 1}, "pinned_staging"),
        ({"pinned_staging": []}, "pinned_staging"),
        ({"gds": "on"}, "gds"),
        ({"direct_io": True}, "direct_io"),
        ({"partition": "tensors"}, "partition"),
        ({"source": ""}, "source"),
        ({"source": 3}, "source"),
        ({"dtype": 16}, "dtype"),
        ({"dtype": {"a": 16}}, "dtype"),
        ({"verify": 1.5}, "verify"),
        ({"pattern": "x-{rank}-{part}.safetensors"}, "pattern"),
        ([], "extra_config"),
    ],
)
def test_what_an_extra_config_cannot_say_is_refused_by_name(extra: Any, option: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_settings(extra, load_format="headrace", environment=NOTHING)
    assert caught.value.option == option
    assert option in str(caught.value) or option == "extra_config"


@pytest.mark.parametrize("extra", [{"distributed": True}, {"dtype": "float16"}])
@pytest.mark.parametrize("load_format", ["headrace_sharded", "runai_streamer_sharded"])
def test_sharded_files_refuse_what_only_a_whole_checkpoint_has(extra: dict[str, Any], load_format: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_settings(extra, load_format=load_format, environment=NOTHING)
    assert caught.value.option in extra


def test_a_near_miss_is_told_the_key_that_was_meant() -> None:
    with pytest.raises(OptionError, match="memory_limit"):
        read_settings({"memory_limits": 1}, load_format="headrace", environment=NOTHING)


# -- variables -----------------------------------------------------------------------------------------------------------------


FILES, LIMIT, SINGLE = "VLLM_RUNAI_CPU_WEIGHT_FILES", "VLLM_RUNAI_CPU_MEMORY_LIMIT", "VLLM_RUNAI_SINGLE_ENGRAM_READER"


@pytest.mark.parametrize(
    ("variables", "places", "limits"),
    [
        ({FILES: "a.safetensors, b.safetensors"}, {"file:a.safetensors": "cpu", "file:b.safetensors": "cpu"}, None),
        ({FILES: "a.safetensors", LIMIT: "1048576"}, {"file:a.safetensors": "cpu"}, {"cpu": 1 << 20}),
        ({FILES: "a.safetensors", SINGLE: "1", LIMIT: "0"}, {"file:a.safetensors": "shared-cpu"}, {"shared-cpu": 0}),
        ({SINGLE: "0"}, {}, None),
    ],
)
def test_variables_name_files_for_host_memory(
    variables: dict[str, str], places: dict[str, str], limits: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = read_settings({}, load_format="headrace", environment=VllmSettings.from_environment())
    assert (settings.places, settings.options.memory_limits) == (places, limits)


@pytest.mark.parametrize(("variable", "value"), [(LIMIT, "1048576"), (SINGLE, "1"), (SINGLE, "perhaps")])
def test_a_variable_about_files_that_are_not_named_is_refused(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionError) as caught:
        VllmSettings.from_environment()
    assert caught.value.option == variable


def test_a_limit_that_is_none_is_refused_by_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILES, "a.safetensors")
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(OptionError) as caught:
        VllmSettings.from_environment()
    assert caught.value.option == LIMIT


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("single", ["0", "1"])
def test_files_for_host_memory_are_loaded_with_the_rest(single: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILES, "b.safetensors")
    monkeypatch.setenv(SINGLE, single)
    assert names_read(loader(), ModelConfig(str(folder))) == set(CONTENTS)


@pytest.mark.usefixtures("vllm")
def test_a_file_for_host_memory_that_is_not_in_the_checkpoint_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILES, "d.safetensors")
    target = model([])
    with pytest.raises(OptionError, match=r"d\.safetensors"):
        loader().load_weights(target, ModelConfig(str(folder)))
    assert not target.seen


def test_sharded_files_are_not_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILES, "a.safetensors")
    with pytest.raises(OptionError) as caught:
        read_settings({}, load_format="headrace_sharded", environment=VllmSettings.from_environment())
    assert caught.value.option == FILES


def test_borrowed_weights_may_be_asked_for_since_none_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RUNAI_BORROWED_WEIGHTS", "1")
    assert read_settings({}, load_format="headrace", environment=VllmSettings.from_environment()) == LoaderSettings()


def test_a_switch_that_is_none_is_refused(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_VLLM_TAKEOVER", "perhaps")
    with pytest.raises(OptionError) as caught:
        register()
    assert caught.value.option == "HEADRACE_VLLM_TAKEOVER"
    assert "headrace" not in vllm.formats


# -- registration --------------------------------------------------------------------------------------------------------------


def test_the_plugin_imports_neither_vllm_nor_torch() -> None:
    script = "import sys, headrace.integrations.vllm; print(sorted({'torch', 'numpy', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_registering_twice_is_registering_once(vllm: FakeVllm) -> None:
    register()
    first = dict(vllm.formats)
    wrapped = vllm.module("vllm.engine.arg_utils").is_cloud_storage
    pull = vllm.module("vllm.transformers_utils.runai_utils").runai_pull_files
    register()
    assert vllm.formats == first
    assert vllm.module("vllm.engine.arg_utils").is_cloud_storage is wrapped
    assert vllm.module("vllm.transformers_utils.runai_utils").runai_pull_files is pull
    assert vllm.module("vllm.transformers_utils.runai_utils").SUPPORTED_SCHEMES.count("hf://") == 1
    assert vllm.warned == []


def test_runais_formats_are_left_alone_unless_they_are_asked_for(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = vllm.formats["runai_streamer"]
    register()
    assert vllm.formats["runai_streamer"] is theirs
    monkeypatch.setenv("HEADRACE_VLLM_TAKEOVER", "1")
    register()
    assert vllm.formats["runai_streamer"] is vllm.formats["headrace"]
    assert vllm.formats["runai_streamer_sharded"] is vllm.formats["headrace_sharded"]
    assert vllm.warned == []


def test_without_vllm_registering_says_so_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    register()
    assert "cannot add its load formats" in caplog.text


def test_variables_for_loaders_do_not_disturb_a_vllm_that_uses_none_of_them(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "much")
    register()
    assert verified(vllm, "safetensors", "").load_config.load_format == "safetensors"
    with pytest.raises(OptionError):
        verified(vllm, "headrace", "")


def test_a_vllm_that_loaders_do_not_fit_says_so_when_they_are_used(vllm: FakeVllm, folder: Path) -> None:
    module = vllm.module("vllm.model_executor.model_loader.default_loader")
    module.DefaultModelLoader = type("DefaultModelLoader", (module.DefaultModelLoader.__base__,), {})
    register()
    for load_format in ("headrace", "headrace_sharded"):
        with pytest.raises(ImportError, match=r"0\.0\.fake"):
            vllm.formats[load_format](LoadConfig(load_format=load_format))
    assert folder.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.config.vllm", "VllmConfig"),
        ("vllm.config.model", "checkpoint_has_lm_head"),
        ("vllm.transformers_utils.runai_utils", "SUPPORTED_SCHEMES"),
        ("vllm.transformers_utils.runai_utils", "runai_pull_files"),
    ],
)
def test_where_a_hook_does_not_fit_folders_still_load_and_a_line_names_it(
    module: str, name: str, vllm: FakeVllm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delattr(vllm.module(module), name)
    assert names_read(loader(), ModelConfig(str(folder))) == set(CONTENTS)
    assert "does not fit vLLM 0.0.fake" in caplog.text
    assert "source" in caplog.text


def test_a_hook_is_not_put_on_a_function_with_other_arguments(vllm: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    def checkpoint_has_lm_head(path: str) -> bool:
        return bool(path)

    module = vllm.module("vllm.config.model")
    module.checkpoint_has_lm_head = checkpoint_has_lm_head
    register()
    assert module.checkpoint_has_lm_head is checkpoint_has_lm_head
    assert "revision" in caplog.text


# -- which tensors -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm")
def test_the_index_decides_what_is_loaded(folder: Path) -> None:
    assert names_read(loader(), ModelConfig(str(folder)), model()) == set(CONTENTS)


@pytest.mark.usefixtures("vllm")
def test_a_parameter_that_nothing_was_loaded_into_is_an_error(folder: Path) -> None:
    target = Model({"embed.weight": (16, 3), "absent.weight": (2,)})
    with pytest.raises(ValueError, match=r"absent\.weight"):
        loader().load_weights(target, ModelConfig(str(folder)))


@pytest.mark.usefixtures("vllm")
def test_experts_of_other_ranks_are_not_read_and_their_scales_are(folder: Path) -> None:
    config = ModelConfig(str(folder))
    config.expert_ids = {0}  # type: ignore[attr-defined]
    assert names_read(loader(), config) == set(CONTENTS) - {"layers.0.experts.1.up.weight"}


@pytest.mark.usefixtures("vllm")
def test_shards_of_a_language_model_that_is_not_run_are_not_read(folder: Path) -> None:
    target = model([])
    target.language_prefixes = ("language.",)
    assert names_read(loader(), ModelConfig(str(folder)), target) == set(CONTENTS) - set(SHARDS["c.safetensors"])


@pytest.mark.usefixtures("vllm")
def test_names_of_a_language_model_are_told_by_what_the_model_calls_them(folder: Path) -> None:
    target = model([])
    target.language_prefixes = ("text.",)
    target.hf_to_vllm_mapper = SimpleNamespace(map_name=lambda name: name.replace("language.", "text."))
    assert names_read(loader(), ModelConfig(str(folder)), target) == set(CONTENTS) - set(SHARDS["c.safetensors"])


@pytest.mark.usefixtures("vllm")
def test_what_a_model_has_no_use_for_is_not_read(folder: Path) -> None:
    target = model([])
    target.is_unused_checkpoint_weight = lambda name: name.startswith("vision.")
    assert names_read(loader(), ModelConfig(str(folder)), target) == set(CONTENTS) - {"vision.patch.weight"}


@pytest.mark.usefixtures("vllm")
def test_a_model_that_has_no_use_for_anything_is_given_everything(folder: Path) -> None:
    target = model([])
    target.is_unused_checkpoint_weight = lambda name: bool(name)
    assert names_read(loader(), ModelConfig(str(folder)), target) == set(CONTENTS)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("patterns", "expected"),
    [(["consolidated*.safetensors"], {"stray"}), (["b.*", "c.*"], set(SHARDS["b.safetensors"] + SHARDS["c.safetensors"]))],
)
def test_patterns_of_a_model_override_the_index(patterns: list[str], expected: set[str], folder: Path) -> None:
    target = model([])
    target.allow_patterns_overrides = patterns
    assert names_read(loader(), ModelConfig(str(folder)), target) == expected


@pytest.mark.usefixtures("vllm")
def test_patterns_that_nothing_fits_are_an_error(folder: Path) -> None:
    target = model([])
    target.allow_patterns_overrides = ["x.*"]
    with pytest.raises(SourceNotFoundError):
        loader().load_weights(target, ModelConfig(str(folder)))


@pytest.mark.usefixtures("vllm")
def test_secondary_weights_come_under_their_prefix_from_their_folder(folder: Path, tmp_path: Path) -> None:
    given = loader()
    other = tmp_path / "other"
    (other / "sub").mkdir(parents=True)
    write(other / "sub" / "model.safetensors", {"w": random_entry("F32", (4,))})
    target = model([])
    target.secondary_weights = [given.Source(str(other), None, subfolder="sub", prefix="tower.")]
    assert names_read(given, ModelConfig(str(folder)), target) == {*CONTENTS, "tower.w"}


@pytest.mark.usefixtures("vllm", "store")
def test_secondary_weights_of_a_models_own_folder_come_from_the_store(folder: Path, tmp_path: Path) -> None:
    given = loader()
    write(folder / "head.safetensors", {"w": random_entry("F32", (4,))})
    target = model([])
    target.secondary_weights = [given.Source(str(tmp_path / "mirror"), None, prefix="x.", allow_patterns_overrides=["head.*"])]
    config = ModelConfig(str(tmp_path / "mirror"), model_weights="s3://models/tiny")
    assert names_read(given, config, target) == {*CONTENTS, "x.w"}


@pytest.mark.usefixtures("vllm")
def test_heads_in_files_of_pickle_are_left_to_vllms_own_loader(folder: Path) -> None:
    given, target = loader(), model([])
    torch.save({"weight": torch.ones(3)}, folder / "head.pt")
    target.secondary_weights = [given.Source(str(folder), None, prefix="head.", allow_patterns_overrides=["head.pt"])]
    assert names_read(given, ModelConfig(str(folder)), target) == {*CONTENTS, "head.weight"}


@pytest.mark.usefixtures("vllm", "store")
def test_heads_in_files_of_pickle_are_not_loaded_from_a_store(tmp_path: Path) -> None:
    given, target = loader(), model([])
    target.secondary_weights = [given.Source(str(tmp_path), None, prefix="head.", allow_patterns_overrides=["head.pt"])]
    with pytest.raises(OptionError, match=r"head\.pt of s3://models/tiny"):
        given.load_weights(target, ModelConfig(str(tmp_path), model_weights="s3://models/tiny"))


@pytest.mark.usefixtures("vllm")
def test_files_of_a_store_that_are_to_be_ignored_are(folder: Path, store: S3Server) -> None:
    (folder / "model.safetensors.index.json").unlink()
    given = loader(ignore_patterns=["consolidated*", "original/**/*"])
    assert names_read(given, ModelConfig("/nowhere", model_weights="s3://models/tiny")) == set(CONTENTS)
    assert not any("consolidated" in request.key for request in store.requests)


@pytest.mark.usefixtures("vllm")
def test_a_dtype_converts_what_is_named(folder: Path) -> None:
    target = model([])
    loader({"dtype": {"norm.*": "bfloat16"}}).load_weights(target, ModelConfig(str(folder)))
    assert target.seen["norm.weight"].dtype is torch.bfloat16
    assert target.seen["embed.weight"].dtype is torch.float32


@pytest.mark.usefixtures("vllm")
def test_verified_weights_that_changed_are_not_loaded(folder: Path) -> None:
    headrace.verify(folder, write=True)
    data = bytearray((folder / "b.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "b.safetensors").write_bytes(data)
    with pytest.raises(headrace.IntegrityError):
        loader({"verify": True}).load_weights(model([]), ModelConfig(str(folder)))


@pytest.mark.usefixtures("vllm")
def test_what_torchao_quantized_is_refused(folder: Path) -> None:
    with pytest.raises(OptionError):
        loader(safetensors_load_strategy="torchao").load_weights(model([]), ModelConfig(str(folder)))


# -- where weights are ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm", "store")
def test_weights_of_a_model_in_a_store_are_read_there(tmp_path: Path) -> None:
    config = ModelConfig(str(tmp_path / "mirror"), model_weights="s3://models/tiny")
    assert names_read(loader(), config) == set(CONTENTS)


@pytest.mark.usefixtures("vllm", "store")
def test_a_source_stands_for_the_models_path_and_not_for_one_to_reload_from(folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(str(tmp_path))
    extra = {"source": "s3://models/tiny"}
    assert names_read(loader(extra), config) == set(CONTENTS)
    write(tmp_path / "model.safetensors", {"other": random_entry("F32", (4,))})
    assert set(dict(loader(extra).get_all_weights(config, model([])))) == set(CONTENTS)
    (tmp_path / "next").mkdir()
    write(tmp_path / "next" / "model.safetensors", {"other": random_entry("F32", (4,))})
    config.model = str(tmp_path / "next")
    assert set(dict(loader(extra).get_all_weights(config, model([])))) == {"other"}
    assert folder.exists()


@pytest.mark.usefixtures("store")
def test_a_draft_has_weights_of_its_own_and_one_in_the_targets_checkpoint_has_the_targets(vllm: FakeVllm, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    write(tmp_path / "draft" / "model.safetensors", {"draft": random_entry("F32", (4,))})
    target = ModelConfig(str(tmp_path / "mirror"), model_weights="s3://models/tiny")
    vllm.current = SimpleNamespace(speculative_config=SimpleNamespace(target_model_config=target))
    assert names_read(loader({"source": "s3://models/tiny"}), ModelConfig(str(tmp_path / "draft"))) == {"draft"}
    assert names_read(loader(), ModelConfig(str(tmp_path / "mirror"))) == set(CONTENTS)


@pytest.mark.usefixtures("vllm")
def test_a_model_of_the_hub_is_read_from_its_cache(folder: Path) -> None:
    cache_model("org/tiny", folder)
    (folder / "consolidated.safetensors").unlink()
    assert names_read(loader(), ModelConfig("org/tiny")) == set(CONTENTS)


@pytest.mark.parametrize(
    ("place", "revision", "expected"),
    [
        ("hf://org/m", "v1", "hf://org/m@v1"),
        ("hf://org/m/sub", "v1", "hf://org/m@v1/sub"),
        ("hf://org/m@v2", "v1", "hf://org/m@v2"),
        ("hf://org/m", None, "hf://org/m"),
        ("s3://b/m", "v1", "s3://b/m"),
        ("/data/m", "v1", "/data/m"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_a_revision_goes_into_a_url_of_the_hub(place: str, revision: str | None, expected: str) -> None:
    from headrace.integrations.vllm._loader import with_revision

    assert with_revision(place, revision) == expected


@pytest.mark.usefixtures("vllm")
def test_a_mirrored_index_stands_in_for_the_stores(
    folder: Path, store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RUNAI_USE_LOCAL_WEIGHT_INDEX", "1")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (mirror / "model.safetensors.index.json").write_text(json.dumps(index))
    config = ModelConfig(str(mirror), model_weights="s3://models/tiny")
    assert names_read(loader(), config) == set(CONTENTS)
    assert not any("index.json" in request.key or "list-type" in request.target for request in store.requests)
    index["weight_map"]["absent"] = "a.safetensors"
    (mirror / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError):
        loader().load_weights(model([]), config)


@pytest.mark.usefixtures("vllm")
def test_saved_metadata_stands_in_for_the_listing_and_not_for_that_of_another_model(
    folder: Path, store: S3Server, tmp_path: Path
) -> None:
    extra = {"metadata": str(tmp_path / "known")}
    headrace.save_metadata(folder, tmp_path / "known")
    config = ModelConfig(str(tmp_path / "mirror"), model_weights="s3://models/tiny")
    assert names_read(loader(extra), config) == set(CONTENTS)
    assert not any("index.json" in request.key or "list-type" in request.target for request in store.requests)
    (tmp_path / "next").mkdir()
    write(tmp_path / "next" / "model.safetensors", {"other": random_entry("F32", (4,))})
    config.model, config.model_weights = str(tmp_path / "next"), ""
    assert set(dict(loader(extra).get_all_weights(config, model([])))) == {"other"}


# -- sharded -------------------------------------------------------------------------------------------------------------------


class State(torch.nn.Module):
    """A model whose state has the names of the files, padded as LoRA pads some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6))
        self.padded = torch.nn.Parameter(torch.full((5, 3), -1.0))
        self.register_buffer("scale", torch.zeros((), dtype=torch.float64))


def save_state(place: Path, rank: int = 0, **arguments: Any) -> dict[str, torch.Tensor]:
    state = {"weight": torch.randn(4, 6), "padded": torch.randn(2, 3), "scale": torch.tensor(2.5, dtype=torch.float64)}
    headrace.save_sharded(state, place, rank=rank, **arguments)
    return state


@pytest.mark.usefixtures("vllm")
def test_sharded_files_fill_the_parameters_where_they_are(tmp_path: Path) -> None:
    state, target = save_state(tmp_path, part_nbytes=64), State()
    address = target.weight.data_ptr()
    loader(load_format="headrace_sharded").load_weights(target, ModelConfig(str(tmp_path)))
    assert torch.equal(target.weight, state["weight"])
    assert target.weight.data_ptr() == address
    assert torch.equal(target.padded[:2], state["padded"])
    assert bool((target.padded[2:] == -1).all())
    assert torch.equal(target.scale, state["scale"])


def test_each_rank_and_stage_has_files_of_its_own(vllm: FakeVllm, tmp_path: Path) -> None:
    pattern = "stage-{pp_rank}-of-{tp_rank}-{part}.safetensors"
    state, target = save_state(tmp_path, rank=1, pattern="stage-2-of-{rank}-{part}.safetensors"), State()
    vllm.tp.rank_in_group, vllm.pp.rank_in_group = 1, 2
    loader({"pattern": pattern}, "headrace_sharded").load_weights(target, ModelConfig(str(tmp_path)))
    assert torch.equal(target.weight, state["weight"])
    vllm.tp.rank_in_group = 0
    with pytest.raises(SourceNotFoundError):
        loader({"pattern": pattern}, "headrace_sharded").load_weights(target, ModelConfig(str(tmp_path)))


@pytest.mark.usefixtures("vllm")
def test_a_pattern_without_a_rank_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path)
    with pytest.raises(OptionError):
        loader({"pattern": "part-{part}.safetensors"}, "headrace_sharded").load_weights(State(), ModelConfig(str(tmp_path)))


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("change", ["missing", "unexpected", "larger"])
def test_files_that_are_not_of_this_model_change_nothing(change: str, tmp_path: Path) -> None:
    state = save_state(tmp_path)
    if change == "missing":
        del state["scale"]
    elif change == "unexpected":
        state["more"] = torch.zeros(2)
    else:
        state["weight"] = torch.zeros(4, 7)
    headrace.save_sharded(state, tmp_path, rank=0)
    target = State()
    with pytest.raises(FormatError) as caught:
        loader(load_format="headrace_sharded").load_weights(target, ModelConfig(str(tmp_path)))
    assert caught.value.tensor == {"missing": "scale", "unexpected": "more", "larger": "weight"}[change]
    assert not target.weight.any()


@pytest.mark.usefixtures("vllm")
def test_sharded_files_are_given_as_they_are_to_load_them_again(tmp_path: Path) -> None:
    state = save_state(tmp_path)
    found = dict(loader(load_format="headrace_sharded").get_all_weights(ModelConfig(str(tmp_path)), State()))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.usefixtures("vllm", "store")
def test_sharded_files_of_a_store_are_taken_over_with_the_documented_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_VLLM_TAKEOVER", "1")
    state, target = save_state(folder.parent / "sharded"), State()
    extra = {"concurrency": 16, "memory_limit": 5368709120, "pattern": "model-rank-{rank}-part-{part}.safetensors"}
    config = ModelConfig("/nowhere", model_weights="s3://models/sharded")
    loader(extra, "runai_streamer_sharded").load_weights(target, config)
    assert torch.equal(target.weight, state["weight"])


@pytest.mark.usefixtures("vllm")
def test_verified_sharded_files_that_changed_are_not_loaded(tmp_path: Path) -> None:
    save_state(tmp_path)
    headrace.verify(tmp_path, write=True)
    loader({"verify": True}, "headrace_sharded").load_weights(State(), ModelConfig(str(tmp_path)))
    save_state(tmp_path)
    with pytest.raises(headrace.HeadraceError):
        loader({"verify": True}, "headrace_sharded").load_weights(State(), ModelConfig(str(tmp_path)))


# -- urls as models ------------------------------------------------------------------------------------------------------------


def verified(vllm: FakeVllm, load_format: str, weights: str, extra: Any = None, model: str = "m") -> Any:
    """A vLLM config after the check of load formats."""
    load = LoadConfig(load_format=load_format, model_loader_extra_config=extra or {})
    config = vllm.module("vllm.config.vllm").VllmConfig(load, ModelConfig(model, model_weights=weights))
    config.try_verify_and_update_config()
    return config


@pytest.mark.parametrize("load_format", ["headrace", "headrace_sharded"])
def test_our_formats_are_allowed_for_models_from_stores(load_format: str, vllm: FakeVllm) -> None:
    register()
    assert verified(vllm, load_format, "s3://b/m").load_config.load_format == load_format


def test_other_formats_are_checked_as_before(vllm: FakeVllm) -> None:
    register()
    assert verified(vllm, "auto", "s3://b/m").load_config.load_format == "runai_streamer"
    with pytest.raises(ValueError, match="load_format"):
        verified(vllm, "safetensors", "s3://b/m")


def test_a_url_of_the_hub_is_ours_by_itself(vllm: FakeVllm) -> None:
    register()
    assert verified(vllm, "auto", "hf://org/m").load_config.load_format == "headrace"
    assert vllm.module("vllm.engine.arg_utils").is_cloud_storage("hf://org/m")
    assert not vllm.module("vllm.engine.arg_utils").is_cloud_storage("org/m")


def test_a_load_format_comes_back_where_the_check_fails(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    config_type = vllm.module("vllm.config.vllm").VllmConfig

    def fail(self: Any) -> None:
        raise RuntimeError(self.load_config.load_format)

    monkeypatch.setattr(config_type, "try_verify_and_update_config", fail)
    register()
    load = LoadConfig()
    with pytest.raises(RuntimeError, match="runai_streamer"):
        config_type(load, ModelConfig("m", model_weights="s3://b/m")).try_verify_and_update_config()
    assert load.load_format == "headrace"


def test_an_extra_config_is_checked_before_an_engine_starts(vllm: FakeVllm) -> None:
    register()
    with pytest.raises(OptionError) as caught:
        verified(vllm, "headrace", "", {"concurency": 1})
    assert caught.value.option == "concurency"
    verified(vllm, "safetensors", "", {"concurency": 1})


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("method", ["create_model_config", "create_speculative_config"])
def test_the_config_of_a_model_in_a_store_is_mirrored(method: str, vllm: FakeVllm, tmp_path: Path) -> None:
    register()
    arguments = vllm.module("vllm.engine.arg_utils").EngineArgs("s3://models/tiny", "headrace", tmp_path / "mirror")
    getattr(arguments, method)()
    assert {file.name for file in (tmp_path / "mirror").glob("*.*") if file.is_file()} == {
        "config.json",
        "model.safetensors.index.json",
    }
    assert vllm.pulled == []


@pytest.mark.parametrize(("is_installed", "by_theirs"), [(True, True), (False, False)])
def test_runais_package_mirrors_for_its_own_formats_where_it_is_installed(
    is_installed: bool, by_theirs: bool, vllm: FakeVllm, store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_installed:
        (tmp_path / "packages" / "runai_model_streamer").mkdir(parents=True)
        (tmp_path / "packages" / "runai_model_streamer" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / "packages")
    register()
    arguments = vllm.module("vllm.engine.arg_utils").EngineArgs("s3://models/tiny", "runai_streamer", tmp_path / "mirror")
    arguments.create_model_config()
    assert bool(vllm.pulled) == by_theirs
    assert (tmp_path / "mirror" / "config.json").exists() != by_theirs
    monkeypatch.setenv("HEADRACE_VLLM_TAKEOVER", "1")
    arguments.create_model_config()
    assert (tmp_path / "mirror" / "config.json").exists()
    assert store.requests


def test_whether_embeddings_are_tied_is_looked_up_in_the_store(
    vllm: FakeVllm, store: S3Server, folder: Path, tmp_path: Path
) -> None:
    register()
    has_lm_head = vllm.module("vllm.config.model").checkpoint_has_lm_head
    verified(vllm, "headrace", "s3://models/tiny", model=str(tmp_path))
    assert has_lm_head(str(tmp_path), revision=None) is False
    assert store.requests
    mirrored = {"weight_map": {"lm_head.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(mirrored))
    assert has_lm_head(str(tmp_path)) is True
    assert has_lm_head("another/model") is True  # as vLLM says
    assert folder.exists()


def test_sharded_files_do_not_tell_whether_embeddings_are_tied(vllm: FakeVllm, tmp_path: Path) -> None:
    register()
    has_lm_head: Callable[..., Any] = vllm.module("vllm.config.model").checkpoint_has_lm_head
    verified(vllm, "headrace_sharded", "", model=str(tmp_path))
    assert has_lm_head(str(tmp_path)) is None
    verified(vllm, "headrace", "", model=str(tmp_path))
    assert has_lm_head(str(tmp_path)) is True


# -- ranks ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forkserver() -> None:
    prepare_ranks()


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load_on_rank(rank: int, place: str, own: list[list[str]], shared_file: bool) -> tuple[dict[str, bytes], list[str]]:
    options = headrace.Options(peer_timeout_s=20)
    checkpoint = open_weights(place, patterns=None, ignored=(), index_from=None, metadata=None, verify=None, options=options)
    others = {name for names in own for name in names} - set(own[rank])
    log, handler = logging.getLogger("test"), Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    pairs = stream_weights(
        checkpoint,
        set(CONTENTS) - others,
        own=own[rank],
        device="cpu",
        places={"file:b.safetensors": "shared-cpu"} if shared_file else {},
        group=dist.group.WORLD,
        is_demanded=True,
        dtype=None,
        log=log,
    )
    return {name: bytes_of(tensor) for name, tensor in pairs}, handler.lines


@pytest.mark.slow
@pytest.mark.usefixtures("forkserver")
@pytest.mark.leaky_ok(reason="the server that ranks are forked from stays")
def test_ranks_share_what_all_of_them_want_and_read_their_own_experts(folder: Path) -> None:
    own = [["layers.0.experts.0.up.weight"], ["layers.0.experts.1.up.weight"]]
    read = 0
    for rank, outcome in enumerate(run_ranks(2, load_on_rank, str(folder), own, False)):
        assert outcome is not None
        assert outcome.error is None, outcome.trace
        tensors, lines = outcome.value
        expected = set(CONTENTS) - set(own[1 - rank])
        assert tensors == {name: CONTENTS[name].data for name in expected}
        shared, mine = (int(re.search(r"([\d,]+) bytes read", line)[1].replace(",", "")) for line in lines)  # type: ignore[index]
        assert mine == len(CONTENTS[own[rank][0]].data)
        read += shared
    nbytes = {name: len(entry.data) for name, entry in CONTENTS.items()}
    wanted = sum(nbytes.values()) - sum(nbytes[names[0]] for names in own)
    assert wanted <= read <= sum(nbytes.values())  # small gaps are read along, and nothing twice


@pytest.mark.slow
@pytest.mark.usefixtures("forkserver")
@pytest.mark.leaky_ok(reason="the server that ranks are forked from stays")
def test_a_file_for_memory_in_common_is_read_by_one_rank_and_given_to_all(folder: Path) -> None:
    for outcome in run_ranks(2, load_on_rank, str(folder), [[], []], True):
        assert outcome is not None
        assert outcome.error is None, outcome.trace
        assert outcome.value[0] == {name: entry.data for name, entry in CONTENTS.items()}


def demand_what_a_group_cannot(rank: int, place: str, is_demanded: bool) -> dict[str, bytes]:
    options = headrace.Options(peer_timeout_s=20, mmap="require")
    checkpoint = open_weights(place, patterns=None, ignored=(), index_from=None, metadata=None, verify=None, options=options)
    assert rank in (0, 1)
    pairs = stream_weights(
        checkpoint,
        set(CONTENTS),
        own=(),
        device="cpu",
        places={},
        group=dist.group.WORLD,
        is_demanded=is_demanded,
        dtype=None,
        log=logging.getLogger("test"),
    )
    return {name: bytes_of(tensor) for name, tensor in pairs}


@pytest.mark.slow
@pytest.mark.usefixtures("forkserver")
@pytest.mark.leaky_ok(reason="the server that ranks are forked from stays")
@pytest.mark.parametrize("is_demanded", [False, True])
def test_where_a_group_cannot_share_each_rank_reads_unless_sharing_was_demanded(is_demanded: bool, folder: Path) -> None:
    outcomes = run_ranks(2, demand_what_a_group_cannot, str(folder), is_demanded)
    for outcome in outcomes:
        assert outcome is not None
        if is_demanded:
            assert isinstance(outcome.error, (OptionError, PeerError))
        else:
            assert outcome.error is None, outcome.trace
            assert outcome.value == {name: entry.data for name, entry in CONTENTS.items()}


def test_ranks_that_are_not_to_share_say_so(vllm: FakeVllm, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    vllm.tp.world_size = 2
    with caplog.at_level(logging.INFO, logger="vllm.headrace"):
        assert names_read(loader({"distributed": False}), ModelConfig(str(folder))) == set(CONTENTS)
    assert "distributed is false" in caplog.text


def test_concurrency_and_memory_limit_are_of_the_node(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    from headrace.integrations.vllm._loader import options_of

    vllm.tp.world_size = 4
    assert options_of(LoaderSettings()).local_ranks == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert options_of(LoaderSettings()).local_ranks is None  # the environment says it
