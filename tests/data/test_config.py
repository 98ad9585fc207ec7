import json

import pytest

from sympow.data import DataConfig

CONFIGS = [
    DataConfig(),
    DataConfig(kind="text", path="books", tokenizer="bytes", group="folder", suffixes=(".py",), held_out=0.2),
    DataConfig(
        kind="zarr",
        path="s3://b/a",
        tokenizer="none",
        vocab_size=50257,
        storage_options={"key": "a", "config_kwargs": {"codes": (429, 503)}},
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_through_json_and_back(config):
    assert DataConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_fields_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^unknown data field 'tokeniser'; did you mean 'tokenizer'\? known: "):
        DataConfig.from_dict({"tokeniser": "bytes"})


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"kind": "web"}, ValueError, "data kind must be one of stdlib, text, zarr, got 'web'"),
        (
            {"kind": "text", "path": "a", "group": "tree"},
            ValueError,
            "data group must be one of file, folder",
        ),
        ({"kind": "text"}, ValueError, "data kind 'text' needs a path"),
        ({"path": "a"}, ValueError, "data path does not apply to kind 'stdlib', got 'a'"),
        ({"group": "folder"}, ValueError, "data group does not apply to kind 'stdlib'"),
        (
            {"storage_options": {"token": "anon"}},
            ValueError,
            "storage_options does not apply to kind 'stdlib'",
        ),
        ({"kind": "text", "path": "a", "suffixes": ["py"]}, ValueError, "suffixes must be .* dot, got .'py'"),
        ({"held_out": 0}, ValueError, "data held_out must be above 0 and below 1, got 0"),
        ({"held_out": 1.0}, ValueError, "data held_out must be above 0 and below 1, got 1.0"),
        ({"held_out": "0.1"}, TypeError, "data held_out must be int or float, got '0.1'"),
        ({"seed": -1}, ValueError, "data seed must not be negative, got -1"),
        ({"seed": True}, TypeError, "data seed must be int, got True"),
        ({"pack": "no"}, TypeError, "data pack must be bool, got 'no'"),
        ({"vocab_size": 0}, ValueError, "data vocab_size must be positive, got 0"),
        ({"tokenizer": "none"}, ValueError, "tokenizer 'none' is for kind 'zarr'"),
        ({"kind": "zarr", "path": "a", "tokenizer": "none"}, ValueError, "'none' needs vocab_size"),
        ({"kind": "zarr", "path": "a"}, ValueError, "data kind 'zarr' holds tokens already"),
    ],
)
def test_bad_values_are_refused_in_one_line(values, error, message):
    with pytest.raises(error, match=message):
        DataConfig.from_dict(values)
