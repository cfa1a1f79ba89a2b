"""The bill of materials is of the locked dependencies."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_bill_of_materials_lists_what_is_locked():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    locked = {tuple(line.split("==")) for line in lines if "==" in line}

    components = json.loads((ROOT / "bom.json").read_text(encoding="utf-8"))["components"]

    listed = {(component["name"], component["version"]) for component in components}
    assert listed == locked
    assert len(locked) > 40
