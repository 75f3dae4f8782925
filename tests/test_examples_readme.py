"""The list of examples and the folder say the same."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_example_is_listed_and_every_listed_one_is_there(
    project_root: Path,
) -> None:
    folder = project_root / "examples"
    text = (folder / "README.md").read_text()
    commands = set(re.findall(r"python examples/(\w+\.py)", text))
    listed = commands | set(re.findall(r"`(\w+\.py)`", text))
    assert listed == {path.name for path in folder.glob("*.py")}
    # What is to be run can be: it has an exit status.
    for name in {*commands, "prefill_decode.py"}:
        assert "sys.exit(main())" in (folder / name).read_text(), name
