"""Looks into a wheel, and imports it where it is installed: `python check_wheel.py WHEEL`."""

import sys
import zipfile

import megatron_balance

with zipfile.ZipFile(sys.argv[1]) as archive:
    names = archive.namelist()
strangers = [name for name in names if name.split("/")[0].split("-")[0] != "megatron_balance"]
assert not strangers, f"the wheel holds more than the package: {strangers}"
assert "megatron_balance/py.typed" in names, "the wheel lacks py.typed"
assert "megatron_balance/report/assets/page.js" in names, "the wheel lacks the page's assets"
assert any(name.endswith("licenses/LICENSE") for name in names), "the wheel lacks the licence"

missing = [name for name in megatron_balance.__all__ if not hasattr(megatron_balance, name)]
assert not missing, f"public names that do not exist: {missing}"
heavy = {"torch", "megatron", "transformers", "rich"} & set(sys.modules)
assert not heavy, f"importing megatron_balance loads {sorted(heavy)}"
assert sys.prefix in megatron_balance.__file__, f"imported from {megatron_balance.__file__}, not from the wheel"
