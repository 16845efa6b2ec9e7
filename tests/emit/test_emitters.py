import pytest

from autobatch.emit import default_file, emit, emitters
from autobatch.errors import UsageError
from tests import plans


def test_the_built_in_formats_come_through_the_entry_point_group():
    assert {"env", "script"} <= set(emitters())


def test_an_unknown_format_names_those_there_are():
    with pytest.raises(UsageError, match="use one of env, script"):
        emit(plans.saved(), "yaml")


def test_a_third_party_format_is_found_by_its_entry_point(tmp_path, monkeypatch):
    (tmp_path / "shouting.py").write_text("def emit(plan):\n    return f'{plan.micro_batch}!'\n")
    info = tmp_path / "shouting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[autobatch.emitters]\nshout = shouting:emit\n")
    monkeypatch.syspath_prepend(tmp_path)
    plan = plans.saved()
    assert emit(plan, "shout") == f"{plan.micro_batch}!"
    assert default_file("shout") == "autobatch.shout.txt"
