"""Every architecture that Transformers has for causal language models: writes studies/architectures/.

    python -m validation.architectures traced
    python -m validation.architectures real

`traced` asks whether its training step can be traced, `real` holds such a trace against real Trainer steps
on this CPU; traced.py and real.py say how. Each architecture has a process and a deadline of its own.
"""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

from validation.architectures.each_type import ROOT, in_a_process

STUDY = ROOT / "studies" / "architectures"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m validation.architectures", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("table", choices=("traced", "real"))
    parser.add_argument("types", nargs="*", help="model types [default: all, written to the study]")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    module: Any
    if options.table == "traced":
        from validation.architectures import traced as module
    else:
        from validation.architectures import real as module
    module.prepare()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = options.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    rows = [in_a_process(kind, module.CASES, module.compare) for kind in kinds]
    if options.types:
        print(json.dumps(rows, indent=1))
        return
    text = "\n".join(json.dumps(row) for row in rows)
    (STUDY / module.RECORD).write_text(text + "\n", encoding="utf-8")
    replace_table(options.table, "\n".join(module.table(rows)))


def replace_table(name: str, table: str) -> None:
    """In the README, between its marks."""
    path = STUDY / "README.md"
    begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    path.write_text(f"{before}{begin}{table}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
