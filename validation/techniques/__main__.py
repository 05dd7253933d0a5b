"""What each technique saves and costs, predicted and measured: makes studies/techniques/.

python -m validation.techniques predicted > studies/techniques/README.md
python -m validation.techniques measured            (some minutes; on a CPU)
python -m validation.techniques measured --backend cuda --model Qwen/Qwen2.5-1.5B --seq-len 1024
"""

from __future__ import annotations

import argparse

from autotune.errors import AutotuneError
from validation.techniques import measured, predicted


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m validation.techniques", description=(__doc__ or "").partition("\n")[0]
    )
    kinds = parser.add_subparsers(required=True)
    for name, module in {"predicted": predicted, "measured": measured}.items():
        kind = kinds.add_parser(name, description=(module.__doc__ or "").partition("\n")[0])
        module.add_options(kind)
        kind.set_defaults(main=module.main)
    options = parser.parse_args()
    try:
        options.main(options)
    except AutotuneError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
