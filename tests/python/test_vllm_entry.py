"""The vLLM plug-in without vLLM and without torch: entry point, switches, what is missing."""

import sys
import tomllib
import types
from pathlib import Path

import pytest

import twostep_vllm
from twostep_vllm.framework import Missing, find, need
from twostep_vllm.switches import VARIABLES, Switches


def test_the_entry_point_is_there():
    project = tomllib.loads((Path(twostep_vllm.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, function = project["entry-points"]["vllm.general_plugins"]["twostep"].split(":")
    assert callable(getattr(sys.modules[module], function))
    tested = [line.removeprefix("vllm==") for line in project["optional-dependencies"]["tested"]]
    assert tuple(tested) == twostep_vllm.framework.TESTED


def test_every_part_has_a_switch():
    assert Switches.of_environment({}) == Switches() and not Switches().off()
    for part, variable in VARIABLES.items():
        for value, on in (("0", False), ("1", True), ("", True)):
            assert getattr(Switches.of_environment({variable: value}), part) is on
        assert Switches.of_environment({variable: "0"}).off() == [variable]
        with pytest.raises(ValueError, match=f"{variable} = 'no'; accepted: 0 and 1"):
            Switches.of_environment({variable: "no"})


def test_what_is_missing_is_named():
    with pytest.raises(Missing, match="^collections.Missing$"):
        find("collections", "Missing")
    with pytest.raises(Missing, match="^no_such_module.name$"):
        find("no_such_module", "name")
    owner = types.SimpleNamespace(a=types.SimpleNamespace(b=1))
    assert need(owner, "a.b") == 1 and need(owner, "a", "a.b") == [owner.a, 1]
    with pytest.raises(Missing, match="^SimpleNamespace.a.c$"):
        need(owner, "a.b", "a.c")


def test_without_vllm_register_warns_once_and_changes_nothing(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", None)
    monkeypatch.delenv("TWOSTEP_VLLM", raising=False)
    twostep_vllm.register()
    assert "vllm.v1.worker.worker_base.WorkerWrapperBase is missing" in caplog.text and len(caplog.records) == 1
    assert twostep_vllm._hooked is None
