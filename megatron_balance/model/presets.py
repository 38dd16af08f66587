"""Named models: the part of each public `config.json` that FLOPs depend on, and the published number of parameters.

presets.json holds a row a model: `config`, keys and values of the file that `source` names; `parameters`, as
`published` has them.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

ROWS: dict[str, dict[str, Any]] = json.loads((files(__package__) / "presets.json").read_text(encoding="utf-8"))

PRESETS: dict[str, dict[str, Any]] = {name: row["config"] for name, row in ROWS.items()}
