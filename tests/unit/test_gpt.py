"""The GPT's gradient, its samples, and the settings of its training."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mpicoll.train.buckets import Flat
from mpicoll.train.nn import Draw

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture
def job(monkeypatch):
    monkeypatch.syspath_prepend(str(JOBS))
    return importlib.import_module


@pytest.fixture
def load(job):
    return job("gpt_config").load


@pytest.fixture
def error(job):
    return job("settings").ConfigError


def test_the_gradient_agrees_with_differences(job):
    random = np.random.default_rng(1)
    model = job("gpt").GPT(layers=2, heads=2, width=4, context=3, dropout=0.2, seed=2, dtype=np.float64)
    model.params.flat[:] = random.standard_normal(model.params.flat.size) / 2
    windows, order = random.integers(0, 6, (3, 4), np.uint8), []
    loss, saved = model.forward(windows, Draw(1, 2))
    gradients = Flat(model.stack.shapes, np.float64)
    model.backward(saved, 0.3, gradients, order.append)
    assert (
        sorted(order) == sorted(model.params) and order[0].startswith("head.") and order[-1] == "bytes.weight"
    )
    for i in [*np.flatnonzero(gradients.flat)[::9], *np.flatnonzero(gradients.flat == 0)[::99]]:
        losses = []
        for change in 1e-5, -2e-5:
            model.params.flat[i] += change
            losses.append(model.forward(windows, Draw(1, 2))[0])
        model.params.flat[i] += 1e-5
        assert 0.3 * (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradients.flat[i], rel=1e-5, abs=1e-8)


def test_an_untrained_gpt_knows_nothing(job):
    model = job("gpt").GPT(layers=1, heads=1, width=4, context=8)
    loss, _ = model.forward(np.arange(18, dtype=np.uint8).reshape(2, 9))
    assert loss == pytest.approx(16 * np.log(256), rel=1e-5)
    other = job("gpt").GPT(layers=1, heads=1, width=4, context=8, seed=2)
    assert not np.array_equal(model.params.flat, other.params.flat)


@pytest.mark.parametrize("prompt", [b"", b"def ", b"longer than the context"])
def test_a_sample_starts_with_the_prompt(job, prompt):
    model = job("gpt").GPT(layers=1, heads=1, width=4, context=8)
    text = model.sample(prompt, 20, seed=1)
    assert text.startswith(prompt or b"\n") and len(text) == len(prompt or b"\n") + 20
    assert text == model.sample(prompt, 20, seed=1) != model.sample(prompt, 20, seed=2)


TOML = """
[model]
width = 96
[optimizer]
name = "sgd"
momentum = 0.9
[output]
trace = [2, 3]
"""


def test_toml_and_json_say_the_same(load, tmp_path):
    pytest.importorskip("tomllib")
    (tmp_path / "a.toml").write_text(TOML)
    settings = {
        "model": {"width": 96},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "output": {"trace": [2, 3]},
    }
    (tmp_path / "a.json").write_text(json.dumps(settings))
    config = load(tmp_path / "a.toml")
    assert config == load(tmp_path / "a.json") != load(None)
    assert (config.model.width, config.model.layers, config.output.trace) == (
        96,
        load(None).model.layers,
        (2, 3),
    )


def test_without_tomllib_json_is_suggested(load, error, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    (tmp_path / "a.toml").write_text(TOML)
    with pytest.raises(error, match=r"a.toml: TOML needs Python 3.11 or newer; write the same .* as JSON"):
        load(tmp_path / "a.toml")


def test_the_file_in_the_tree_holds_the_defaults(load):
    pytest.importorskip("tomllib")
    assert load(JOBS / "gpt.toml") == load(None)


def test_changes_replace_what_the_file_says(load, tmp_path):
    (tmp_path / "a.json").write_text('{"model": {"width": 96}}')
    changes = ["model.width=64", "output.folder=runs/x", "training.steps=1e3", "optimizer.eps=null"]
    config = load(tmp_path / "a.json", changes)
    assert (config.model.width, config.output.folder, config.optimizer.eps) == (64, "runs/x", None)
    assert config.training.steps == 1000 and isinstance(config.training.steps, int)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.widht=3", "unknown key 'model.widht'; did you mean model.width?"),
        ("modle.width=3", "unknown section 'modle'; did you mean model?"),
        ("training.width=1", "unknown key 'training.width'; did you mean model.width?"),
        ("training.zzz=1", "unknown key 'training.zzz'; known are steps, batch,"),
        ("zzz.q=1", "unknown section 'zzz'; known are model, data,"),
        ("zzz", "--set zzz: expected section.key=value"),
        ("model.width=big", "model.width: expected a whole number of at least 1, got 'big'"),
        ("model.width=1.5", "model.width: expected a whole number of at least 1, got 1.5"),
        ("model.heads=true", "model.heads: expected a whole number of at least 1, got True"),
        ("model.heads=null", "model.heads: expected a whole number of at least 1, got None"),
        ("model.dropout=1", "model.dropout: expected a number from 0 to below 1, got 1"),
        ("optimizer.lr=NaN", "optimizer.lr: expected a number above 0, got nan"),
        ("optimizer.lr=[]", r"optimizer.lr: expected a number above 0, got \[\]"),
        ("optimizer.name=adm", "optimizer.name: expected one of adam, adamw, lamb, lars, sgd, got 'adm'"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected two numbers from 0 to below 1"),
        ("output.plot=1", "output.plot: expected true or false, got 1"),
        ("output.prompt=1", "output.prompt: expected text, got 1"),
        ("model.width=130", "model.width = 130 is no multiple of model.heads = 4"),
        ("optimizer.momentum=0.9", "optimizer.momentum is for lars and sgd, but optimizer.name = 'adamw'"),
        (
            "communication.rank=3",
            "communication.rank is for powersgd, but communication.compression = 'none'",
        ),
        ("communication.start=-1", "communication.start: expected a whole number of at least 0, got -1"),
        (
            "communication.start=9",
            "communication.start is for int8 and topk and powersgd, but communication.compression = 'none'",
        ),
        ("training.batch=2", "training.batch = 2 is too small for 3 ranks: each needs a sequence"),
        ("training.passes=11", "training.passes = 11, but a rank has only 10 sequences per step"),
        ("training.steps=5", "training.evaluations = 10, but training.steps = 5"),
        ("output.trace=[3, 1]", r"output.trace = \[3, 1\] is no range of steps from 1 to"),
        ("output.trace=[1, 9999]", r"output.trace = \[1, 9999\] is no range of steps from 1 to"),
        ("checkpoint.every=9999", "checkpoint.every = 9999, but training.steps ="),
        ("optimizer.final=1", "optimizer.final = 1 is above optimizer.lr"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_key(load, error, change, message):
    with pytest.raises(error, match=message.replace("?", r"\?").replace("(", r"\(")):
        load(None, [change], ranks=3)


def test_contradictions_of_several_keys(load, error):
    sgd = ["optimizer.name=sgd"]
    with pytest.raises(error, match="optimizer.nesterov needs an optimizer.momentum above 0"):
        load(None, [*sgd, "optimizer.nesterov=true"])
    with pytest.raises(
        error, match="optimizer.betas is for adam and adamw and lamb, but optimizer.name = 'sgd'"
    ):
        load(None, [*sgd, "optimizer.betas=[0.9, 0.99]"])
    with pytest.raises(error, match="communication.start = 1000, but training.steps = 1000"):
        load(None, ["communication.compression=topk", "communication.start=1000"])
    with pytest.raises(
        error, match="data.file names a packed text; data.cache and data.files are for packing"
    ):
        load(None, ["data.file=a.h5", "data.files=3"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json: Expecting property name .* line 1 column 2"),
        ("a.json", '{"model": {"width": 1, "width": 2}}', "a.json: key 'width' comes twice"),
        ("a.json", "[1]", r"a.json: expected sections with keys, got \[1\]"),
        ("a.json", '{"model": 3}', "a.json: model: expected a section with keys, got 3"),
        ("a.json", b"\xff", "a.json: .*utf-8"),
        ("a.toml", "[model\n", "a.toml: .* line 1"),
        ("a.yaml", "", "a.yaml: expected a name that ends in .json or .toml"),
        ("a.json", None, "a.json: No such file or directory"),
    ],
)
def test_files_that_cannot_be_read(load, error, tmp_path, name, content, message):
    if name.endswith("toml"):
        pytest.importorskip("tomllib")
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error, match=message):
        load(tmp_path / name)
