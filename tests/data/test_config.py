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
    DataConfig(kind="tokens", paths=("a.bin", "b.bin"), weights=(2, 0.5), tokenizer="none", vocab_size=9, end_token=8),
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
        ({"kind": "web"}, ValueError, "data kind must be one of stdlib, text, zarr, tokens, got 'web'"),
        ({"kind": "text", "path": "a", "group": "tree"}, ValueError, "data group must be one of file, folder"),
        ({"kind": "text"}, ValueError, "data kind 'text' needs a path"),
        ({"path": "a"}, ValueError, "data path does not apply to kind 'stdlib', got 'a'"),
        ({"group": "folder"}, ValueError, "data group does not apply to kind 'stdlib'"),
        ({"storage_options": {"token": "anon"}}, ValueError, "storage_options does not apply to kind 'stdlib'"),
        ({"kind": "text", "path": "a", "suffixes": ["py"]}, ValueError, "suffixes must be .* dot, got .'py'"),
        ({"held_out": 0}, ValueError, "data held_out must be above 0 and below 1, got 0"),
        ({"held_out": 1.0}, ValueError, "data held_out must be above 0 and below 1, got 1.0"),
        ({"held_out": "0.1"}, TypeError, "data held_out must be int or float, got '0.1'"),
        ({"seed": -1}, ValueError, "data seed must not be negative, got -1"),
        ({"seed": True}, TypeError, "data seed must be int, got True"),
        ({"pack": "no"}, TypeError, "data pack must be bool, got 'no'"),
        ({"vocab_size": 0}, ValueError, "data vocab_size must be positive, got 0"),
        ({"held_out_path": ""}, ValueError, "data held_out_path cannot be empty"),
        ({"tokenizer": ""}, ValueError, "data tokenizer cannot be empty"),
        ({"tokenizer": "none"}, ValueError, "tokenizer 'none' is for kind 'zarr'"),
        ({"kind": "zarr", "path": "a", "tokenizer": "none"}, ValueError, "'none' needs vocab_size"),
        ({"kind": "text", "path": "a", "end_token": 1}, ValueError, "end_token does not apply to kind 'text', got 1"),
        ({"kind": "zarr", "path": "a", "text_field": "b"}, ValueError, "text_field does not apply to kind 'zarr'"),
        ({"kind": "text", "path": "a", "text_field": 1}, TypeError, "data text_field must be str, got 1"),
        ({"paths": ["a"], "weights": [1]}, ValueError, "data paths does not apply to kind 'stdlib'"),
        (
            {"kind": "text", "path": "a", "paths": ["b"], "weights": [1]},
            ValueError,
            r"data takes path or paths, got 'a' and \['b'\]: set one to none",
        ),
        ({"kind": "text", "paths": ["a", "b"], "weights": [1]}, ValueError, r"for each of paths, got \[1\] for"),
        ({"kind": "text", "path": "a", "weights": [1]}, ValueError, r"for each of paths, got \[1\] for \[\]"),
        ({"kind": "text", "paths": ["a"], "weights": [0]}, ValueError, "weights must be a number above 0"),
        ({"kind": "text", "paths": ["a"], "weights": ["1"]}, TypeError, "weights must be numbers, got .'1'"),
        ({"kind": "text", "paths": [""], "weights": [1]}, TypeError, "paths must be strings that are not empty"),
        ({"kind": "tokens", "path": "a"}, ValueError, "data kind 'tokens' holds tokens already"),
        ({"kind": "tokens", "path": "a", "tokenizer": "bytes", "end_token": -1}, ValueError, "must not be neg"),
        ({"kind": "zarr", "path": "a"}, ValueError, "data kind 'zarr' holds tokens already"),
    ],
)
def test_bad_values_are_refused_in_one_line(values, error, message):
    with pytest.raises(error, match=message):
        DataConfig.from_dict(values)
